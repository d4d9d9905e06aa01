"""What the formats of 4- and 8-bit integers in 32-bit words share.

They hold codes q of weights (q - zero point) * scale. Their config says what no shape does (the bits, the groups, what
a stored zero point means), so none of their forms is tried under a config of another method.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from oddrank.errors import OddrankError
from oddrank.formats.base import FLOATS, Stored

BITS = (4, 8)
USUAL = 128
"""Columns of a scale group where nothing else is said."""


def word(bits: int, code: int) -> int:
    """A 32-bit word full of one code."""
    return sum(code << shift for shift in range(0, 32, bits))


def middle(bits: int) -> int:
    """The code of zero where no zero point is stored: 8 of 16, 128 of 256."""
    return 1 << (bits - 1)


def group_scale(suffix: str, group: int, shape: Any) -> Stored:
    """A scale per row and `group` columns, 0 = all of them."""
    return Stored(suffix, FLOATS, (1, group), shape, shared=True, row_fill="one", column_fill="one")


def group_name(group: int) -> str:
    return f"g{group}" if group else "channel"


def group_of(name: str) -> int:
    """The group of `group_name`."""
    return int(name[1:]) if name != "channel" else 0


GROUP_NAME = r"(g[1-9]\d{0,4}|channel)"


def checked(bits: object, group: object, what: str) -> tuple[int, int]:
    """(bits, columns of a group or 0 for all) as a config gives them: -1 and null are all columns.

    Raises OddrankError for bits nobody moves, or groups that do not start at words.
    """
    if not isinstance(bits, int) or bits not in BITS:
        raise OddrankError(
            f"quantization_config says {what} of {bits!r} bits; oddrank moves words of {' and '.join(map(str, BITS))} "
            "bits, whose codes never cross a word. A checkpoint quantized to one of those works."
        )
    columns = 0 if group in (None, -1, 0) else group
    if not isinstance(columns, int) or not 0 <= columns < 100_000 or columns % (32 // bits):
        raise OddrankError(
            f"quantization_config says {what} with a scale per group of {group!r} columns; {bits}-bit words hold "
            f"{32 // bits}, so groups must be a multiple of that (32, 64 and 128 are usual), or -1 for whole rows."
        )
    return bits, columns


def overrides(config: dict[str, Any], key: str) -> Iterator[dict[str, Any]]:
    """A config and, for each entry of its dict `key`, the config as that entry changes it."""
    yield config
    found = config.get(key)
    for change in found.values() if isinstance(found, dict) else ():
        if isinstance(change, dict):
            yield {**config, **{k: v for k, v in change.items() if v is not None}}
