"""Decode attention and the cache's writing, each level, against plain loops in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from oddrank.errors import OddrankError
from oddrank.native import Library
from oddrank.native.attention import decode_attention
from oddrank.native.pages import Pages
from oddrank.native.rotary import cache_heads
from oddrank.runtime.layers.attention import HeadMap

HALF = {torch.float32: 0.0, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
SCALE = 0.3


class Case:
    """Sequences of these lengths in a cache whose other memory is NaN, in pages or one run a slot."""

    def __init__(
        self, partner: list[int], kv_heads: int, lengths: list[int], dim: int, dtype: torch.dtype, page: int = 0
    ) -> None:
        self.partner, self.kv_heads, self.lengths, self.dim = partner, kv_heads, lengths, dim
        draw = torch.Generator().manual_seed(len(partner) + dim)
        n, self.capacity = len(lengths), max(lengths) + 3
        used = set(partner)
        self.k = [torch.randn(kv_heads, t, dim, generator=draw).to(dtype) for t in lengths]
        self.v = [torch.randn(kv_heads, t, dim, generator=draw).to(dtype) for t in lengths]
        self.heads = HeadMap(np.array(partner, dtype=np.int64), kv_heads)
        # rows of a wider product: nothing is where a dense tensor would have it
        wide = torch.randn(n, len(partner), 2, dim, generator=draw)
        self.q, self.gate = wide.unbind(2)
        self.positions = torch.tensor(lengths) - 1
        size = page or self.capacity
        each = -(-self.capacity // size)
        order = torch.randperm(n * each, generator=draw) if page else torch.arange(n)
        self.table = order.reshape(n, each) if page else None
        self.buffer = torch.full((n * each, 2 * kv_heads, size, dim), float("nan"), dtype=dtype)
        for i, t in enumerate(lengths):
            for h in sorted(used):
                for at in range(t):
                    row = self.buffer[order.reshape(n, each)[i, at // size]]
                    row[h, at % size], row[kv_heads + h, at % size] = self.k[i][h, at], self.v[i][h, at]

    def run(self, library: Library, threads: int = 1, **more: object) -> Tensor:
        pages = Pages.of(self.buffer, self.table)
        return decode_attention(
            library, self.q, pages, self.positions, self.heads.starts, self.heads.queries, SCALE,
            threads=threads, **more,  # type: ignore[arg-type]
        )  # fmt: skip

    def want(self, window: int | None = None, gated: bool = False, sinks: Tensor | None = None) -> Tensor:
        out = torch.empty(len(self.lengths), len(self.partner), self.dim, dtype=torch.float64)
        for i, t in enumerate(self.lengths):
            first = 0 if window is None else max(0, t - window)
            for h, j in enumerate(self.partner):
                scores = self.k[i][j, first:].double() @ self.q[i, h].double() * SCALE
                if sinks is not None:
                    scores = torch.cat([scores, sinks[h : h + 1].double()])
                weights = torch.softmax(scores, 0)[: t - first]
                out[i, h] = weights @ self.v[i][j, first:].double()
                if gated:
                    out[i, h] *= torch.sigmoid(self.gate[i, h].double())
        return out.flatten(1)


PARTNERS = [([0], 1), ([0, 0, 0, 1, 1, 1], 2), ([2, 0, 0, 2, 0, 2, 0], 4), ([1, 1, 1, 1, 1, 1, 1, 1], 2)]


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("dim", [8, 20, 64, 100])
@pytest.mark.parametrize("partner,kv_heads", PARTNERS, ids=str)
def test_attention(
    dtype: torch.dtype, dim: int, partner: list[int], kv_heads: int, level: str, kernels: Library
) -> None:
    case = Case(partner, kv_heads, [1, 70, 33], dim, dtype)
    for window in (None, 1, 40):
        got = case.run(kernels, window=window)
        assert torch.allclose(got.double(), case.want(window), rtol=0, atol=3e-6), window
    got = case.run(kernels, gate=case.gate)
    assert torch.allclose(got.double(), case.want(gated=True), rtol=0, atol=3e-6)


@pytest.mark.parametrize("page", [0, 16, 48])
@pytest.mark.parametrize("window", [None, 600])
def test_long_sequences_in_pages_on_any_number_of_threads(
    page: int, window: int | None, level: str, kernels: Library
) -> None:
    case = Case([0, 1, 1, 0, 1], 2, [1300, 5, 513], 32, torch.bfloat16, page)
    got = case.run(kernels, window=window, gate=case.gate)
    assert torch.allclose(got.double(), case.want(window, True), rtol=0, atol=3e-6)
    for threads in (2, 3):
        assert torch.equal(case.run(kernels, threads, window=window, gate=case.gate), got)


def test_a_sequence_gets_the_same_alone(level: str, kernels: Library) -> None:
    case = Case([0, 1, 1], 2, [700, 1, 20], 16, torch.float32)
    got = case.run(kernels)
    case.q, case.positions = case.q[:1], case.positions[:1]
    assert torch.equal(case.run(kernels), got[:1])


def test_sinks(level: str, kernels: Library) -> None:
    sinks = torch.tensor([-3.0, 0.5, 40.0])
    case = Case([0, 1, 1], 2, [3, 530], 24, torch.float32)
    got = case.run(kernels, sinks=sinks)
    assert torch.allclose(got.double(), case.want(sinks=sinks), rtol=0, atol=3e-6)


def test_scores_far_apart(level: str, kernels: Library) -> None:
    """Weights from e^-400 to one, in rising and in falling order; nothing overflows on the way."""
    case = Case([0], 1, [1100], 8, torch.float32)
    case.q = torch.tensor([[[0.7, 0, 0, 0, 0, 0, 0, 0]]])
    for scores in (torch.linspace(-1000, 1000, 1100), torch.linspace(1000, -1000, 1100)):
        case.k[0][0] = scores[:, None]
        case.buffer[0, 0, :1100] = case.k[0][0]
        assert torch.allclose(case.run(kernels).double(), case.want(), rtol=0, atol=1e-4)


def test_not_a_number_is_not_hidden(level: str, kernels: Library) -> None:
    case = Case([0, 1], 2, [40], 16, torch.float32)
    case.buffer[0, 0, 17, 3] = float("nan")
    got = case.run(kernels).view(2, 16)
    assert got[0].isnan().all() and got[1].isfinite().all()


def test_a_cache_of_other_numbers() -> None:
    with pytest.raises(OddrankError, match="float64"):
        Pages.of(torch.empty(1, 2, 4, 8, dtype=torch.float64))


@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize("rotated", [16, 6])
def test_heads_go_into_the_cache(dtype: torch.dtype, normed: bool, rotated: int, level: str, kernels: Library) -> None:
    """Against the formula in float64; queries strided among gates, dummies' values not finite."""
    n, q_heads, kv_heads, dim, eps = 3, 5, 2, 16, 1e-3
    row = torch.randn(n, (2 * q_heads + 2 * kv_heads) * dim)
    row[0, -dim:] = float("inf")
    before = row.double().clone()
    q = row[:, : 2 * q_heads * dim].view(n, q_heads, 2, dim)[:, :, 0]
    kv = row[:, 2 * q_heads * dim :].view(n, 2 * kv_heads, dim)
    positions, slots = torch.tensor([4, 0, 7]), torch.tensor([1, 3, 0])
    angles = torch.rand(9, rotated // 2) * 6
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([-angles.sin(), angles.sin()], -1)
    places = torch.tensor([8, 0, 3])
    weights = torch.rand(2, dim)
    buffer = torch.full((4, 2 * kv_heads, 8, dim), 7.0, dtype=dtype)
    norms = (weights[0], weights[1], eps) if normed else None
    cache_heads(kernels, q, kv, Pages.of(buffer), (cos, sin, places), positions, slots=slots, norms=norms)

    def rotated_head(x: Tensor, weight: Tensor, token: int) -> Tensor:
        if normed:
            x = x / (x.square().mean() + eps).sqrt() * weight.double()
        c, s = angles[places[token]].double().cos(), angles[places[token]].double().sin()
        a, b, rest = x[: rotated // 2], x[rotated // 2 : rotated], x[rotated:]
        return torch.cat([a * c - b * s, b * c + a * s, rest])

    untouched = torch.ones_like(buffer, dtype=torch.bool)
    for t in range(n):
        old_q = before[t, : 2 * q_heads * dim].view(q_heads, 2, dim)
        old_kv = before[t, 2 * q_heads * dim :].view(2 * kv_heads, dim)
        for h in range(q_heads):
            assert torch.allclose(q[t, h].double(), rotated_head(old_q[h, 0], weights[0], t), atol=2e-6)
        for h in range(kv_heads):
            got = buffer[slots[t], :, positions[t]].double()
            want = rotated_head(old_kv[h], weights[1], t)
            assert torch.allclose(got[h], want, rtol=HALF[dtype], atol=2e-6)
            assert torch.equal(got[kv_heads + h], old_kv[kv_heads + h].to(dtype).double())
        untouched[slots[t], :, positions[t]] = False
    assert (buffer[untouched] == 7).all()
    gates = row[:, : 2 * q_heads * dim].view(n, q_heads, 2, dim)[:, :, 1]
    assert torch.equal(gates.double(), before[:, : 2 * q_heads * dim].view(n, q_heads, 2, dim)[:, :, 1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_numbers_are_rounded_as_torch_rounds(dtype: torch.dtype, level: str, kernels: Library) -> None:
    """Every exponent and many mantissas, ties, subnormals, infinities and NaN, as values of the cache."""
    bits = torch.cat([torch.arange(0, 1 << 32, 65537), torch.arange(0, 1 << 32, 0x1000 * 997)])
    numbers = bits.to(torch.int64).to(torch.uint32).view(torch.float32)
    edges = torch.tensor([65519.996, 65520.0, 65504.0, 2.0**-25, 2.0**-24 * 1.5, 2.0**-14, 3.3e38, float("nan")])
    numbers = torch.cat([numbers, edges, -edges])
    numbers = numbers[: len(numbers) // 64 * 64]
    rows = numbers.view(-1, 64)
    buffer = torch.empty(len(rows), 2, 1, 64, dtype=dtype)
    heads = torch.zeros(len(rows), 3, 64)
    heads[:, 2] = rows
    table, zero = torch.zeros(1, 64), torch.zeros(len(rows), dtype=torch.int64)
    cache_heads(kernels, heads[:, :1], heads[:, 1:], Pages.of(buffer), (table, table, zero), zero)
    got, want = buffer[:, 1, 0], rows.to(dtype)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.nan_to_num(nan=0.0, posinf=1e30), want.nan_to_num(nan=0.0, posinf=1e30))
