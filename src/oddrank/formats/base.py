"""How a logical matrix [..., N, K] is stored: its stored tensors, what one stored entry covers, what means zero.

A format is one file in this folder with a module-level `FORMAT`. It moves no bytes and decodes none: entries are
copied as raw words, so all a plan needs is each entry's footprint and the words that keep a dummy silent.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache

import msgspec


class Stored(msgspec.Struct, frozen=True):
    """One stored tensor of a format.

    suffix: replaces the final `.weight` of the dense name (appended to names without one).
    block: logical elements one stored entry covers along (N, K); 0 stands for the whole dimension. Leading
        dimensions (stacked experts) are always 1. A vector's only dimension is its N.
    shared: one value serves the whole block (a scale): it may be copied to, or refined into, any block whose real
        elements all come from it. Otherwise the entry packs one value per element, in a fixed order.
    dtypes: safetensors dtype names it may have.
    row_fill, column_fill: the raw storage word for dummy rows (N), and for dummy columns (K) of real rows.
    """

    suffix: str
    dtypes: tuple[str, ...]
    block: tuple[int, int] = (1, 1)
    shared: bool = False
    row_fill: int = 0
    column_fill: int = 0


class Format(msgspec.Struct, frozen=True):
    """A storage format: `stored[0]` holds the matrix's values, the others what decodes them.

    zero_word: the raw word of stored[0] whose every element decodes to zero, whatever finite the scales are.
    for_vectors: also stores what is not a matrix (norms, biases, convolutions).
    """

    name: str
    stored: tuple[Stored, ...]
    zero_word: int = 0
    for_vectors: bool = False


@cache
def formats() -> dict[str, Format]:
    """Every format file in this folder, by name."""
    import oddrank.formats as package

    found: dict[str, Format] = {}
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        fmt = getattr(module, "FORMAT", None)
        if isinstance(fmt, Format):
            found[fmt.name] = fmt
    return found


def format_named(name: str) -> Format:
    return formats()[name]


def stem(dense_name: str) -> str:
    """The part of a dense name that a format's suffixes are appended to."""
    return dense_name.removesuffix(".weight")
