"""How the published releases store a matrix: the names, dtypes and shapes of its stored tensors, and their bytes.

Written from the releases' own conventions and apart from oddrank.formats, which it serves to test.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from oddrank.synth.numbers import (
    E2M1_MAX,
    E4M3_MAX,
    Floats,
    Words,
    e8m0_for_e2m1,
    from_bf16,
    from_e4m3,
    from_e8m0,
    pack_e2m1,
    to_bf16,
    to_e2m1,
    to_e4m3,
)

Shape = tuple[int, ...]

BLOCK = 128
"""Side of an fp8 scale block."""

_TINY = np.float32(1e-30)
"""The least amax a scale is made of, so that an all-zero block has a scale that is not zero."""


class Part(NamedTuple):
    """One stored tensor: what replaces `.weight` in the dense name, safetensors dtype, shape. by_row: of its dimension
    `rows`, each entry covers this many rows of the matrix; 0 where it has no such dimension."""

    suffix: str
    dtype: str
    shape: Shape
    by_row: int
    rows: int = 0


class Scheme(NamedTuple):
    """parts: of a matrix [N, K]. encode: (rows of the matrix, upper bound of all its magnitudes) -> words per part,
    None for the parts that `constants`, of (N, K, bound), gives whole. multiple: K must divide by it. regroup: the same
    with scale groups of another width, where that is the user's choice."""

    name: str
    parts: Callable[[int, int], tuple[Part, ...]]
    encode: Callable[[Floats, float], tuple[Words | None, ...]]
    constants: Callable[[int, int, float], tuple[Words | None, ...]]
    multiple: int = 1
    regroup: Callable[[int], Scheme] | None = None


def _scalar(value: float, shape: Shape = ()) -> Words:
    return np.full(shape, value, dtype=np.float32).view(np.uint32)


def _none(n: int, k: int, bound: float) -> tuple[Words | None, ...]:
    return (None, None)


