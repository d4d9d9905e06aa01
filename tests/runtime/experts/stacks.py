"""One layer of experts in every published storage, cut by hand for each rank, and what it computes by numpy.

Stored words come from `formats.dialects` and are decoded by `formats.codec`, both apart from the package.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from formats.codec import F64, Raw, numbers
from formats.dialects import DIALECTS, matrix, stored, to_raw

from oddrank.runtime.experts import CacheSize, ExpertOptions, Experts, ExpertShare
from oddrank.runtime.parallel import Group, SoloGroup
from oddrank.transform.slice import StoredMatrix

E, H, W = 6, 160, 320
"""Experts, hidden, width. Neither is whole blocks of 128; the last rank of three has the short one."""

AT = "model.layers.3.mlp.experts"
CUTS = {1: [(0, 320)], 2: [(0, 128), (128, 320)], 3: [(0, 128), (128, 256), (256, 320)]}
"""Ranks -> which channels each has, on block borders of every format."""

FINE = {2: [(0, 192), (192, 320)], 3: [(0, 64), (64, 192), (192, 320)]}
"""On borders of 64 x 64 blocks only."""

Cut = tuple[int, int]


class Stack(NamedTuple):
    """tensors: stored name -> words. matrices: [expert]["gate" | "up" | "down"], decoded. format, blocks: of all."""

    format: str
    blocks: dict[str, tuple[int, int]]
    tensors: dict[str, Raw]
    matrices: list[dict[str, F64]]
    stacked: bool


DENSE = "dense"
KINDS = (DENSE, *DIALECTS)


@cache
def stack(kind: str) -> Stack:
    """Experts stored one by one; every one with values, scales and global scales of its own."""
    tensors: dict[str, Raw] = {}
    matrices: list[dict[str, F64]] = []
    for e in range(E):
        made = {}
        for i, (name, shape) in enumerate((("gate", (W, H)), ("up", (W, H)), ("down", (H, W)))):
            x = matrix(*shape, seed=10 * e + i) * np.float32(0.03 * (1 + e + i))
            if kind == DENSE:
                parts = {".weight": to_raw(torch.from_numpy(x).bfloat16())}
                made[name] = numbers(parts[".weight"])
            else:
                parts = stored(DIALECTS[kind], x)
                made[name] = DIALECTS[kind].decode(parts)
            tensors |= {f"{AT}.{e}.{name}_proj{suffix}": raw for suffix, raw in parts.items()}
        matrices.append(made)
    if kind == DENSE:
        return Stack(DENSE, {".weight": (1, 1)}, tensors, matrices, stacked=False)
    d = DIALECTS[kind]
    return Stack(d.format, _blocks(kind), tensors, matrices, stacked=False)


def _blocks(kind: str) -> dict[str, tuple[int, int]]:
    """Footprints of the stored parts by hand: two columns a byte of four-bit values, the dialect's block of scales."""
    d = DIALECTS[kind]
    suffixes = {name.removeprefix(f"{AT}.0.gate_proj") for name in stack_names(kind)}
    four = d.format.startswith(("nvfp4", "mxfp4"))
    found = {}
    for suffix in suffixes:
        if suffix in (".weight", ".weight_packed"):
            found[suffix] = (1, 2) if four else (1, 1)
        elif suffix in (".weight_scale", ".weight_scale_inv"):
            found[suffix] = d.block
        else:
            found[suffix] = (0, 0)
    return found


@cache
def stack_names(kind: str) -> tuple[str, ...]:
    parts = stored(DIALECTS[kind], matrix(W, H))
    return tuple(f"{AT}.0.gate_proj{suffix}" for suffix in parts)


def stacked(kind: str) -> Stack:
    """The same experts in two tensors a layer and part: [experts, gate over up, ...] and [experts, ...]."""
    one = stack(kind)
    tensors = {}
    for suffix in one.blocks:
        tail = suffix.removeprefix(".weight")
        rows = [[one.tensors[f"{AT}.{e}.{name}_proj{suffix}"] for name in ("gate", "up", "down")] for e in range(E)]
        both = [np.concatenate([gate.words, up.words]) for gate, up, _ in rows]
        dtype = rows[0][0].dtype
        tensors[f"{AT}.gate_up_proj{tail}"] = Raw(dtype, np.stack(both))
        tensors[f"{AT}.down_proj{tail}"] = Raw(dtype, np.stack([down.words for _, _, down in rows]))
    return one._replace(tensors=tensors, stacked=True)


