"""Tokens to text, as they come."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class TextStream:
    """Text of one sequence: whole characters only, and nothing that a stop string may still turn out to take back.

    tokenizer: decodes ids. stops: strings that end the text; what they match is no part of it.
    """

    def __init__(self, tokenizer: Any, stops: Sequence[str] = (), skip_special: bool = True) -> None:
        self._decode, self._stops = _decoder(tokenizer, skip_special), tuple(stops)
        self._tokens: list[int] = []
        self._given = 0  # tokens whose text has been taken
        self._context = 0  # where the text that decoding needs before them begins
        self._held = ""  # text that may be the beginning of a stop string
        self.stopped = False
        """Whether a stop string has come: nothing more will."""

    def add(self, token: int) -> str:
        """The text that a token completes, perhaps none."""
        if self.stopped:
            return ""
        self._tokens.append(token)
        # A token's text depends on those before it (leading spaces), so both sides are decoded with them.
        before = self._decode(self._tokens[self._context : self._given])
        now = self._decode(self._tokens[self._context :])
        if now.endswith("\ufffd") or len(now) <= len(before):
            return ""
        self._context, self._given = self._given, len(self._tokens)
        return self._release(now[len(before) :])

    def end(self) -> str:
        """What was held back, when nothing more comes. Bytes of a character that never came are left as U+FFFD."""
        if self.stopped:
            return ""
        before = self._decode(self._tokens[self._context : self._given])
        rest = self._release(self._decode(self._tokens[self._context :])[len(before) :])
        if not self.stopped:
            rest, self._held = rest + self._held, ""
        return rest

    def _release(self, text: str) -> str:
        text = self._held + text
        if not self._stops:
            return text
        found = [(at, stop) for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)[0]]
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _decoder(tokenizer: Any, skip_special: bool) -> Callable[[list[int]], str]:
    """What decodes ids as the tokenizer's `decode` does: the library's own call where that does nothing else, in a
    fifth of the time."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    decode = tokenizer.decode if backend is None or tokenizer.clean_up_tokenization_spaces else backend.decode
    return lambda tokens: str(decode(tokens, skip_special_tokens=skip_special))


def _overlap(text: str, stop: str) -> int:
    """How much of the end of a text is the beginning of a stop string."""
    for size in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:size]):
            return size
    return 0
