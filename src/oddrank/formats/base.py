"""How a logical matrix [..., N, K] is stored: its stored tensors, what one stored entry covers, what means zero.

A format is one file in this folder with a module-level `forms(quantization)` that lists the forms it may take
under a checkpoint's quantization config, and, where those have parameters, `named(name)`. It moves no bytes and decodes
none: entries are copied as raw words, so all a plan needs is each entry's footprint and the words that keep a dummy
silent. Which form a tensor has is found by what is stored; the config is only checked against it.
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
    shape: how the entries are shaped: "nk" all dimensions; "n" without K (which must be 0 = whole); "one" [1] and
        "scalar" [] for one entry over the whole matrix, after any leading dimensions.
    shared: one value serves the whole block (a scale): it may be copied to, or refined into, any block whose real
        elements all come from it. Otherwise the entry packs one value per element, in a fixed order.
    row_fill, column_fill: what dummy rows (N) hold, and dummy columns (K) of real rows.
    optional: may be absent.
    """

    suffix: str
    dtypes: tuple[str, ...]
    block: tuple[int, int] = (1, 1)
    shape: Literal["nk", "n", "one", "scalar"] = "nk"
    shared: bool = False
    row_fill: Fill = 0
    column_fill: Fill = 0
    optional: bool = False


class Format(msgspec.Struct, frozen=True):
    """A storage format: `stored[0]` holds the matrix's values, the others what decodes them.

    zero_word: the raw word of stored[0] whose every element decodes to zero, whatever finite the scales are.
    for_vectors: also stores what is not a matrix (norms, biases, convolutions).
    """

    name: str
    stored: tuple[Stored, ...]
    zero_word: int = 0
    for_vectors: bool = False


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
    """The forms a tensor may be stored in under a checkpoint's `quantization_config`, dense first."""
    found = dict(formats())
    for module in _modules() if quantization else ():
        found |= {f.name: f for f in module.forms(quantization) if f.name not in found}
    return list(found.values())


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
