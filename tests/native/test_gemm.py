"""Products with many rows of x, which the compiled kernels do by decoded tiles, against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from native.words import CASES, Case, Sample, sample
from torch import Tensor

from oddrank.native import NativeMatrix, NativeStack, native_matrix

BATCHES = (33, 47, 64, 97, 530)
"""More than a tile takes from, ragged panels of 16 and 32, more than one pass."""
SHAPES = [(1, 32), (5, 288), (7, 144), (101, 272), (130, 544)]
ODD = [(3, 17), (98, 301)]
"""Columns that only formats with a code for each number have."""


PAIRS = [case for case in CASES if case.name[:3] in ("fp8", "mxf", "nvf") or case == CASES[0]]
"""Whose products with many x round those to bf16 where the CPU multiplies that, unless they are to be exact."""
ROUNDED = [(case, True) for case in CASES] + [(case, False) for case in PAIRS]


def native(made: Sample, exact: bool = True) -> NativeMatrix:
    found = native_matrix(made.decoder, made.stored, exact)
    assert found is not None
    return found


def rows(m: int, k: int) -> Tensor:
    """Numbers of bf16: rounding to it changes none."""
    return torch.from_numpy(np.random.default_rng(m).normal(0, 1, (m, k))).bfloat16().float()


def error(got: Tensor, x: Tensor, numbers: np.ndarray) -> float:
    """The largest error over what fp32 may bring: a sum of K numbers, one after the other, rounds at most K times by
    2^-24 of the sum of magnitudes, and four times for decoding."""
    a = x.double().numpy()
    bound = np.abs(a) @ np.abs(numbers).T * (numbers.shape[1] + 4) * 2.0**-24
    return float((np.abs(got.double().numpy() - a @ numbers.T) / np.maximum(bound, 1e-300)).max())


@pytest.mark.parametrize(("case", "exact"), ROUNDED, ids=str)
def test_products_with_many_rows(case: Case, exact: bool, level: str) -> None:
    for n, k in SHAPES + (ODD if case.name[:3] in ("den", "fp8", "int") else [(3, 72)]):
        made = sample(case, n, k, seed=n + k)
        matrix = native(made, exact)
        for m in BATCHES if (n, k) == SHAPES[3] else (33, 50, 70):
            if not exact and m < 64 and ("fp4" in case.name or case.block[0] >= 32):
                continue  # by integers, or blocks' scales go into x before it is rounded: test_native_fixed.py
            if not exact and "fp4" in case.name and level != "avx512bf16":
                continue
            x = rows(m, k)
            assert error(matrix.linear(x, threads=2), x, made.numbers) < 1, (n, k, m)


@pytest.mark.parametrize(("case", "exact"), ROUNDED[::3], ids=str)
def test_neither_threads_nor_neighbours_change_a_bit(case: Case, exact: bool, level: str) -> None:
    matrix = native(sample(case, 259, 1088), exact)
    x = rows(130, 1088)
    want = matrix.linear(x)
    for threads in (2, 3, 5):
        assert torch.equal(matrix.linear(x, threads=threads), want)
    assert torch.equal(matrix.linear(x[37:102]), want[37:102])


def test_stacks_of_several_formats_with_a_bias(level: str) -> None:
    k = 544
    made = [
        sample(case, n, k, seed=n)
        for case, n in (
            (Case("dense", dtype=torch.bfloat16), 50),
            (Case("nvfp4"), 131),
            (Case("fp8-block", (128, 32)), 3),
            (Case("mxfp4"), 97),
            (Case("nvfp4-ct"), 6),
            (Case("int4-rows", (1, 64)), 13),
            (Case("int8-rows", (1, 32)), 21),
            (Case("mxfp8"), 7),
        )
    ]
    numbers = np.concatenate([one.numbers for one in made])
    stack = NativeStack([native(one) for one in made])
    x, bias = rows(70, k), rows(1, len(numbers))[0]
    for threads in (1, 3):
        got = stack(x, bias, threads)
        assert error((got.double() - bias).float(), x, numbers) < 1.5  # the bias is added, and taken off here
        assert error(stack(x, None, threads), x, numbers) < 1


NAN = [
    (Case("dense", dtype=torch.bfloat16), ".weight", float("nan")),
    (Case("dense", dtype=torch.float16), ".weight", -float("inf")),
    (Case("fp8-block", (128, 128)), ".weight", 0x7F),
    (Case("fp8-channel"), ".weight_scale", float("nan")),
    (Case("nvfp4"), ".weight_scale", 0x7F),
    (Case("mxfp4"), ".weight_scale", 0xFF),
]


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("column", [0, -1], ids=["first", "last"])
@pytest.mark.parametrize(("case", "suffix", "value"), NAN, ids=str)
def test_what_is_not_finite_stays_in_its_row(
    case: Case, suffix: str, value: float, column: int, exact: bool, level: str
) -> None:
    made = sample(case, 140, 304)
    part = made.stored[suffix]
    words = part.view(torch.uint8) if isinstance(value, int) else part
    words[101 if len(part) == 140 else 0, column] = value
    x = torch.rand(81, 304) + 0.5
    got, want = native(made, exact).linear(x, threads=2), made.decoder.linear(x, made.stored)
    assert not want.isfinite().all()
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got[got.isinf()], want[want.isinf()])


def test_what_is_not_finite_in_x_stays_in_its_row(level: str) -> None:
    made = sample(Case("nvfp4"), 40, 288)
    x = rows(40, 288)
    want = native(made).linear(x)
    x[7, 13] = float("nan")
    got = native(made).linear(x)
    assert got[7].isnan().all()
    assert torch.equal(got[:7], want[:7]) and torch.equal(got[8:], want[8:])
