"""Products of the compiled kernels, each format and level, against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from native.words import CASES, Case, Sample, sample
from torch import Tensor

from oddrank.native import Library, NativeMatrix, native_matrix

SHAPES = [(1, 16), (2, 32), (5, 288), (7, 144), (131, 400), (66, 1056)]
ODD = [(1, 1), (3, 17), (4, 33), (9, 130), (130, 301)]
"""Columns that only formats with a code for each number have."""
FOUR_BIT = [(3, 40), (2, 72)]
"""Columns in the middle of a block."""


def shapes(case: Case) -> list[tuple[int, int]]:
    return SHAPES + (ODD if "fp4" not in case.name else FOUR_BIT)


def native(made: Sample) -> NativeMatrix:
    found = native_matrix(made.decoder, made.stored)
    assert found is not None
    return found


def errors(got: Tensor, x: Tensor, numbers: np.ndarray) -> float:
    """The largest error over what fp32 may bring: a sum in eight lanes or more rounds a lane's K / 8 products, each
    number's decoding, and the lanes' sum, each by 2^-24 of the sum of magnitudes. (Below 1 is right.)"""
    a = x.double().numpy()
    bound = np.abs(a) @ np.abs(numbers).T * (numbers.shape[1] / 8 + 16) * 2.0**-24
    return float((np.abs(got.double().numpy() - a @ numbers.T) / np.maximum(bound, 1e-300)).max())


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products(case: Case, level: str) -> None:
    for n, k in shapes(case):
        made = sample(case, n, k, seed=n + k)
        matrix = native(made)
        for m in (1, 2, 3, 8, 16, 17):
            x = torch.from_numpy(np.random.default_rng(m).normal(0, 1, (m, k))).float()
            got = matrix.linear(x)
            assert errors(got, x, made.numbers) < 1, (n, k, m)
            assert n == 1 or not got[:, 0].any()  # the row of zeros


@pytest.mark.parametrize("case", CASES, ids=str)
def test_threads_and_neighbours_do_not_change_a_bit(case: Case, level: str) -> None:
    made = sample(case, 259, 1088)
    matrix = native(made)
    x = torch.randn(16, 1088, generator=torch.Generator().manual_seed(0))
    for m in (1, 5, 16, 40):
        rows = torch.cat([x, x, x])[:m]
        assert torch.equal(matrix.linear(rows, threads=1), matrix.linear(rows, threads=2))
        assert torch.equal(matrix.linear(rows, threads=1), matrix.linear(rows, threads=3))
    assert torch.equal(matrix.linear(x)[3:9], matrix.linear(x[3:9]))


def test_every_batch(kernels: Library) -> None:
    """As many x as there are sums in registers, more, and fewer."""
    made = sample(Case("nvfp4"), 13, 1040)
    matrix = native(made)
    for m in range(1, 18):
        x = torch.randn(m, 1040, generator=torch.Generator().manual_seed(m))
        assert errors(matrix.linear(x), x, made.numbers) < 1


def test_x_of_any_layout_and_type_and_a_bias(level: str) -> None:
    made = sample(Case("fp8-block", (128, 128)), 130, 200)
    matrix = native(made)
    x, bias = torch.randn(6, 400), torch.randn(130)
    numbers = torch.from_numpy(made.numbers)
    for rows in (x[:, ::2], x[:, :200], x[::2, 200:], x[:, :200].bfloat16(), x[:, :200].reshape(2, 3, 200)):
        got = matrix.linear(rows, bias)
        want = rows.double() @ numbers.t() + bias
        assert got.dtype == rows.dtype and got.shape == want.shape
        assert torch.allclose(got.double(), want, rtol=2.0**-7 if rows.dtype == torch.bfloat16 else 1e-5, atol=1e-3)
    many = torch.randn(33, 200)
    assert torch.allclose(matrix.linear(many, bias).double(), many.double() @ numbers.t() + bias, rtol=1e-5, atol=1e-3)
    assert matrix.linear(x[:0, :200]).shape == (0, 130)


NAN = [
    (Case("dense", dtype=torch.bfloat16), ".weight", float("nan")),
    (Case("dense", dtype=torch.bfloat16), ".weight", float("inf")),
    (Case("dense", dtype=torch.float16), ".weight", float("nan")),
    (Case("dense", dtype=torch.float16), ".weight", -float("inf")),
    (Case("fp8-block", (128, 128)), ".weight", 0x7F),
    (Case("fp8-channel"), ".weight", 0xFF),
    (Case("fp8-block", (128, 128)), ".weight_scale_inv", float("nan")),
    (Case("fp8-channel"), ".weight_scale", float("nan")),
    (Case("nvfp4"), ".weight_scale", 0x7F),
    (Case("nvfp4-ct"), ".weight_scale", 0xFF),
    (Case("mxfp4"), ".weight_scale", 0xFF),
    (Case("mxfp8"), ".weight", 0xFF),
    (Case("mxfp8"), ".weight_scale", 0xFF),
]


@pytest.mark.parametrize("column", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize(("case", "suffix", "value"), NAN, ids=str)
def test_what_is_not_finite(case: Case, suffix: str, value: float, column: int, level: str) -> None:
    """NaN and infinity in stored words give what the reference gives, in their rows only."""
    made = sample(case, 140, 272)
    part = made.stored[suffix]
    words = part.view(torch.uint8) if isinstance(value, int) else part
    words[3 if len(part) == 140 else 0, column] = value
    matrix = native(made)
    x = torch.rand(20, 272) + 0.5
    for m in (1, 4, 20):
        got, want = matrix.linear(x[:m]), made.decoder.linear(x[:m], made.stored)
        assert not want.isfinite().all()
        assert torch.equal(got.isnan(), want.isnan())
        assert torch.equal(got.isinf(), want.isinf())
        assert torch.equal(got[got.isinf()], want[want.isinf()])


ONES = {
    "mxfp4": torch.full((2, 64), 0x22, dtype=torch.uint8),
    "mxfp8": torch.full((2, 128), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn),
}


@pytest.mark.parametrize(("name", "exact"), [("mxfp4", True), ("mxfp8", True), ("mxfp8", False)])
def test_extreme_exponents(name: str, exact: bool, level: str) -> None:
    """Codes 0 (2^-127, subnormal) and 254 of e8m0 are numbers."""
    scales = torch.tensor([[0, 0, 0, 0], [254, 254, 254, 254]], dtype=torch.uint8)
    matrix = native_matrix(Case(name).decoder(), {".weight": ONES[name], ".weight_scale": scales}, exact)
    assert matrix is not None
    for m in (1, 4):
        got = matrix.linear(torch.full((m, 128), 0.125))
        assert torch.equal(got[:, 0], torch.full((m,), 16 * 2.0**-127))
        got = matrix.linear(torch.full((m, 128), 2.0**-10))
        assert torch.equal(got[:, 1], torch.full((m,), 2.0**124))


def test_what_is_left_to_the_reference(kernels: Library) -> None:
    """Scales of blocks that the kernels' steps do not divide, infinite ones, views that are not whole, no elements."""
    made = sample(Case("fp8-block", (128, 48)), 4, 96)
    assert native_matrix(made.decoder, made.stored) is None
    made = sample(Case("fp8-block", (128, 128)), 4, 256)
    made.stored[".weight_scale_inv"][0, 0] = float("inf")
    assert native_matrix(made.decoder, made.stored) is None
    made = sample(Case("dense", dtype=torch.bfloat16), 4, 96)
    assert native_matrix(made.decoder, {".weight": made.stored[".weight"][:, :48]}) is None
    assert native_matrix(made.decoder, {".weight": made.stored[".weight"][:0]}) is None
    assert native_matrix(made.decoder, {".weight": made.stored[".weight"].float()}) is None
