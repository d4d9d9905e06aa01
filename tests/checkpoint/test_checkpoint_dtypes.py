"""Widths agree with the safetensors library, and its files are seen as it sees them."""

from pathlib import Path

import numpy as np
import pytest
import safetensors
from checkpoint_files import entry, safetensors_bytes

from oddrank.checkpoint import BITS, STORAGE
from oddrank.checkpoint.dtypes import itemsize, nbytes, storage_shape


def accepts(raw: bytes) -> bool:
    try:
        safetensors.deserialize(raw)
    except safetensors.SafetensorError:
        return False
    return True


@pytest.mark.parametrize("dtype", BITS)
def test_the_library_gives_every_dtype_our_size(dtype: str) -> None:
    shape = (3, 8)
    size = nbytes(dtype, shape)
    for extra in (-1, 0, 1):
        raw = safetensors_bytes({"a": entry(dtype, [3, 8], 0, size + extra)}, bytes(size + extra))
        assert accepts(raw) == (extra == 0)


def test_every_dtype_the_library_names_is_known() -> None:
    """The list in the library's own error message for an unknown dtype."""
    with pytest.raises(safetensors.SafetensorError) as error:
        safetensors.deserialize(safetensors_bytes({"a": entry("NONE", [1], 0, 1)}, b"1"))
    named = {word for word in str(error.value).split("`") if word.replace("_", "").isalnum() and word != "NONE"}
    assert named == set(BITS)


def test_storage_is_the_unsigned_integer_of_the_same_width() -> None:
    expected = {
        "BF16": "uint16",
        "F16": "uint16",
        "F32": "uint32",
        "F64": "uint64",
        "I64": "uint64",
        "C64": "uint64",
    }
    expected |= {
        "F8_E4M3": "uint8",
        "F8_E8M0": "uint8",
        "I8": "uint8",
        "BOOL": "uint8",
        "F4": "uint8",
        "I32": "uint32",
    }
    for dtype, name in expected.items():
        assert STORAGE[dtype] == np.dtype(name)
    assert all(itemsize(dtype) * 8 == max(bits, 8) for dtype, bits in BITS.items())


def test_packed_shapes_count_bytes() -> None:
    assert storage_shape("F4", (5, 64)) == (5, 32)
    assert storage_shape("F6_E2M3", (5, 4)) == (5, 3)
    assert storage_shape("F4", (2, 3)) == (3,)
    assert storage_shape("BF16", (5, 64)) == (5, 64)
    with pytest.raises(ValueError, match="whole number of bytes"):
        nbytes("F4", (3,))


def test_names_come_from_the_installed_library(tmp_path: Path) -> None:
    """A sanity check of `accepts`: it must be able to say no."""
    assert not accepts(safetensors_bytes({"a": entry("F31", [1], 0, 4)}, b"1234"))