def refined(made: Stack) -> Stack:
    """Scales of 128 x 128 blocks written as those of 64 x 64."""
    tensors = dict(made.tensors)
    for name, raw in made.tensors.items():
        if "scale" in name:
            n, k = (H, W) if "down" in name else (W, H)
            fine = raw.words.repeat(2, -2).repeat(2, -1)[..., : -(-n // 64), : -(-k // 64)]
            tensors[name] = Raw(raw.dtype, np.ascontiguousarray(fine))
    blocks = {suffix: (64, 64) if "scale" in suffix else block for suffix, block in made.blocks.items()}
    return made._replace(tensors=tensors, blocks=blocks)


class HandSlice:
    """A rank's channels [a, b) of every expert, as a rank slice answers. Cut from the words, per stored name."""

    def __init__(self, made: Stack, cut: Cut) -> None:
        self.made = made
        self.tensors = {name: self._cut(name, raw, *cut) for name, raw in made.tensors.items()}
        self.reads: list[str] = []

    def _suffix(self, name: str) -> str:
        tail = name.partition("_proj")[2]
        return ".weight" + tail if self.made.stacked else tail

    def _cut(self, name: str, raw: Raw, a: int, b: int) -> Raw:
        down, block = "down" in name, self.made.blocks[self._suffix(name)]
        step = block[1 if down else 0]
        words = raw.words
        if (a, b) == (0, W) or step == 0 or (down and words.shape[-1] == 1):
            return raw
        axis = words.ndim - 1 if down else int(self.made.stacked)
        if down and step == 1 and block == (1, 0):
            return raw
        index = np.arange(a // step, -(-b // step))
        if not down and self.made.stacked:
            index = np.concatenate([index, index + words.shape[axis] // 2])
        return Raw(raw.dtype, words.take(index, axis=axis))

    def matrix(self, name: str) -> StoredMatrix:
        names = {s: name + (s.removeprefix(".weight") if self.made.stacked else s) for s in self.made.blocks}
        if any(n not in self.tensors for n in names.values()):
            raise KeyError(name)
        return StoredMatrix(self.made.format, names, dict(self.made.blocks))

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].words.shape)

    def dtype(self, name: str) -> str:
        return self.tensors[name].dtype

    def read_into(self, name: str, out: np.ndarray) -> None:
        self.reads.append(name)
        assert out.shape == self.shape(name)
        out[...] = self.tensors[name].words

    def read_rows_into(self, name: str, start: int, out: np.ndarray) -> None:
        self.reads.append(name)
        out[...] = self.tensors[name].words[start : start + len(out)]


def options(kind: str = "resident", slots: int | None = None, load: str = "serial") -> ExpertOptions:
    return ExpertOptions(kind, CacheSize() if slots is None else CacheSize(count=slots), load)


def experts(
    made: Stack,
    cut: Cut,
    chosen: ExpertOptions,
    threads: int = 2,
    group: Group | None = None,
    weights: torch.dtype = torch.float32,
) -> Experts:
    """The loaded experts of the rank that has channels `cut`."""
    part = HandSlice(made, cut)
    share = ExpertShare(chosen, group or SoloGroup(), threads)
    layer = Experts(
        part, AT, experts=E, hidden=H, width=cut[1] - cut[0], activation=torch.nn.functional.silu, weights=weights,
        share=share,
    )  # fmt: skip
    layer.load_own(part)
    return layer


def silu(x: F64) -> F64:
    return x / (1 + np.exp(-x))


def expected(made: Stack, x: F64, weights: F64, ids: np.ndarray) -> F64:
    """Token by token and choice by choice."""
    out = np.zeros_like(x)
    for t, row in enumerate(x):
        for weight, e in zip(weights[t], ids[t], strict=True):
            m = made.matrices[int(e)]
            out[t] += weight * (m["down"] @ (silu(m["gate"] @ row) * (m["up"] @ row)))
    return out


class Routing(NamedTuple):
    x: F64
    weights: F64
    ids: np.ndarray

    def tensors(self, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return torch.from_numpy(self.x).to(dtype), torch.from_numpy(self.weights).to(dtype), torch.from_numpy(self.ids)


def routing(tokens: int = 7, k: int = 2, seed: int = 0) -> Routing:
    rng = np.random.default_rng([tokens, k, seed])
    ids = np.stack([rng.permutation(E)[:k] for _ in range(tokens)])
    weights = rng.uniform(0.1, 1, (tokens, k))
    return Routing(rng.standard_normal((tokens, H)), weights / weights.sum(1, keepdims=True), ids)


def error(found: torch.Tensor, wanted: F64) -> float:
    """Largest difference, of the largest number."""
    return float(np.abs(found.double().numpy() - wanted).max() / np.abs(wanted).max())
