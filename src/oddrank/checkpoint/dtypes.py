"""The number formats a safetensors file can name, and the numpy dtype each is moved in.

oddrank copies stored values and never computes with them, so a dtype is only a width: every one of them is
seen as the unsigned integer of the same width, and those narrower than a byte as bytes.
"""

from typing import Any

import numpy as np

BITS: dict[str, int] = {
    "F4": 4,
    "F6_E2M3": 6,
    "F6_E3M2": 6,
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E5M2": 8,
    "F8_E4M3": 8,
    "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8,
    "F8_E5M2FNUZ": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "C64": 64,
    "F64": 64,
    "I64": 64,
    "U64": 64,
}
"""Bits of one element, for every dtype name that safetensors 0.8 writes."""

_UNSIGNED: dict[int, "np.dtype[Any]"] = {bits: np.dtype(f"<u{bits // 8}") for bits in (8, 16, 32, 64)}

STORAGE: dict[str, "np.dtype[Any]"] = {name: _UNSIGNED[max(bits, 8)] for name, bits in BITS.items()}
"""The little-endian unsigned integer of the same width; uint8 for the packed dtypes narrower than a byte."""


def itemsize(dtype: str) -> int:
    """Bytes of one element of STORAGE[dtype] (1 for the packed dtypes F4 and F6)."""
    return STORAGE[dtype].itemsize


def nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes a tensor occupies in the file. ValueError where a packed dtype does not fill whole bytes."""
    bits = BITS[dtype]
    for n in shape:
        bits *= n
    if bits % 8:
        raise ValueError(f"{dtype} of shape {list(shape)} is {bits} bits, which is not a whole number of bytes")
    return bits // 8


def storage_shape(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape in elements of STORAGE[dtype].

    The same shape, except for F4 and F6: their last dimension counts bytes instead (F4 [N, K] -> [N, K/2]),
    or, where a row does not fill whole bytes, the tensor is one flat run of bytes.
    """
    bits = BITS[dtype]
    if bits >= 8:
        return shape
    if shape and shape[-1] * bits % 8 == 0:
        return (*shape[:-1], shape[-1] * bits // 8)
    return (nbytes(dtype, shape),)
