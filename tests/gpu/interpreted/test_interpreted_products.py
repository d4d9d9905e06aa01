"""Products with every stored form by the kernels, run by Triton's interpreter, against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from formats.codec import E2M1, E4M3
from native.words import CASES, Case, Sample, sample
from torch import Tensor

from oddrank.gpu import check, linear_for
from oddrank.gpu.launch import Tiles, parts
from oddrank.gpu.linear import GpuLinear
from oddrank.runtime.formats import Decoder, decoder
from oddrank.runtime.formats.rows import RowsDecoder

TYPES = [torch.float32, torch.bfloat16, torch.float16]
LAST = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-11}
"""What rounding a result to the type may bring, of the result. The interpreter cuts bf16 off instead of rounding."""


def gpu(made: Sample) -> GpuLinear:
    found = linear_for(made.decoder, made.stored)
    assert found is not None
    return found


def rows(m: int, k: int, dtype: torch.dtype) -> Tensor:
    return torch.from_numpy(np.random.default_rng(m).normal(0, 1, (m, k))).to(dtype)


def error(got: Tensor, x: Tensor, numbers: np.ndarray, bias: np.ndarray | float = 0.0) -> float:
    """The largest error, of what a sum of K fp32 products and one rounding at the end may bring. Below 1 is right."""
    a, k = x.double().numpy(), numbers.shape[1]
    want = a @ numbers.T + bias
    bound = (np.abs(a) @ np.abs(numbers).T + np.abs(bias)) * (k / 8 + 16) * 2.0**-24 + np.abs(want) * LAST[x.dtype]
    return float((np.abs(got.double().numpy() - want) / np.maximum(bound, 1e-300)).max())


def sizes(case: Case) -> list[tuple[int, int]]:
    return [(70, 288), (9, 130), (1, 1)] if "fp4" not in case.name else [(70, 288), (9, 136), (1, 2)]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_form_and_type(case: Case) -> None:
    """Rows and columns that no tile divides, one row of x and many, in all three types."""
    for place, (n, k) in enumerate(sizes(case)):
        made = sample(case, n, k, seed=n + k)
        linear = gpu(made)
        for m in (1, 5, 16, 17, 70) if place == 0 else (2, 33):
            x = rows(m, k, TYPES[(m + place) % 3])
            got = linear(x)
            assert got.dtype == x.dtype and got.shape == (m, n)
            assert error(got, x, made.numbers) < 1, (n, k, m)
            assert n == 1 or not got[:, 0].any()  # the row of zeros


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize(
    "case",
    [
        Case("fp8-block", (128, 128)),
        Case("fp8-channel"),
        Case("nvfp4-ct"),
        Case("mxfp4"),
        Case("int4-rows", (1, 64)),
        Case("int8-rows", (1, 64)),
        Case("int8-channel"),
        Case("mxfp8"),
    ],
    ids=str,
)
def test_sums_in_parts(case: Case, dtype: torch.dtype) -> None:
    """Few rows of a narrow matrix: several programs share a row's columns. Each row's bits are the same whatever is
    beside it."""
    made = sample(case, 19, 1184 if case.name != "fp8-channel" else 1101)
    linear, bias = gpu(made), torch.linspace(-3, 3, 19)
    x = rows(4, made.numbers.shape[1], dtype)
    got = linear(x, bias, processors=8)
    assert error(got, x, made.numbers, bias.double().numpy()) < 1
    assert torch.equal(linear(x[2], bias, processors=8), got[2])
    assert torch.equal(linear(x, bias, processors=8), got)


@pytest.mark.parametrize("block", [(64, 64), (128, 64), (64, 16), (3, 48), (16, 272), (1, 32)], ids=str)
def test_blocks_that_a_plan_refines(block: tuple[int, int]) -> None:
    made = sample(Case("fp8-block", block), 75, 200)
    for m in (3, 20):
        x = rows(m, 200, torch.float32)
        assert error(gpu(made)(x), x, made.numbers) < 1


@pytest.mark.parametrize("group", [32, 64, 128])
def test_every_code_with_every_zero_point(group: int) -> None:
    """Row z has the zero point z; columns are the codes, over and over."""
    k, draw = 2 * group, torch.arange(2 * group, dtype=torch.uint8) % 16
    words = torch.full((17, 2), 0.5).view(torch.int32) + torch.arange(17, dtype=torch.int32)[:, None]
    stored = {
        ".codes": (draw[0::2] | draw[1::2] << 4).expand(17, -1).contiguous(),
        ".scales": words.view(torch.uint8).view(17, 2, 4),
    }
    linear = linear_for(RowsDecoder(group, k), stored)
    assert linear is not None
    for dtype in TYPES:
        got = linear(torch.eye(k, dtype=dtype))
        assert torch.equal(got.double(), 0.5 * (draw[:, None].double() - torch.arange(17)))


@pytest.mark.parametrize("m", [1, 20])
def test_columns_in_an_order_of_their_own(m: int) -> None:
    made, order = sample(Case("int4-rows", (1, 32)), 21, 328), np.random.default_rng(0).permutation(328)
    made.stored[".order"] = torch.from_numpy(order.astype(np.int32))
    numbers = np.empty_like(made.numbers)
    numbers[:, order] = made.numbers
    x = rows(m, 656, torch.float32)[:, ::2]
    assert error(gpu(made)(x), x, numbers) < 1


def test_blocks_that_no_tensor_core_takes() -> None:
    made = sample(Case("fp8-block", (64, 40)), 8, 200)
    assert linear_for(made.decoder, made.stored) is None


def test_x_of_any_layout_and_a_bias() -> None:
    made = sample(Case("fp8-block", (128, 128)), 66, 200)
    linear, bias = gpu(made), torch.randn(66, generator=torch.Generator().manual_seed(0))
    x = torch.randn(20, 400, generator=torch.Generator().manual_seed(1))
    for part in (x[:6, ::2], x[:, :200], x[::2, 200:], x[:6, :200].reshape(2, 3, 200)):
        got = linear(part, bias)
        assert got.shape == (*part.shape[:-1], 66)
        flat = part.reshape(-1, 200)
        assert error(got.reshape(-1, 66), flat, made.numbers, bias.double().numpy()) < 1
    assert linear(x[:0, :200]).shape == (0, 66)


NAN = [
    (Case("dense", dtype=torch.bfloat16), ".weight", float("nan")),
    (Case("fp8-block", (128, 128)), ".weight", 0x7F),
    (Case("fp8-channel"), ".weight", 0xFF),
    (Case("fp8-block", (128, 128)), ".weight_scale_inv", float("nan")),
    (Case("fp8-channel"), ".weight_scale", float("nan")),
    (Case("nvfp4"), ".weight_scale", 0x7F),
    (Case("nvfp4-ct"), ".weight_scale", 0xFF),
    (Case("mxfp4"), ".weight_scale", 0xFF),
    (Case("mxfp8"), ".weight", 0xFF),
    (Case("mxfp8"), ".weight_scale", 0xFF),
    (Case("int4-rows", (1, 64)), ".scales", float("nan")),
    (Case("int8-rows", (1, 64)), ".scales", float("nan")),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize(("case", "suffix", "value"), NAN, ids=str)
def test_codes_of_nan_reach_their_rows_and_no_other(case: Case, suffix: str, value: float, dtype: torch.dtype) -> None:
    made = sample(case, 140, 272)
    part = made.stored[suffix]
    packed = "-rows" in case.name
    words = part.view(torch.float32 if packed else torch.uint8) if packed or isinstance(value, int) else part
    rows_of_one = 1 if len(part) == 140 else 128
    row = 3 if rows_of_one == 1 else 0
    words[row, -1] = value
    hit = torch.zeros(140, dtype=torch.bool)
    hit[row : row + rows_of_one] = True
    for m in (2, 20):
        got = gpu(made)(torch.rand(m, 272).to(dtype) * 0.01)
        assert torch.equal(got.isnan(), hit.expand(m, 140))


ONES = {
    "mxfp4": torch.full((2, 64), 0x22, dtype=torch.uint8),
    "mxfp8": torch.full((2, 128), 0x38, dtype=torch.uint8).view(torch.float8_e4m3fn),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ONES)
def test_powers_at_the_ends(name: str, dtype: torch.dtype) -> None:
    """Codes 0 (2^-127, subnormal in fp32 and bf16) and 254 of e8m0 are numbers."""
    scales = torch.tensor([[0, 0, 0, 0], [254, 254, 254, 254]], dtype=torch.uint8)
    linear = linear_for(Case(name).decoder(), {".weight": ONES[name], ".weight_scale": scales})
    assert linear is not None
    for m in (1, 20):
        got = linear(torch.full((m, 128), 1.0, dtype=dtype))
        assert torch.equal(got[:, 0].double(), torch.full((m,), 128 * 2.0**-127, dtype=torch.float64))
        got = linear(torch.full((m, 128), 2.0**-10, dtype=dtype))
        assert torch.equal(got[:, 1].double(), torch.full((m,), 2.0**124, dtype=torch.float64))


def test_tiles_hold_what_half_precision_represents() -> None:
    """What the kernels round to x's type in a tile is exact, so it is not rounded: every e4m3 number; 2^-8 of every
    e2m1 number times every e4m3 scale, in both types; and, in bf16, e2m1 times every power of two that is finite."""
    finite = torch.from_numpy(E4M3[np.isfinite(E4M3)]).double()
    e2m1 = torch.from_numpy(E2M1)
    powers = torch.exp2(torch.arange(-127, 126, dtype=torch.float64))
    for dtype in (torch.bfloat16, torch.float16):
        for numbers in (finite, torch.outer(e2m1, finite) / 256):
            assert torch.equal(numbers.to(dtype).double(), numbers)
    numbers = torch.outer(e2m1, powers)
    assert torch.equal(numbers.to(torch.bfloat16).double(), numbers)


def test_parts_cover_every_column_once() -> None:
    for n, k, width, processors in ((64, 4096, 128, 132), (4096, 4095, 256, 108), (9, 511, 64, 8), (20, 1101, 128, 8)):
        count, chunk = parts(n, k, Tiles(16, 64, width), processors)
        assert chunk % width == 0 and (count - 1) * chunk < k <= count * chunk
    assert parts(4096, 4096, Tiles(16, 64, 128), 132)[0] > 1
    assert parts(1 << 17, 4096, Tiles(16, 64, 128), 132)[0] == 1


def test_what_is_left_to_torch() -> None:
    """Infinite scales, views that are not whole, no elements."""
    made = sample(Case("fp8-block", (128, 128)), 4, 256)
    made.stored[".weight_scale_inv"][0, 0] = float("inf")
    assert linear_for(made.decoder, made.stored) is None
    made = sample(Case("int4-rows", (1, 64)), 4, 128)
    made.stored[".scales"].view(torch.float32)[2, 1] = float("inf")
    assert linear_for(made.decoder, made.stored) is None
    made = sample(Case("dense", dtype=torch.bfloat16), 4, 96)
    assert linear_for(made.decoder, {".weight": made.stored[".weight"][:, :48]}) is None
    assert linear_for(made.decoder, {".weight": made.stored[".weight"][:0]}) is None


CHECKED = [
    *(decoder(n) for n in ("dense", "fp8-block", "fp8-channel-1d", "nvfp4-ct", "mxfp4", "mxfp8", "int8-channel"))
]
CHECKED += [RowsDecoder(64, 4096), RowsDecoder(64, 4096, 8), RowsDecoder(128, 4096, 8, False)]


@pytest.mark.parametrize("form", CHECKED, ids=lambda form: form.name)
def test_the_check_before_the_first_matrix(form: Decoder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Good kernels pass; one that forgets a scale does not."""
    device = torch.device("cpu")
    assert check.agrees(form, device)
    call = GpuLinear.__call__
    monkeypatch.setattr(GpuLinear, "__call__", lambda linear, x: call(linear, x) * 1.1)
    assert not check.agrees(form, device)