def _blocks(n: int) -> int:
    return -(-n // BLOCK)


def _encode_blocks(x: Floats, bound: float) -> tuple[Words | None, ...]:
    """128 x 128 blocks, short at the edges; the scale is rounded to bf16 before values are divided by it."""
    n, k = x.shape
    padded = np.zeros((_blocks(n) * BLOCK, _blocks(k) * BLOCK), dtype=np.float32)
    padded[:n, :k] = x
    grid = padded.reshape(_blocks(n), BLOCK, _blocks(k), BLOCK)
    scale = to_bf16(np.maximum(np.abs(grid).max(axis=(1, 3)), _TINY) / np.float32(E4M3_MAX))
    words = to_e4m3(grid / from_bf16(scale)[:, None, :, None]).reshape(padded.shape)
    return np.ascontiguousarray(words[:n, :k]), scale


def _block_scheme(name: str, suffix: str) -> Scheme:
    def parts(n: int, k: int) -> tuple[Part, ...]:
        scale = Part(suffix, "BF16", (_blocks(n), _blocks(k)), BLOCK)
        return Part(".weight", "F8_E4M3", (n, k), 1), scale

    return Scheme(name, parts, _encode_blocks, _none)


def _row_scale(x: Floats) -> Floats:
    amax = np.abs(x).max(axis=1, keepdims=True)
    scale: Floats = np.maximum(amax, _TINY) / np.float32(E4M3_MAX)
    return scale


def _encode_channel(x: Floats, bound: float) -> tuple[Words | None, ...]:
    scale = to_bf16(_row_scale(x))
    return to_e4m3(x / from_bf16(scale)), scale


def _encode_channel_1d(x: Floats, bound: float) -> tuple[Words | None, ...]:
    scale = _row_scale(x)
    return to_e4m3(x / scale), scale[:, 0].view(np.uint32)


def _encode_tensor(x: Floats, bound: float) -> tuple[Words | None, ...]:
    return to_e4m3(x / np.float32(bound / E4M3_MAX)), None, None


def _tensor_constants(n: int, k: int, bound: float) -> tuple[Words | None, ...]:
    # activations of a normalised layer stay below about ten
    return None, _scalar(bound / E4M3_MAX), _scalar(10.0 / E4M3_MAX)


def _encode_nvfp4(x: Floats, bound: float) -> tuple[Words, Words]:
    """e4m3 scales per 16 columns under one fp32 scale per tensor."""
    n, k = x.shape
    grid = x.reshape(n, k // 16, 16)
    whole = np.float32(bound / (E2M1_MAX * E4M3_MAX))
    # a scale of zero would erase its block: the smallest e4m3 number instead
    scale = np.maximum(to_e4m3(np.abs(grid).max(axis=2) / (np.float32(E2M1_MAX) * whole)), np.uint8(1))
    words = pack_e2m1(to_e2m1(grid / (from_e4m3(scale) * whole)[:, :, None]).reshape(n, k))
    return words, scale


def _encode_mxfp4(x: Floats, bound: float) -> tuple[Words | None, ...]:
    n, k = x.shape
    grid = x.reshape(n, k // 32, 32)
    scale = e8m0_for_e2m1(np.abs(grid).max(axis=2))
    return pack_e2m1(to_e2m1(grid / from_e8m0(scale)[:, :, None]).reshape(n, k)), scale


def _encode_mxfp8(x: Floats, bound: float) -> tuple[Words | None, ...]:
    """The largest power of two at which the group's largest number still fits."""
    n, k = x.shape
    grid = x.reshape(n, k // 32, 32)
    least = np.maximum(np.abs(grid).max(axis=2), _TINY) / np.float32(E4M3_MAX)
    scale = np.clip(np.ceil(np.log2(least)).astype(np.int32) + 127, 1, 254).astype(np.uint8)
    return to_e4m3((grid / from_e8m0(scale)[:, :, None]).reshape(n, k)), scale


def _encode_int8(x: Floats, bound: float) -> tuple[Words | None, ...]:
    amax = np.maximum(np.abs(x).max(axis=1, keepdims=True), _TINY)
    scale = to_bf16(amax / np.float32(127))
    return np.clip(np.rint(x / from_bf16(scale)), -128, 127).astype(np.int8).view(np.uint8), scale


def _encode_blocks_of_32(x: Floats, bound: float) -> tuple[Words | None, ...]:
    words, scale = _encode_mxfp4(x, bound)
    assert words is not None
    return words.reshape(*x.shape[:-1], -1, 16), scale


DENSE = Scheme(
    "bf16",
    lambda n, k: (Part(".weight", "BF16", (n, k), 1),),
    lambda x, bound: (to_bf16(x),),
    lambda n, k, bound: (None,),
)
FP8_BLOCK = _block_scheme("fp8 128x128", ".weight_scale_inv")
FP8_BLOCK_CT = _block_scheme("fp8 128x128, compressed-tensors", ".weight_scale")
FP8_CHANNEL = Scheme(
    "fp8 per channel, compressed-tensors",
    lambda n, k: (Part(".weight", "F8_E4M3", (n, k), 1), Part(".weight_scale", "BF16", (n, 1), 1)),
    _encode_channel,
    _none,
)
FP8_CHANNEL_1D = Scheme(
    "fp8 per channel, one-dimensional scale",
    lambda n, k: (Part(".weight", "F8_E4M3", (n, k), 1), Part(".weight_scale", "F32", (n,), 1)),
    _encode_channel_1d,
    _none,
)
FP8_TENSOR = Scheme(
    "fp8 per tensor, ModelOpt",
    lambda n, k: (
        Part(".weight", "F8_E4M3", (n, k), 1),
        Part(".weight_scale", "F32", (), 0),
        Part(".input_scale", "F32", (), 0),
    ),
    _encode_tensor,
    _tensor_constants,
)
NVFP4 = Scheme(
    "nvfp4, ModelOpt",
    lambda n, k: (
        Part(".weight", "U8", (n, k // 2), 1),
        Part(".weight_scale", "F8_E4M3", (n, k // 16), 1),
        Part(".weight_scale_2", "F32", (), 0),
        Part(".input_scale", "F32", (), 0),
    ),
    lambda x, bound: (*_encode_nvfp4(x, bound), None, None),
    lambda n, k, bound: (None, None, _scalar(bound / (E2M1_MAX * E4M3_MAX)), _scalar(10.0 / (E2M1_MAX * E4M3_MAX))),
    multiple=16,
)
NVFP4_CT = Scheme(
    "nvfp4, compressed-tensors",
    lambda n, k: (
        Part(".weight_packed", "U8", (n, k // 2), 1),
        Part(".weight_scale", "F8_E4M3", (n, k // 16), 1),
        Part(".weight_global_scale", "F32", (1,), 0),
        Part(".input_global_scale", "F32", (1,), 0),
    ),
    lambda x, bound: (*_encode_nvfp4(x, bound), None, None),
    # the reciprocals of ModelOpt's: these divide
    lambda n, k, bound: (
        None,
        None,
        _scalar(E2M1_MAX * E4M3_MAX / bound, (1,)),
        _scalar(E2M1_MAX * E4M3_MAX / 10.0, (1,)),
    ),
    multiple=16,
)
INT8_CHANNEL = Scheme(
    "int8 per channel, compressed-tensors",
    lambda n, k: (Part(".weight", "I8", (n, k), 1), Part(".weight_scale", "BF16", (n, 1), 1)),
    _encode_int8,
    _none,
)
MXFP8 = Scheme(
    "mxfp8, compressed-tensors",
    lambda n, k: (Part(".weight", "F8_E4M3", (n, k), 1), Part(".weight_scale", "U8", (n, k // 32), 1)),
    _encode_mxfp8,
    _none,
    multiple=32,
)
MXFP4_BLOCKS = Scheme(
    "mxfp4, gpt-oss",
    lambda n, k: (Part("_blocks", "U8", (n, k // 32, 16), 1), Part("_scales", "U8", (n, k // 32), 1)),
    _encode_blocks_of_32,
    _none,
    multiple=32,
)
"""Of one expert of a stack."""
MXFP4 = Scheme(
    "mxfp4, Quark",
    lambda n, k: (Part(".weight", "U8", (n, k // 2), 1), Part(".weight_scale", "U8", (n, k // 32), 1)),
    _encode_mxfp4,
    _none,
    multiple=32,
)
