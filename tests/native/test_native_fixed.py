"""Products that round x to 16-bit integers (matrices that are not `exact`), against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from native.test_native_experts import HIDDEN, WIDTH, batch, silu
from native.test_native_products import shapes
from native.words import CASES, Case, sample

from oddrank.native import NativeMatrix, native_experts, native_matrix

BLOCK = 512
"""Columns of x that may share a scale."""

FIXED = [case for case in CASES if "fp4" in case.name or "int" in case.name]
Numbers = np.ndarray


def native(case: Case, n: int, k: int, seed: int = 0) -> tuple[NativeMatrix, Numbers]:
    made = sample(case, n, k, seed)
    found = native_matrix(made.decoder, made.stored, exact=False)
    assert found is not None
    return found, made.numbers


def bound(x: Numbers, numbers: Numbers, to_bf16: bool = False) -> Numbers:
    """2^-16 of the largest |x| of the block for every product, or 2^-8 of each |x|, and fp32's rounding of a sum of
    K / 8 of them. x [m, K], numbers [n, K] -> [m, n]."""
    k = x.shape[1]
    most = np.stack([np.abs(x[:, i : i + BLOCK]).max(1) for i in range(0, k, BLOCK)], 1)
    steps = np.abs(x) * 2.0**-8 if to_bf16 else np.repeat(most, BLOCK, 1)[:, :k] * 2.0**-16
    size, weights = np.abs(x), np.abs(numbers).T
    return steps @ weights * 1.01 + (size + steps) @ weights * (k / 8 + 16) * 2.0**-24


@pytest.mark.parametrize("case", CASES, ids=str)
def test_products(case: Case, level: str) -> None:
    for n, k in shapes(case):
        matrix, numbers = native(case, n, k, seed=n + k)
        for m in (1, 2, 3, 4, 5, 6, 7, 8, 9, 17, 33, 44, 65):
            draw = np.random.default_rng(m)
            x = torch.from_numpy(draw.normal(0, 1, (m, k)) * 2.0 ** draw.integers(-12, 12, (m, k))).float()
            got, want = matrix.linear(x).double().numpy(), x.double().numpy() @ numbers.T
            # 64 and more are multiplied as bf16, but for integers
            to_bf16 = level == "avx512bf16" and (case not in FIXED or ("fp4" in case.name and m >= 64))
            assert (np.abs(got - want) <= bound(x.double().numpy(), numbers, to_bf16)).all(), (n, k, m)
            assert n == 1 or not got[:, 0].any()  # the row of zeros


@pytest.mark.parametrize("case", FIXED, ids=str)
def test_what_the_rounding_is(case: Case, level: str) -> None:
    """It is far from bf16's: the mean error of unit normal x is less than a tenth of what rounding x to bf16 brings."""
    matrix, numbers = native(case, 64, 1024)
    x = torch.randn(4, 1024, generator=torch.Generator().manual_seed(0))
    want = x.double().numpy() @ numbers.T
    ours = np.abs(matrix.linear(x).double().numpy() - want).mean()
    theirs = np.abs(x.bfloat16().double().numpy() @ numbers.T - want).mean()
    assert ours < theirs / 10


@pytest.mark.parametrize("case", FIXED, ids=str)
def test_threads_and_neighbours_do_not_change_a_bit(case: Case, level: str) -> None:
    matrix, _ = native(case, 259, 1088)
    x = torch.randn(24, 1088, generator=torch.Generator().manual_seed(0))
    for m in (1, 5, 8, 24):
        assert torch.equal(matrix.linear(x[:m], threads=1), matrix.linear(x[:m], threads=2))
        assert torch.equal(matrix.linear(x[:m], threads=1), matrix.linear(x[:m], threads=3))
    assert torch.equal(matrix.linear(x)[3:9], matrix.linear(x[3:9]))


@pytest.mark.parametrize("case", FIXED, ids=str)
@pytest.mark.parametrize("size", [2.0**-140, 2.0**-120, 2.0**-60, 2.0**60, 2.0**100])
def test_tiny_and_huge_x(case: Case, size: float, level: str) -> None:
    """Subnormal x too, where fp32 rounds each product by 2^-150. Blocks of one row may differ by any power of two."""
    matrix, numbers = native(case, 9, 384)
    draw = np.random.default_rng(1)
    x = torch.from_numpy(draw.normal(0, size, (3, 384))).float()
    x[1, 128:256] = 0
    x[2, 128:256] *= 2.0**-40
    exact = x.double().numpy()
    for rows in (exact, exact[1:2]):
        got = matrix.linear(torch.from_numpy(rows).float()).double().numpy()
        assert (np.abs(got - rows @ numbers.T) <= bound(rows, numbers) + 384 * 2.0**-149).all()
    assert not matrix.linear(torch.zeros(2, 384)).any()


