"""Routing and fp32 products, each level, against torch in float64."""

from __future__ import annotations

import pytest
import torch

from oddrank.native import Library
from oddrank.native.dense32 import linear_f32
from oddrank.native.router import route


@pytest.mark.parametrize(("experts", "chosen"), [(1, 1), (5, 2), (128, 8), (257, 9)])
def test_routing(experts: int, chosen: int, level: str, kernels: Library) -> None:
    scores = torch.randn(70, experts + 3)[:, 3:] * 5
    weights, ids = route(kernels, scores, chosen)
    chances = torch.softmax(scores.double(), -1)
    want, order = chances.topk(chosen, -1)
    assert ids.dtype == torch.int64 and torch.equal(ids, order)
    assert torch.allclose(weights.double(), want / want.sum(-1, keepdim=True), rtol=2e-6, atol=0)
    for threads in (2, 3):
        again = route(kernels, scores, chosen, threads)
        assert torch.equal(again[0], weights) and torch.equal(again[1], ids)


def test_of_equals_the_first(level: str, kernels: Library) -> None:
    scores = torch.tensor([[1.0, 2.0, 1.0, 2.0, 2.0, 0.0], [-4.0] * 6])
    weights, ids = route(kernels, scores, 4)
    assert ids.tolist() == [[1, 3, 4, 0], [0, 1, 2, 3]]
    assert torch.allclose(weights[1], torch.full((4,), 0.25))


@pytest.mark.parametrize("odd", [float("nan"), float("inf"), -float("inf"), 1e38, -1e38])
def test_scores_that_are_no_scores(odd: float, level: str, kernels: Library) -> None:
    """Ids stay different numbers of experts, so that nothing is read where there is nothing; what is wrong is seen."""
    for places in ([0], [3], [1, 4], list(range(6))):
        scores = torch.randn(1, 6)
        scores[0, places] = odd
        weights, ids = route(kernels, scores, 4)
        found = ids[0].tolist()
        assert len(set(found)) == 4 and min(found) >= 0 and max(found) < 6
        wrong = torch.softmax(scores.double(), -1).isnan().any()
        assert bool(weights.isnan().any()) == bool(wrong)


@pytest.mark.parametrize(("n", "k"), [(1, 1), (1, 2048), (7, 33), (256, 300), (300, 1000)])
def test_products(n: int, k: int, level: str, kernels: Library) -> None:
    a, bias = torch.randn(n, k), torch.randn(n)
    for m in (1, 2, 4, 7):
        x = torch.randn(m, k + 5)[:, 5:]
        exact = x.double() @ a.double().t()
        bound = x.double().abs() @ a.double().abs().t() * (k / 8 + 16) * 2.0**-24
        got = linear_f32(kernels, a, x)
        assert ((got.double() - exact).abs() <= bound).all()
        with_bias = linear_f32(kernels, a, x, bias)
        assert torch.equal(with_bias, got + bias)
        for threads in (2, 3):
            assert torch.equal(linear_f32(kernels, a, x, bias, threads), with_bias)
        assert torch.equal(linear_f32(kernels, a, x[:1])[0], got[0])
