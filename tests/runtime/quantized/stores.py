"""Stored matrices as a rank slice: words made by compressed-tensors or by hand, cut by `formats.moves`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from formats.codec import F64, Parts, Raw
from formats.dialects import DIALECTS, DTYPES, F32, Dialect, Quantize, matrix, stored
from formats.integers import Packed, awq, ct, gptq
from formats.moves import Move, moved

from oddrank.formats.declared import kind_of
from oddrank.layout.executors import RUNTIME
from oddrank.runtime.layers.module import Module
from oddrank.runtime.layers.stored import StoredFormat
from oddrank.runtime.loader import load
from oddrank.runtime.precision import Precision
from oddrank.transform.slice import StoredMatrix

_DTYPES = {theirs: ours for ours, theirs in DTYPES.items()}


def dense(x: np.ndarray[Any, Any], bound: float) -> dict[str, Raw]:
    return {".weight": Raw("F32", x.astype(np.float32).view(np.uint32).copy())}


class Integers(NamedTuple):
    """A packing of integers, as a Dialect has it."""

    format: str
    block: tuple[int, int]
    cut: tuple[int, int]
    quantize: Quantize
    quantization: dict[str, Any]
    packing: Packed

    @classmethod
    def of(cls, packing: Packed) -> Integers:
        def quantize(x: F32, bound: float) -> dict[str, Raw]:
            return packing.quantize(x)

        return cls(packing.format, (1, packing.group), packing.cut, quantize, packing.config, packing)

    def decode(self, parts: Parts, block: tuple[int, int] | None = None) -> F64:
        return self.packing.decode(parts)


PACKED: dict[str, Integers] = {
    "GPTQ": Integers.of(gptq(group=32)),
    "GPTQ, symmetric, groups of 64": Integers.of(gptq(group=64, symmetric=True)),
    "GPTQ, whole rows": Integers.of(gptq(group=0)),
    "GPTQ, version 2": Integers.of(gptq(group=64, v2=True, index=False)),
    "GPTQ, 8 bits": Integers.of(gptq(8, 64)),
    "AWQ": Integers.of(awq(32)),
    "AWQ, whole rows": Integers.of(awq(0)),
    "int4, compressed-tensors": Integers.of(ct(group=32)),
    "int4, compressed-tensors, channels": Integers.of(ct(group=0)),
    "int4, compressed-tensors, asymmetric": Integers.of(ct(group=64, symmetric=False, index="ordered")),
    "int8, compressed-tensors": Integers.of(ct(8, 32)),
    "int8, compressed-tensors, asymmetric": Integers.of(ct(8, 0, symmetric=False)),
}
"""In groups that the matrices of these tests have; AutoRound's are packed as these."""

Stored = Dialect | Integers
SERVED: dict[str, Stored] = {n: d for n, d in DIALECTS.items() if kind_of(d.format) in RUNTIME.formats}
SERVED |= PACKED
EVERY: dict[str, Stored] = {**SERVED, "dense": Dialect("dense", (1, 1), (1, 1), dense, {})}


def tensors(parts: Parts) -> dict[str, torch.Tensor]:
    """The stored words as torch holds them."""
    carriers = {1: np.uint8, 2: np.int16, 4: np.int32, 8: np.int64}
    found = {}
    for suffix, raw in parts.items():
        words = np.ascontiguousarray(raw.words).reshape(raw.words.shape)
        found[suffix] = torch.from_numpy(words.view(carriers[words.dtype.itemsize]).copy()).view(_DTYPES[raw.dtype])
    return found


class Matrix(NamedTuple):
    """One stored matrix, or a rank's part of one. blocks: of the scales, where they are not the dialect's."""

    dialect: Stored
    parts: Parts
    blocks: tuple[int, int] | None = None

    @classmethod
    def of(cls, name: str, n: int, k: int, seed: int = 0) -> Matrix:
        return cls(EVERY[name], stored(EVERY[name], matrix(n, k, seed)))

    def decode(self) -> F64:
        return self.dialect.decode(self.parts, self.blocks)

    def cut(self, rows: Sequence[int] | None, columns: Sequence[int] | None) -> Matrix:
        """These rows or columns (not both), -1 = dummy; blocks of scales are refined to 64 along the cut."""
        n, k = self.decode().shape
        move = Move(
            {"u": n if rows is not None else k}, (("u", 1),) if rows is not None else n,
            (("u", 1),) if columns is not None else k, {"u": list(rows if rows is not None else columns or [])},
        )  # fmt: skip
        blocked = self.dialect.block == (128, 128)
        _, parts = moved(move, self.parts, self.dialect.quantization, {"u": 64} if blocked else None)
        if not blocked:
            return self._replace(parts=parts)
        return self._replace(parts=parts, blocks=(64, 128) if rows is not None else (128, 64))


class Store:
    """Answers as a rank slice does. dense: tensors that are no matrices (biases), by stored name."""

    def __init__(self, matrices: Mapping[str, Matrix], dense: Mapping[str, np.ndarray[Any, Any]] | None = None) -> None:
        self.matrices = dict(matrices)
        self.raw = {name + suffix: raw for name, m in matrices.items() for suffix, raw in m.parts.items()}
        for name, values in (dense or {}).items():
            self.raw[name] = Raw("F32", values.astype(np.float32).view(np.uint32))

    def matrix(self, name: str) -> StoredMatrix:
        m = self.matrices[name]
        blocks = {s: m.blocks for s in m.parts if s.startswith(".weight_scale")} if m.blocks else {}
        return StoredMatrix(m.dialect.format, {s: name + s for s in m.parts}, blocks)  # type: ignore[arg-type]

    def part_of(self, name: str) -> str | None:
        return None

    def names(self) -> list[str]:
        return list(self.raw)

    def shape(self, name: str) -> tuple[int, ...]:
        return self.raw[name].words.shape

    def dtype(self, name: str) -> str:
        return self.raw[name].dtype

    def read_into(self, name: str, out: np.ndarray[Any, Any]) -> None:
        out[...] = self.raw[name].words

    def read_rows_into(self, name: str, start: int, out: np.ndarray[Any, Any]) -> None:
        out[...] = self.raw[name].words[start : start + len(out)]

    def weights(self, dtype: str = "fp64") -> StoredFormat:
        return StoredFormat(self, Precision.of(dtype))

    def fill(self, module: Module) -> None:
        part: Any = self
        load(module, part)
