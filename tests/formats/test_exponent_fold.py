"""Kernels that fold the exponents of a row against its largest: what a dummy column's exponent does to real weights."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest
from formats.codec import E2M1, F64, Raw, codes
from formats.dialects import DIALECTS, matrix, stored
from formats.moves import Move, moved

FRACTION = 8
"""Bits below a row's largest exponent that the emulated kernel keeps."""

MXFP4 = [name for name in DIALECTS if name.startswith("MXFP4")]


def fold(values: Raw, scale: Raw) -> F64:
    """The matrix as the kernel sees it: integer mantissas (halves of e2m1) with FRACTION bits after the point, shifted
    right by how far the group's exponent is below the row's largest; what is shifted out is gone."""
    mantissa = (2 * E2M1[codes(values)]).astype(np.int64)
    exponent = scale.words.astype(np.int64)
    largest = exponent.max(axis=1, keepdims=True)
    shift = np.repeat(np.minimum(largest - exponent, 62), 32, axis=1)
    kept = np.sign(mantissa) * ((np.abs(mantissa) << FRACTION) >> shift)
    assert (scale.words != 0xFF).all()
    return kept * 2.0 ** (largest - 127 - 1 - FRACTION)


def padded(name: str, slots: list[int] | None = None) -> tuple[F64, dict[str, Raw]]:
    """(the matrix moved, its stored form) of weights around 2^-12: 256 channels in, half as many dummies."""
    # groups within a factor of eight of each other, which the kernel's eight bits hold exactly
    x = (matrix(64, 256) / 32).clip(-1, 1) * np.float32(2**-9)
    x[:, ::32] = np.float32(2**-9) * np.array([1.0, 0.5, 0.25, 0.9, 0.3, 1.0, 0.4, 0.6], dtype=np.float32)
    move = Move({"mlp": 256}, 64, (("mlp", 1),), {"mlp": slots or [*range(256), *([-1] * 128)]})
    source = stored(DIALECTS[name], x)
    exponents = source[".weight_scale"].words
    assert exponents.min() >= 127 - 15 and exponents.max() <= 127 - 10  # far below 2^0, as real weights are
    _, columns = move.where()
    exact = np.where(columns >= 0, DIALECTS[name].decode(source)[:, columns], 0.0)
    return exact, moved(move, source)[1]


def seen(parts: dict[str, Raw], scale: npt.NDArray[np.uint8] | None = None) -> F64:
    values = parts.get(".weight") or parts[".weight_packed"]
    return fold(values, parts[".weight_scale"] if scale is None else Raw("U8", scale))


@pytest.mark.parametrize("name", MXFP4)
def test_the_kernel_reads_unpadded_weights_exactly(name: str) -> None:
    exact, parts = padded(name, list(range(256)))
    assert np.array_equal(seen(parts), exact) and np.abs(exact).max() > 2**-11


@pytest.mark.parametrize("name", MXFP4)
def test_padded_columns_do_not_win_the_row_maximum(name: str) -> None:
    exact, parts = padded(name)
    assert np.array_equal(seen(parts), exact)
    x = np.random.default_rng(1).standard_normal(exact.shape[1])
    assert np.allclose(seen(parts) @ x, exact @ x, rtol=1e-12, atol=0)


@pytest.mark.parametrize("name", MXFP4)
def test_an_exponent_of_one_in_padded_columns_flushes_real_weights(name: str) -> None:
    """The same words with 2^0 on the dummy columns: finite, decoded alike, and nearly all weights gone."""
    exact, parts = padded(name)
    wrong = parts[".weight_scale"].words.copy()
    assert (wrong[:, 8:] == 0x00).all()
    wrong[:, 8:] = 0x7F
    values = parts.get(".weight") or parts[".weight_packed"]
    decoded = DIALECTS[name].decode({".weight": values, ".weight_scale": Raw("U8", wrong)})
    assert np.array_equal(decoded, exact)  # a dequantizer would not notice
    flushed = seen(parts, wrong)
    real = exact != 0
    assert (flushed[real] == 0).mean() > 0.5
    assert np.abs(flushed - exact).max() > 0.05 * np.abs(exact).max()


@pytest.mark.parametrize("name", MXFP4)
def test_dummy_rows_are_zero_and_finite(name: str) -> None:
    """A dummy row has no real weight to protect; its exponents are 2^0."""
    move = Move({"mlp": 64}, (("mlp", 1),), 256, {"mlp": [*range(64), *([-1] * 32)]})
    _, parts = moved(move, stored(DIALECTS[name], matrix(64, 256)))
    assert (parts[".weight_scale"].words[64:] == 0x7F).all()
    assert not seen(parts)[64:].any() and np.isfinite(DIALECTS[name].decode(parts)).all()


@pytest.mark.parametrize("name", MXFP4)
def test_no_fill_is_the_exponent_that_means_nan(name: str) -> None:
    for rows, columns in (([0, -1], 256), (64, [0, -1])):
        move = Move(
            {"q": 1},
            (("q", 64),) if isinstance(rows, list) else rows,
            (("q", 256),) if isinstance(columns, list) else columns,
            {"q": [0, -1]},
        )
        _, parts = moved(move, stored(DIALECTS[name], matrix(64, 256)))
        assert 0xFF not in parts[".weight_scale"].words
