"""Several matrices of the same input in one call, against each by itself in float64."""

from __future__ import annotations

import pytest
import torch
from native.words import Case, sample

from oddrank.native import NativeMatrix, NativeStack, native_linear, native_matrix

K = 288
STACKS = [
    [Case("nvfp4"), Case("nvfp4"), Case("nvfp4")],
    [Case("fp8-block", (128, 128)), Case("dense", dtype=torch.bfloat16), Case("fp8-block", (128, 128))],
    [Case("int4-rows", (1, 128)), Case("int4-rows", (1, 32)), Case("nvfp4")],
    [Case("int8-rows", (1, 128)), Case("int8-channel"), Case("int8-rows", (1, 32)), Case("int4-rows", (1, 32))],
    [Case("mxfp4"), Case("nvfp4"), Case("dense", dtype=torch.float16), Case("mxfp4"), Case("fp8-channel")],
    [Case("mxfp8"), Case("fp8-block", (128, 128)), Case("mxfp8"), Case("mxfp4")],
]


def made(cases: list[Case], sizes: list[int]) -> tuple[list[NativeMatrix], torch.Tensor]:
    samples = [sample(case, n, K, seed=i) for i, (case, n) in enumerate(zip(cases, sizes, strict=True))]
    matrices = [native_matrix(one.decoder, one.stored) for one in samples]
    numbers = torch.cat([torch.from_numpy(one.numbers) for one in samples])
    return [matrix for matrix in matrices if matrix is not None], numbers


@pytest.mark.parametrize("cases", STACKS, ids=lambda cases: "+".join(case.name for case in cases))
def test_stacks(cases: list[Case], level: str) -> None:
    """Every part in its place, whatever its size; one call gives the bits of the parts' own."""
    sizes = [1, 130, 3, 67, 40][: len(cases)]
    matrices, numbers = made(cases, sizes)
    assert len(matrices) == len(cases)
    bias = torch.randn(sum(sizes), generator=torch.Generator().manual_seed(1))
    stack = NativeStack(matrices)
    for m in (1, 3, 9):
        x = torch.randn(m, K, generator=torch.Generator().manual_seed(m))
        got, want = stack(x, bias, 2), x.double() @ numbers.t() + bias
        size = x.double().abs() @ numbers.abs().t() + bias.abs()
        assert ((got - want).abs() <= size * (K / 8 + 16) * 2.0**-24).all()
        assert torch.equal(got, native_linear(matrices, x, bias, 1))
        assert torch.equal(got, torch.cat([matrix.linear(x) for matrix in matrices], -1) + bias)
    assert stack(x[:0]).shape == (0, sum(sizes))
