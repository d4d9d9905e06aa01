"""Decoders of stored matrices, written from the formats' definitions and apart from the package.

e4m3 is torch's; e2m1 and e8m0 are the tables of OCP Microscaling 1.0. All arithmetic is in float64, so that two
decodings of the same words are equal and not merely close.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

F64 = npt.NDArray[np.float64]
Words = npt.NDArray[Any]

E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
E4M3 = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()


class Raw(NamedTuple):
    """A stored tensor: safetensors dtype name, raw words."""

    dtype: str
    words: Words


Parts = Mapping[str, Raw]
"""A stored matrix: suffix (`.weight`, `.weight_scale`, ...) -> stored tensor."""


def numbers(raw: Raw) -> F64:
    """The numbers a plain tensor holds."""
    words = np.ascontiguousarray(raw.words)
    match raw.dtype:
        case "BF16":
            found = (words.astype(np.uint32) << 16).view(np.float32)
        case "F16":
            found = words.view(np.float16)
        case "F32":
            found = words.view(np.float32)
        case "F8_E4M3":
            found = E4M3[words]
        case "I8":
            found = words.view(np.int8)
        case _:
            raise AssertionError(raw.dtype)
    return found.astype(np.float64)


def codes(raw: Raw) -> Words:
    """One storage code an element: bytes as they are, or two nibbles a byte, the low one first."""
    if raw.dtype != "U8":
        return raw.words
    return np.stack([raw.words & 15, raw.words >> 4], axis=-1).reshape(*raw.words.shape[:-1], -1)


def exponents(words: Words) -> F64:
    """2^(e - 127); 255 is NaN."""
    return np.where(words == 255, np.nan, np.exp2(words.astype(np.float64) - 127))


def spread(scale: Words, block: tuple[int, int], shape: tuple[int, ...]) -> Words:
    """One scale per element: every entry repeated over its block, the last ones cut where the block is short.
    A block of 0 is the whole dimension."""
    n, k = shape[-2:]
    if scale.size == 1:
        return np.broadcast_to(scale.reshape(()), shape)
    if scale.ndim == len(shape) - 1:
        scale = scale[..., None]
    rows, columns = block
    wide = np.repeat(scale, rows or n, axis=-2)[..., :n, :]
    return np.repeat(wide, columns or k, axis=-1)[..., :k]


def decode(parts: Parts, block: tuple[int, int]) -> F64:
    """The logical matrix. block: elements along (N, K) that one entry of the scale covers, 0 = all."""
    raw = parts.get(".weight_packed") or parts[".weight"]
    if raw.dtype in ("BF16", "F16", "F32"):
        return numbers(raw)
    values = E2M1[codes(raw)] if raw.dtype == "U8" else numbers(raw)
    scale = parts.get(".weight_scale_inv") or parts[".weight_scale"]
    held = exponents(scale.words) if scale.dtype in ("U8", "F8_E8M0") else numbers(scale)
    made = values * spread(held, block, values.shape)
    if ".weight_scale_2" in parts:
        made = made * numbers(parts[".weight_scale_2"])
    if ".weight_global_scale" in parts:
        made = made / numbers(parts[".weight_global_scale"])
    return made
