"""Prompts to compare servings by."""

from __future__ import annotations

from pathlib import Path

import msgspec

from oddrank.errors import OddrankError
from oddrank.verify.served.answers import Prompt

SHORT = [
    Prompt("capital", "What is the capital of Australia? Answer with one word."),
    Prompt("arithmetic", "What is 17 * 23? Answer with the number only."),
    Prompt("sequence", "Continue the sequence with the next four numbers: 2, 3, 5, 7, 11, 13,"),
    Prompt("spelling", 'Spell the word "necessary" backwards, letter by letter, with hyphens between the letters.'),
    Prompt("translation", "Translate into French: The weather is fine today and we are going to the market."),
    Prompt("code", "Write a Python function that returns the n-th Fibonacci number. Only the code."),
    Prompt("logic", "All bloops are razzies and all razzies are lazzies. Are all bloops lazzies? Answer yes or no."),
    Prompt("json", 'Give a JSON object with the keys "name", "year" and "country" for the Eiffel Tower. Only JSON.'),
    Prompt("units", "How many minutes are there in three and a half days? Answer with the number only."),
    Prompt("list", "Name the planets of the solar system in order from the sun, separated by commas."),
]
"""Ten whose answers are short and hardly a matter of taste."""

LONG = [
    Prompt("explain", "Explain how a four-stroke engine works, stroke by stroke, to a curious teenager.", None, 512),
    Prompt("story", "Write a short story about a lighthouse keeper who finds a message in a bottle.", None, 512),
    Prompt("program", "Write a Python class for a binary search tree with insertion, deletion and an in-order "
           "iterator, then explain its running times.", None, 512),
    Prompt("compare", "Compare the causes and consequences of the French and the American revolutions.", None, 512),
    Prompt("reason", "A train leaves A at 9:00 at 60 km/h towards B, 210 km away. Another leaves B at 9:30 at 90 km/h "
           "towards A. When and where do they meet? Show every step, then check the result.", None, 512),
]  # fmt: skip
"""Five that go on for 512 tokens: a small fault has room to show."""

_SUITES = {"short": SHORT, "long": LONG}


def suite(name: str) -> list[Prompt]:
    """`short`, `long`, or a file: .json (a list) or .jsonl of objects with "prompt" (a text) or "messages", and
    perhaps "name" and "max_tokens"; any other file has a prompt on every line that is not empty. OddrankError where
    it is neither."""
    if name in _SUITES:
        return _SUITES[name]
    path = Path(name)
    try:
        raw = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is not UTF-8"
        raise OddrankError(
            f'There is no suite "{name}": the suites are short and long, and as a file it cannot be read ({why}).'
        ) from None
    if path.suffix not in (".json", ".jsonl"):
        found = [Prompt(f"line {n}", line.strip()) for n, line in enumerate(raw.splitlines(), 1) if line.strip()]
    else:
        try:
            if path.suffix == ".json":
                entries = msgspec.json.decode(raw, type=list[_Entry])
            else:
                entries = [msgspec.json.decode(line, type=_Entry) for line in raw.splitlines() if line.strip()]
        except msgspec.DecodeError as error:
            raise OddrankError(
                f'{path}: {error}. A suite is a list of objects with "prompt" or "messages", and perhaps "name" and '
                '"max_tokens".'
            ) from None
        found = [_prompt(path, number, entry) for number, entry in enumerate(entries, 1)]
    if not found:
        raise OddrankError(f"{path} has no prompts.")
    names = [prompt.name for prompt in found]
    twice = next((n for n in names if names.count(n) > 1), None)
    if twice is not None:
        raise OddrankError(f'{path} has more than one prompt of the name "{twice}"; names tell them apart.')
    return found


class _Entry(msgspec.Struct, forbid_unknown_fields=True):
    prompt: str | None = None
    messages: list[dict[str, object]] | None = None
    name: str | None = None
    max_tokens: int = 64


def _prompt(path: Path, number: int, entry: _Entry) -> Prompt:
    where = f"{path}, entry {number}"
    if (entry.prompt is None) == (entry.messages is None):
        raise OddrankError(f'{where}: give either "prompt" or "messages".')
    if entry.max_tokens < 1:
        raise OddrankError(f"{where}: max_tokens is {entry.max_tokens} and must be at least 1.")
    return Prompt(entry.name or f"prompt {number}", entry.prompt or "", entry.messages, entry.max_tokens)
