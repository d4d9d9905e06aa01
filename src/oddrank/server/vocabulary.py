"""What single tokens say: their text and their bytes."""

from __future__ import annotations

import re
from functools import cache
from typing import Any, NamedTuple

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class TokenText(NamedTuple):
    """text: with U+FFFD where the token is a part of a character. data: its bytes."""

    text: str
    data: bytes


class Vocabulary:
    """tokenizer: of the model. size: ids that the model knows; those without a token say nothing."""

    def __init__(self, tokenizer: Any, size: int) -> None:
        self.tokenizer, self.size = tokenizer, size
        self._special = frozenset(getattr(tokenizer, "all_special_ids", ()))
        self._known: dict[int, TokenText] = {}
        sample = [t for t in tokenizer.convert_ids_to_tokens(list(range(min(size, len(tokenizer))))) if t]
        self._byte_level = any("\u0120" in token for token in sample)

    def __getitem__(self, token: int) -> TokenText:
        found = self._known.get(token)
        if found is None:
            found = self._known[token] = self._make(token)
        return found

    def _make(self, token: int) -> TokenText:
        raw = self.tokenizer.convert_ids_to_tokens(token) if 0 <= token < len(self.tokenizer) else None
        if not isinstance(raw, str):
            return TokenText("", b"")
        if token in self._special:
            return TokenText(raw, raw.encode())
        if self._byte_level and all(char in _bytes_of_characters() for char in raw):
            data = bytes(_bytes_of_characters()[char] for char in raw)
        elif found := _BYTE.fullmatch(raw):
            data = bytes([int(found[1], 16)])
        else:
            data = raw.replace("\u2581", " ").encode()
        return TokenText(data.decode("utf-8", "replace"), data)


@cache
def _bytes_of_characters() -> dict[str, int]:
    """Byte-level BPE's alphabet (Radford et al., 2019): printable bytes are themselves, the others U+0100 and on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}
