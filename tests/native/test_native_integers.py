"""Packed integers: zero points, columns in an order of their own, and what the compiled kernels leave to torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from native.words import Case, Sample, sample

from oddrank.native import Library, NativeMatrix, NativeStack, native_matrix
from oddrank.runtime.formats.rows import RowsDecoder

BATCHES = (1, 3, 8, 9, 40)
INT4, INT8 = Case("int4-rows", (1, 32)), Case("int8-rows", (1, 32))


def native(made: Sample, exact: bool) -> NativeMatrix:
    found = native_matrix(made.decoder, made.stored, exact)
    assert found is not None
    return found


def ordered(n: int, k: int, seed: int, case: Case = INT4) -> tuple[Sample, np.ndarray]:
    """A matrix held in an order of columns, and its numbers in that of x."""
    made, order = sample(case, n, k, seed), np.random.default_rng(seed).permutation(k)
    made.stored[".order"] = torch.from_numpy(order.astype(np.int32))
    numbers = np.empty_like(made.numbers)
    numbers[:, order] = made.numbers
    return made, numbers


def allowed(x: torch.Tensor, numbers: np.ndarray, exact: bool) -> np.ndarray:
    """What fp32 sums may bring, and 2^-16 of the largest |x| where x is rounded."""
    size, k = x.double().abs().numpy(), x.shape[1]
    steps = 0 if exact else size.max(1, keepdims=True) * 2.0**-16
    return (size * (k + 4) * 2.0**-24 + steps) @ np.abs(numbers).T


@pytest.mark.parametrize("case", [INT4, INT8], ids=str)
@pytest.mark.parametrize("exact", [True, False])
def test_columns_in_an_order_of_their_own(case: Case, exact: bool, level: str) -> None:
    made, numbers = ordered(21, 328, 5, case)
    matrix = native(made, exact)
    assert torch.equal(made.decoder.dequantize(made.stored, torch.float64), torch.from_numpy(numbers))
    for m in BATCHES:
        x = torch.from_numpy(np.random.default_rng(m).normal(0, 1, (m, 328))).float()
        error = np.abs(matrix.linear(x, threads=2).double().numpy() - x.double().numpy() @ numbers.T)
        assert (error <= allowed(x, numbers, exact)).all()


@pytest.mark.parametrize("exact", [True, False])
def test_stacks_of_matrices_of_different_orders(exact: bool, level: str) -> None:
    made = [ordered(21, 328, 1), ordered(9, 328, 2)]
    plain = sample(INT4, 5, 328, 3)
    stack = NativeStack([native(one, exact) for one in (made[0][0], plain, made[1][0], made[0][0])])
    numbers = np.concatenate([made[0][1], plain.numbers, made[1][1], made[0][1]])
    for m in BATCHES:
        x = torch.from_numpy(np.random.default_rng(m).normal(0, 1, (m, 328))).float()
        error = np.abs(stack(x, None, 2).double().numpy() - x.double().numpy() @ numbers.T)
        assert (error <= allowed(x, numbers, exact)).all()


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_every_code_with_every_zero_point(group: int, exact: bool, level: str) -> None:
    """Row z has the zero point z; columns are the codes, over and over. x of ones is rounded to itself."""
    k = 2 * group
    codes = torch.arange(k, dtype=torch.uint8) % 16
    words = torch.full((17, 2), 0.5).view(torch.int32) + torch.arange(17, dtype=torch.int32)[:, None]
    stored = {
        ".codes": (codes[0::2] | codes[1::2] << 4).expand(17, -1).contiguous(),
        ".scales": words.view(torch.uint8).view(17, 2, 4),
    }
    matrix = native_matrix(RowsDecoder(group, k), stored, exact)
    assert matrix is not None
    x = torch.zeros(k + 1, k)
    x[:k].fill_diagonal_(1)
    x[k] = 1
    numbers = 0.5 * (codes[None].double() - torch.arange(17)[:, None])
    for m in (1, 8, k + 1):
        want = (x[-m:].double() @ numbers.t()).float()
        got = matrix.linear(x[-m:])
        assert torch.allclose(got, want, rtol=2.0**-15, atol=1e-6) and (not exact or torch.equal(got, want))


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_every_byte_with_every_zero_point(group: int, exact: bool, level: str) -> None:
    """Row z has the zero point z, the last of them GPTQ's 255 + 1; x of ones is rounded to itself."""
    zero = torch.arange(-128, 129, dtype=torch.int32)
    words = torch.full((257, 256 // group, 2), 0.5).view(torch.int32)
    words[..., 1] = (zero & 0xFFFF | (128 * zero & 0xFFFF) << 16)[:, None]
    codes = torch.arange(-128, 128, dtype=torch.int8)
    stored = {
        ".codes": codes.view(torch.uint8).expand(257, -1).contiguous(),
        ".scales": words.view(torch.uint8).view(257, 256 // group, 8),
    }
    form, numbers = RowsDecoder(group, 256, 8), 0.5 * (codes[None].double() - zero[:, None])
    assert torch.equal(form.dequantize(stored, torch.float64), numbers)
    matrix = native_matrix(form, stored, exact)
    assert matrix is not None
    x = torch.zeros(257, 256)
    x[:256].fill_diagonal_(1)
    x[256] = 1
    for m in (1, 8, 257):
        want = (x[-m:].double() @ numbers.t()).float()
        got = matrix.linear(x[-m:])
        assert torch.allclose(got, want, rtol=2.0**-15, atol=1e-6) and (not exact or torch.equal(got, want))


@pytest.mark.parametrize("scale", [float("inf"), float("nan"), -(2.0**41)])
def test_scales_that_integers_cannot_take_are_left_to_torch(scale: float, kernels: Library) -> None:
    for case in (Case("int4-rows", (1, 64)), Case("int8-rows", (1, 64)), Case("int8-rows-symmetric", (1, 64))):
        made = sample(case, 4, 128)
        made.stored[".scales"].view(torch.float32)[2, 1, 0] = scale
        assert native_matrix(made.decoder, made.stored) is None
    made = sample(Case("int8-channel"), 4, 128)
    made.stored[".weight_scale"][2] = scale
    assert native_matrix(made.decoder, made.stored) is None
