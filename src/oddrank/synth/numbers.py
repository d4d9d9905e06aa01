"""The small number formats that quantized weights are stored in: encoders and decoders between float32 and raw words.

Every encoder rounds to nearest, ties to even, and saturates; none of them makes a NaN or an infinity out of a finite
number. Sources: OCP 8-bit floating point (e4m3), OCP Microscaling formats 1.0 (e2m1, e8m0).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float32]
Words = npt.NDArray[Any]

E4M3_MAX = 448.0
E2M1_MAX = 6.0


def to_bf16(x: Floats) -> Words:
    """uint16 words of bfloat16: the upper half of a float32, rounded."""
    bits = np.ascontiguousarray(x, dtype=np.float32).view(np.uint32)
    half = np.uint32(0x7FFF) + (bits >> np.uint32(16) & np.uint32(1))
    return (bits + half >> np.uint32(16)).astype(np.uint16)


def from_bf16(words: Words) -> Floats:
    return (np.asarray(words).astype(np.uint32) << np.uint32(16)).view(np.float32)


def to_e4m3(x: Floats) -> Words:
    """uint8 words of e4m3 (bias 7, no infinity, 0x7F is NaN and never made); values beyond 448 become 448.

    A float32 whose mantissa is rounded to three bits has the e4m3 code in its upper twelve bits, but for the exponent's
    bias. Below the smallest normal number, 2^-6, codes count steps of 2^-9.
    """
    size = np.minimum(np.abs(np.asarray(x, dtype=np.float32)), np.float32(E4M3_MAX))
    bits = size.view(np.uint32)
    rounded = (bits + np.uint32(0x7FFFF) + (bits >> np.uint32(20) & np.uint32(1))) >> np.uint32(20)
    normal = (rounded.astype(np.int32) - ((127 - 7) << 3)).astype(np.uint8)
    small = np.rint(size * np.float32(512)).astype(np.uint8)
    code = np.where(size < np.float32(2**-6), small, normal)
    words: Words = code | (np.signbit(x).astype(np.uint8) << np.uint8(7))
    return words


def _e4m3_values() -> Floats:
    codes = np.arange(128)
    exponent, mantissa = codes >> 3, codes & 7
    size = np.where(exponent > 0, (8 + mantissa) * 2.0 ** (exponent - 10), mantissa * 2.0**-9)
    size[127] = np.nan
    return np.concatenate([size, -size]).astype(np.float32)


E4M3_VALUES = _e4m3_values()
"""float32 [256]: what each e4m3 word means."""


def from_e4m3(words: Words) -> Floats:
    return E4M3_VALUES[words]


E2M1_VALUES = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=np.float32)
E2M1_VALUES = np.concatenate([E2M1_VALUES, -E2M1_VALUES])
"""float32 [16]: what each e2m1 code means; bit 3 is the sign."""


def to_e2m1(x: Floats) -> Words:
    """uint8 codes 0 to 15, one a number. A tie goes to the neighbour whose mantissa bit is 0."""
    size = np.abs(x)
    code = (size > 0.25).astype(np.uint8)
    for threshold in (1.25, 2.5, 5.0):
        code += size > threshold
    for threshold in (0.75, 1.75, 3.5):
        code += size >= threshold
    return code | (np.signbit(x).astype(np.uint8) << np.uint8(3))


def pack_e2m1(codes: Words) -> Words:
    """Two codes a byte along the last dimension: the low nibble is the even column."""
    words: Words = codes[..., 0::2] | (codes[..., 1::2] << np.uint8(4))
    return words


def from_packed_e2m1(words: Words) -> Floats:
    codes = np.stack([words & 15, words >> 4], axis=-1)
    return E2M1_VALUES[codes.reshape(*words.shape[:-1], -1)]


def e8m0_for_e2m1(amax: Floats) -> Words:
    """uint8 shared exponents (bias 127) for groups whose largest magnitude is `amax`.

    2^(floor(log2(amax)) - 2), 2 being e2m1's largest exponent, with amax first rounded to one bit of mantissa, so that
    it lands in [3.5, 7) and not in [4, 8). 0 and 255 (NaN) are never made.
    """
    bits = np.asarray(amax, dtype=np.float32).view(np.uint32)
    exponent = ((bits + np.uint32(1 << 21)) >> np.uint32(23)).astype(np.int32) - 2
    return np.clip(exponent, 1, 254).astype(np.uint8)


def from_e8m0(words: Words) -> Floats:
    """2^(word - 127); 255 is NaN."""
    words = np.asarray(words)
    powers = np.ldexp(np.float32(1), np.minimum(words, 254).astype(np.int32) - 127)
    return np.where(words == 255, np.float32(np.nan), powers).astype(np.float32)
