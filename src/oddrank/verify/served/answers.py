"""What a server answered to a suite of prompts, as a file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec

from oddrank.checkpoint.wholefile import write_whole
from oddrank.errors import OddrankError

FORMAT = "oddrank-capture-1"


class Prompt(msgspec.Struct, frozen=True, omit_defaults=True):
    """text: a user's message, or what is to be continued where the server has no chat. messages: a whole conversation
    instead. max_tokens: of the answer, reasoning included."""

    name: str
    text: str = ""
    messages: list[dict[str, Any]] | None = None
    max_tokens: int = 64


class Candidate(msgspec.Struct, frozen=True, array_like=True):
    """A token that the server might have chosen. id: None where it does not tell. logprob: in nats."""

    text: str
    logprob: float
    id: int | None = None


class Token(msgspec.Struct, frozen=True, omit_defaults=True):
    """A token that the server chose. top: the likeliest at its place, likeliest first, if it told."""

    text: str
    id: int | None = None
    logprob: float | None = None
    top: list[Candidate] = []


class Answer(msgspec.Struct, frozen=True, omit_defaults=True):
    """To one prompt. reasoning and text: as the server split them, whole. tokens: all of the answer, if it told; their
    texts are "" where it told ids alone. error: why there is no answer."""

    prompt: Prompt
    text: str = ""
    reasoning: str = ""
    finish: str = ""
    tokens: list[Token] = []
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    seconds: float = 0.0
    error: str = ""

    @property
    def with_ids(self) -> bool:
        """Whether every token has its id."""
        return bool(self.tokens) and all(token.id is not None for token in self.tokens)


class Capture(msgspec.Struct, frozen=True):
    """format: of the file. api: "chat" or "completions", which was asked. made: UTC, ISO 8601."""

    format: str
    url: str
    model: str
    api: str
    suite: str
    made: str
    answers: list[Answer]

    @property
    def prompts(self) -> list[Prompt]:
        return [answer.prompt for answer in self.answers]


def write_capture(capture: Capture, path: Path) -> None:
    """Whole or not at all. OddrankError where it cannot be written."""
    write_whole(path, msgspec.json.format(msgspec.json.encode(capture), indent=1) + b"\n")


def read_capture(path: Path) -> Capture:
    """OddrankError where the file is not a capture."""
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Capture)
    except OSError as error:
        raise OddrankError(f"{path}: {error.strerror}. Make one with `oddrank capture URL -o FILE`.") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise OddrankError(
            f"{path} is no capture ({error}). Give a file that `oddrank capture` wrote, or the URL of a server."
        ) from None
    if found.format != FORMAT:
        raise OddrankError(f'{path} is a capture of the format "{found.format}"; this oddrank reads "{FORMAT}".')
    return found