@pytest.mark.parametrize("case", FIXED, ids=str)
@pytest.mark.parametrize("value", [float("inf"), -float("inf"), float("nan")])
def test_x_that_is_not_finite(case: Case, value: float, level: str) -> None:
    """Every product with it is not finite, as the reference's is not; those of other x are untouched."""
    made = sample(case, 9, 272)
    matrix = native_matrix(made.decoder, made.stored, exact=False)
    assert matrix is not None
    for column, m in ((0, 10), (150, 10), (271, 10), (150, 70)):
        x = torch.rand(m, 272) + 0.5
        x[3, column] = value
        got = matrix.linear(x)
        assert not got[3].isfinite().any() and not made.decoder.linear(x, made.stored)[3].isfinite().any()
        rest = [i for i in range(m) if i != 3]
        assert got[rest].isfinite().all()
        assert not matrix.linear(x[3:4]).isfinite().any()


@pytest.mark.parametrize("column", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize(
    ("case", "code"), [(Case("nvfp4"), 0x7F), (Case("nvfp4-ct"), 0xFF), (Case("mxfp4"), 0xFF)], ids=str
)
def test_scales_that_are_not_numbers(case: Case, code: int, column: int, level: str) -> None:
    for k in (272, 1088, 32):
        made = sample(case, 40, k)
        made.stored[".weight_scale"].view(torch.uint8)[17, column] = code
        matrix = native_matrix(made.decoder, made.stored, exact=False)
        assert matrix is not None
        for m in (1, 4, 20, 70):
            got = matrix.linear(torch.rand(m, k) + 0.5)
            assert got[:, 17].isnan().all() and got.isnan().sum() == m


def test_extreme_exponents(level: str) -> None:
    """Codes 0 (2^-127, subnormal) and 254 of e8m0, with x from the other end."""
    stored = {
        ".weight": torch.full((2, 64), 0x22, dtype=torch.uint8),  # ones
        ".weight_scale": torch.tensor([[0, 0, 0, 0], [254, 254, 254, 254]], dtype=torch.uint8),
    }
    matrix = native_matrix(Case("mxfp4").decoder(), stored, exact=False)
    assert matrix is not None
    for m in (1, 4):
        got = matrix.linear(torch.full((m, 128), 2.0**100))
        assert torch.allclose(got[:, 0], torch.tensor(128 * 2.0**-27), rtol=2.0**-15, atol=0)
        got = matrix.linear(torch.full((m, 128), 2.0**-130))
        assert torch.allclose(got[:, 1], torch.tensor(128 * 2.0**-3), rtol=2.0**-15, atol=0)


@pytest.mark.parametrize("case", [*FIXED[:3], *FIXED[6:8]], ids=str)
def test_experts(case: Case, level: str) -> None:
    """Two rounded products, one of the other: each number's error is that of its inputs through the second, plus the
    second's own."""
    up = [sample(case, 2 * WIDTH, HIDDEN, seed=e) for e in range(9)]
    down = [sample(case, HIDDEN, WIDTH, seed=e + 50) for e in range(9)]
    banks = [{s: torch.stack([one.stored[s][None] for one in bank]) for s in bank[0].stored} for bank in (up, down)]
    kernel = native_experts((up[0].decoder, banks[0]), (down[0].decoder, banks[1]), F.silu, exact=False)
    assert kernel is not None
    for tokens, k in ((1, 3), (5, 4), (40, 9)):
        x, weights, ids = batch(tokens, k, seed=tokens)
        want, allowed = np.zeros((tokens, HIDDEN)), np.zeros((tokens, HIDDEN))
        for t in range(tokens):
            for w, e in zip(weights[t].double().numpy(), ids[t].numpy(), strict=True):
                row = x[t : t + 1].double().numpy()
                both, off = row @ up[e].numbers.T, bound(row, up[e].numbers)
                (gate, rise), (d_gate, d_rise) = np.split(both, 2, 1), np.split(off, 2, 1)
                inner = silu(gate) * rise
                d_inner = 1.1 * d_gate * (np.abs(rise) + d_rise) + np.abs(silu(gate)) * d_rise
                d_inner += 2.0**-20 * np.abs(inner)
                want[t] += w * (inner @ down[e].numbers.T)[0]
                spread = d_inner @ np.abs(down[e].numbers).T + bound(np.abs(inner) + d_inner, down[e].numbers)
                allowed[t] += w * spread[0] * (1 + 2.0**-10)
        got = kernel(x, weights, ids, 1)
        assert (np.abs(got.double().numpy() - want) <= allowed).all()
        assert torch.equal(kernel(x, weights, ids, 3), got)
