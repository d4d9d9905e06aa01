"""How a logical matrix [..., N, K] is stored: its stored tensors, what one stored entry covers, what means zero.

A format is one file in this folder with `ABOUT`, what it is called and written by; `forms(quantization)`, the forms it
may take under a checkpoint's quantization config ({}: its usual ones); and, where those have parameters, `named(name)`.
It moves no bytes and decodes none: entries are copied as raw words, so all a plan needs is each entry's footprint and
the words that keep a dummy silent. Which form a tensor has is found by what is stored; the config gives parameters that
no shape tells, and is checked against it. `forms` raises OddrankError for a packing that the config names and nobody
moves.
"""

from __future__ import annotations

import importlib
import pkgutil
from functools import cache
from types import ModuleType
from typing import Any, Literal

import msgspec

Fill = int | Literal["one"]
"""A raw storage word, or the number 1.0 in whatever dtype the tensor has."""

ONE = {"F64": 0x3FF0000000000000, "F32": 0x3F800000, "BF16": 0x3F80, "F16": 0x3C00, "F8_E4M3": 0x38, "F8_E8M0": 0x7F}
"""The word for 1.0 by safetensors dtype (IEEE 754; OCP 8-bit and MX formats)."""

FLOATS = ("BF16", "F16", "F32", "F64")


class Stored(msgspec.Struct, frozen=True):
    """One stored tensor of a format.

    suffix: replaces the final `.weight` of the dense name (`_scale` instead of `.weight_scale` is appended to names
        without one, as stacked experts have).
    dtypes: safetensors dtype names it may have.
    block: logical elements one stored entry covers along (N, K); 0 stands for the whole dimension. Leading
        dimensions (stacked experts) are always 1. A vector's only dimension is its N.
    shape: how the entries are shaped: "nk" all dimensions; "kn" the last two exchanged; "n" without K (which must be
        0 = whole); "k" without N; "one" [1] and "scalar" [] for one entry over the whole matrix, after any leading
        dimensions.
    inner: words of an entry that lie in a last dimension of their own (16 bytes a group of 32 columns); 0 = none.
    shared: one value serves the whole block (a scale): it may be copied to, or refined into, any block whose real
        elements all come from it. Otherwise the entry packs one value per element, in a fixed order. "k": it packs a
        value a row, each of which serves the block's columns (packed zero points).
    row_fill, column_fill: what dummy rows (N) hold, and dummy columns (K) of real rows.
    rewritten: index metadata that follows from the shape and is written anew where that changes: "sizes", the matrix's
        [N, K], or "groups", the scale group of every column in order.
    optional: may be absent.
    """

    suffix: str
    dtypes: tuple[str, ...]
    block: tuple[int, int] = (1, 1)
    shape: Literal["nk", "kn", "n", "k", "one", "scalar"] = "nk"
    inner: int = 0
    shared: bool | Literal["k"] = False
    row_fill: Fill = 0
    column_fill: Fill = 0
    rewritten: Literal["sizes", "groups"] | None = None
    optional: bool = False

    @property
    def is_block_scale(self) -> bool:
        """One value for several rows and several columns, which finer blocks of the same value may replace."""
        return self.shared is True and min(self.block) > 1


class ZeroPoints(msgspec.Struct, frozen=True):
    """Where a format keeps the codes that mean zero: packed along N, low bits first, in the order of the values' words
    where those are packed along N too.

    suffix: the stored tensor's. bits: of a code. plus: what is added to a stored code (GPTQ's first version keeps them
    less one).
    """

    suffix: str
    bits: int
    plus: int = 0

    def meant(self, word: int) -> int:
        """The word of the codes that a word of zero points stands for."""
        return word + sum(self.plus << shift for shift in range(0, 32, self.bits))


class Format(msgspec.Struct, frozen=True):
    """A storage format: `stored[0]` holds the matrix's values, the others what decodes them.

    zero_word: the raw word of stored[0] whose every element decodes to zero, whatever finite the scales are, and beside
        the fill of the zero points where there are some.
    zero_points: what a code of zero is in each group of real columns; None where it is that of zero_word in all.
    declared: taken only where a quantization config says so: what its words mean is in no shape.
    scattered: its scale groups take their columns from anywhere (GPTQ's activation order), so no column may move.
    for_vectors: also stores what is not a matrix (norms, biases, convolutions).
    passed: suffixes of tensors that a tool writes beside it and readers leave out; they are passed on as they are.
    """

    name: str
    stored: tuple[Stored, ...]
    zero_word: int = 0
    zero_points: ZeroPoints | None = None
    declared: bool = False
    scattered: bool = False
    for_vectors: bool = False
    passed: tuple[str, ...] = ()

    def at(self, suffix: str) -> Stored:
        """The stored tensor of this suffix. KeyError if there is none."""
        for stored in self.stored:
            if stored.suffix == suffix:
                return stored
        raise KeyError(suffix)


class About(msgspec.Struct, frozen=True):
    """What a format's file says of itself, for people: its usual name, and in which dialects it is read."""

    name: str
    dialects: str = ""


def fill_word(fill: Fill, dtype: str) -> int:
    """The raw word of a fill in a dtype."""
    return ONE[dtype] if fill == "one" else int(fill)


@cache
def _modules() -> tuple[ModuleType, ...]:
    import oddrank.formats as package

    found = [importlib.import_module(f"{package.__name__}.{i.name}") for i in pkgutil.iter_modules(package.__path__)]
    return tuple(m for m in found if hasattr(m, "forms"))


@cache
def formats() -> dict[str, Format]:
    """Every format with its usual parameters, by name, dense first."""
    made = [f for module in _modules() for f in module.forms({})]
    return {f.name: f for f in sorted(made, key=lambda f: not f.for_vectors)}


def candidates(quantization: dict[str, Any] | None) -> list[Format]:
    """The forms a tensor may be stored in under a checkpoint's `quantization_config`, dense first.

    Raises OddrankError for a packing that the config names and no format moves.
    """
    found = {name: f for name, f in formats().items() if not f.declared}
    for module in _modules() if quantization else ():
        found |= {f.name: f for f in module.forms(quantization) if f.name not in found}
    return list(found.values())


def described() -> list[tuple[About, list[Format]]]:
    """Every format's file: what it says of itself, and its usual forms; plain numbers first, then by name."""
    made = [(module.ABOUT, list(module.forms({}))) for module in _modules()]
    return sorted(made, key=lambda m: (not any(f.for_vectors for f in m[1]), m[0].name.lower()))


def format_named(name: str) -> Format:
    """The format of a plan's use. A parameter other than the usual is part of the name (`fp8-block-64x64`).
    KeyError for a name no format has."""
    known = formats()
    if name in known:
        return known[name]
    for module in _modules():
        made: Format | None = module.named(name) if hasattr(module, "named") else None
        if made is not None:
            return made
    raise KeyError(name)


def stem(dense_name: str) -> str:
    """The part of a dense name that a format's suffixes are appended to."""
    return dense_name.removesuffix(".weight")
