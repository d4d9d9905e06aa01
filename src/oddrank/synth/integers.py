"""How the published releases store integers in 32-bit words: GPTQ, AWQ, AutoRound, compressed-tensors' pack-quantized.

A weight is (code - zero point) * scale, with a scale per row and group of columns. Written from the tools' conventions
(AutoGPTQ 0.7, AutoAWQ 0.2.9, auto-round 0.16, compressed-tensors 0.20) and apart from oddrank.formats.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np

from oddrank.synth.numbers import Floats, Words, from_bf16, to_bf16
from oddrank.synth.schemes import Part, Scheme

GROUP = 128
"""Columns of a scale group in nearly every release."""

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Which of eight rows each nibble of an AWQ word holds, from the lowest."""

_LEAST = np.float32(2**-14)
"""The least step: fp16's smallest normal number."""


class Codes(NamedTuple):
    """codes [n, k] and zero points [n, groups], int64; scales [n, groups], as they are stored."""

    codes: Words
    points: Words
    scales: Floats


def quantize(x: Floats, bits: int, group: int, symmetric: bool, half: bool) -> Codes:
    """group: columns, 0 = all. half: scales in fp16, else in bf16. Zero points are 1 at least: GPTQ keeps them less
    one."""
    n, k = x.shape
    most = (1 << bits) - 1
    grid = x.reshape(n, -1, group or k)
    low, high = np.minimum(grid.min(axis=2), 0), np.maximum(grid.max(axis=2), 0)
    if symmetric:
        high = np.maximum(high, -low)
        low = -high
    step = np.maximum((high - low) / np.float32(most), _LEAST).astype(np.float32)
    scales = step.astype(np.float16).astype(np.float32) if half else from_bf16(to_bf16(step))
    points = np.full(scales.shape, (most + 1) // 2) if symmetric else np.clip(np.rint(-low / scales), 1, most)
    codes = np.clip(np.rint(grid / scales[:, :, None]) + points[:, :, None], 0, most).reshape(n, k)
    return Codes(codes.astype(np.int64), points.astype(np.int64), scales)


def pack(codes: Words, bits: int, axis: int, order: tuple[int, ...] | None = None) -> Words:
    """Codes along an axis in 32-bit words, the low bits first; a last word that is not full ends in zeros."""
    per = 32 // bits
    moved = np.moveaxis(codes, axis, -1).astype(np.uint32)
    moved = np.pad(moved, [(0, 0)] * (moved.ndim - 1) + [(0, -moved.shape[-1] % per)])
    grid = moved.reshape(*moved.shape[:-1], -1, per)
    if order is not None:
        grid = grid[..., list(order)]
    words = np.bitwise_or.reduce(grid << (np.arange(per, dtype=np.uint32) * np.uint32(bits)), axis=-1)
    return np.ascontiguousarray(np.moveaxis(words, -1, axis))


def _half(x: Floats) -> Words:
    return np.ascontiguousarray(x).astype(np.float16).view(np.uint16)


def _groups(k: int, group: int) -> int:
    return -(-k // group) if group else 1


@cache
def gptq(bits: int = 4, group: int = GROUP, *, symmetric: bool = True, index: bool = True) -> Scheme:
    """The format "gptq" (zero points less one). index: with a g_idx, which AutoRound leaves out."""
    per = 32 // bits

    def parts(n: int, k: int) -> tuple[Part, ...]:
        groups = _groups(k, group)
        found = (
            Part(".qweight", "I32", (k // per, n), 1, 1),
            Part(".qzeros", "I32", (groups, n // per), per, 1),
            Part(".scales", "F16", (groups, n), 1, 1),
            Part(".g_idx", "I32", (k,), 0),
        )
        return found if index else found[:3]

    def encode(x: Floats, bound: float) -> tuple[Words | None, ...]:
        made = quantize(x, bits, group, symmetric, half=True)
        words = pack(made.codes.T, bits, 0), pack(made.points.T - 1, bits, 1), _half(made.scales.T)
        return (*words, None) if index else words

    def constants(n: int, k: int, bound: float) -> tuple[Words | None, ...]:
        order = np.arange(k) // (group or k)
        return (None, None, None, order.astype(np.uint32)) if index else (None,) * 3

    name = f"{'gptq' if index else 'auto-round'}, {bits} bits, groups of {group}"
    regroup = (lambda g: gptq(bits, g, symmetric=symmetric, index=index)) if group else None
    return Scheme(name, parts, encode, constants, group or per, regroup)


@cache
def awq(group: int = GROUP) -> Scheme:
    def parts(n: int, k: int) -> tuple[Part, ...]:
        groups = _groups(k, group)
        return (
            Part(".qweight", "I32", (k, n // 8), 8, 1),
            Part(".qzeros", "I32", (groups, n // 8), 8, 1),
            Part(".scales", "F16", (groups, n), 1, 1),
        )

    def encode(x: Floats, bound: float) -> tuple[Words | None, ...]:
        made = quantize(x, 4, group, False, half=True)
        return pack(made.codes.T, 4, 1, _AWQ_ORDER), pack(made.points.T, 4, 1, _AWQ_ORDER), _half(made.scales.T)

    return Scheme(f"awq, groups of {group}", parts, encode, lambda n, k, bound: (None,) * 3, group, awq)


@cache
def packed(bits: int = 4, group: int = GROUP, *, symmetric: bool = True) -> Scheme:
    """compressed-tensors' pack-quantized. group: 0 = a scale per channel."""
    per = 32 // bits

    def parts(n: int, k: int) -> tuple[Part, ...]:
        groups = _groups(k, group)
        found = (
            Part(".weight_packed", "I32", (n, -(-k // per)), 1),
            Part(".weight_scale", "BF16", (n, groups), 1),
            Part(".weight_shape", "I64", (2,), 0),
            Part(".weight_zero_point", "I32", (-(-n // per), groups), per),
        )
        return found[:3] if symmetric else found

    def encode(x: Floats, bound: float) -> tuple[Words | None, ...]:
        made = quantize(x, bits, group, symmetric, half=False)
        words = pack(made.codes, bits, 1), to_bf16(made.scales), None
        return words if symmetric else (*words, pack(made.points, bits, 0))

    def constants(n: int, k: int, bound: float) -> tuple[Words | None, ...]:
        shape = np.array([n, k], dtype=np.uint64)
        return (None, None, shape) if symmetric else (None, None, shape, None)

    name = f"pack-quantized, {bits} bits, {'' if symmetric else 'asymmetric, '}groups of {group}"
    regroup = (lambda g: packed(bits, g, symmetric=symmetric)) if group else None
    return Scheme(name, parts, encode, constants, group or 1, regroup)
