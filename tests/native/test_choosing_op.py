"""Tokens drawn from logits and the likeliest of them, each level, against the definitions in numpy's float64."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from oddrank.errors import OddrankError
from oddrank.native import Library
from oddrank.native.choosing import How, choose, likeliest
from oddrank.runtime.request import Sampling
from oddrank.runtime.sampling import Sampler
from oddrank.runtime.sampling import choose as choose_for

NUMBER = math.nan, math.inf, -math.inf


def laid_out(logits: Any, how: How) -> tuple[Any, Any]:
    """The tokens that may come, in the order in which their probabilities lie end to end, and where each of these ends,
    from 0 to 1."""
    x = logits.double().numpy() / how.temperature
    weights = np.exp(x - x.max())
    few = 0 < how.top_k < len(x)
    order = np.argsort(-x, kind="stable")[: how.top_k if few else None]
    chances = weights[order] / (weights[order].sum() if few else weights.sum())
    before = np.cumsum(chances) - chances
    kept = (chances >= how.min_p * chances[0]) & ((before < how.top_p) | (how.top_p == 1))
    kept[0] = True
    if few or how.top_p < 1 or how.min_p > 0:
        order, chances = order[kept], chances[kept]
    else:
        order, chances = np.arange(len(x)), weights
    return order, np.cumsum(chances) / chances.sum()


HOW = {
    "all": How(0.8), "hot": How(3.0), "cold": How(0.01), "top_k": How(0.9, top_k=20), "one": How(1.0, top_k=1),
    "top_p": How(0.7, top_p=0.9), "flat": How(5.0, top_p=0.97), "narrow": How(1.0, top_p=1e-9),
    "min_p": How(1.2, min_p=0.02), "both": How(0.7, top_p=0.8, top_k=20), "three": How(0.9, 0.95, 0.01, top_k=700),
}  # fmt: skip


@pytest.mark.parametrize("vocab", [1, 5, 63, 64, 65, 1000, 4099])
@pytest.mark.parametrize("kind", HOW)
def test_the_token_at_a_point(kind: str, vocab: int, level: str, kernels: Library) -> None:
    torch.manual_seed(vocab)
    logits = torch.randn(vocab) * 3
    logits[:: max(1, vocab // 7)] += 4
    points = [0.0, *np.random.default_rng(vocab).random(60).tolist(), 1 - 2.0**-53]
    how = HOW[kind]
    tokens, largest = choose(kernels, [logits] * len(points), [how._replace(point=p) for p in points], 1)
    order, ends = laid_out(logits, how)
    assert set(largest) == {float(logits.max())}
    for point, token in zip(points, tokens, strict=True):
        at = order.tolist().index(token)
        begin = ends[at - 1] if at else 0.0
        # sums of all weights are in fp32: what lies within 1e-5 of an end may be its neighbour's
        assert begin - 1e-5 <= point <= ends[at] + 1e-5, (point, token, begin, ends[at])


def test_what_may_come_is_cut_where_it_says(level: str, kernels: Library) -> None:
    """Probabilities 0.4, 0.3, 0.2, 0.1, at the places 2, 0, 3, 1 of a larger vocabulary of tokens that cannot come."""
    logits = torch.full((300,), -math.inf)
    logits[torch.tensor([2, 0, 3, 1])] = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    points = np.linspace(0, 0.999, 500).tolist()

    def seen(**cut: Any) -> set[int]:
        tokens, _ = choose(kernels, [logits] * 500, [How(1.0, point=p, **cut) for p in points], 1)
        return set(tokens)

    assert seen() == {0, 1, 2, 3}
    assert seen(top_p=0.39) == {2} and seen(top_p=0.41) == {2, 0} and seen(top_p=0.91) == {0, 1, 2, 3}
    assert seen(min_p=0.74) == {2, 0} and seen(min_p=0.76) == {2} and seen(min_p=1.0) == {2}
    assert seen(top_k=3) == {2, 0, 3}
    assert seen(top_k=3, top_p=0.4) == {2} and seen(top_k=3, top_p=0.46) == {2, 0}  # 0.4 of 0.9 is less than 0.46


def test_the_largest_and_of_equals_the_first(level: str, kernels: Library) -> None:
    for vocab in (1, 64, 777):
        for at in {0, vocab // 2, vocab - 1}:
            logits = torch.randn(vocab)
            logits[at:] = 9.0
            assert choose(kernels, [logits], [How()], 1) == ([at], [9.0])
    equal = torch.zeros(500)
    assert likeliest(kernels, [equal], [7], 4, 1)[1][0] == [(t, pytest.approx(-math.log(500))) for t in range(4)]
    assert {choose(kernels, [equal], [How(1.0, top_k=3, point=p)], 1)[0][0] for p in (0, 0.5, 0.9)} == {0, 1, 2}


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("at", [0, 70, 129])
def test_no_numbers(at: int, temperature: float, level: str, kernels: Library) -> None:
    """Each row is told for itself, in whatever lane the number lies that is none."""
    rows = [torch.randn(130) for _ in range(4)]
    rows[1][at], rows[2][at], rows[3][:] = math.nan, math.inf, -math.inf
    for how in (How(temperature), How(temperature, top_p=0.9), How(temperature, top_k=5)):
        tokens, largest = choose(kernels, rows, [how] * 4, 1)
        assert 0 <= tokens[0] < 130 and tokens[1:] == [-1, -1, -1]
        assert math.isnan(largest[1]) and largest[2:] == [math.inf, -math.inf]
    rows[0][at] = -math.inf  # cannot come, and keeps none from coming
    assert choose(kernels, rows[:1], [How(temperature)], 1)[0] != [at]
    own, tops = likeliest(kernels, rows[1:], [at] * 3, 3, 1)
    assert all(map(math.isnan, own)) and all(len({t for t, _ in top}) == 3 for top in tops)


@pytest.mark.parametrize("vocab", [3, 64, 1000])
def test_the_likeliest(vocab: int, level: str, kernels: Library) -> None:
    logits = torch.randn(5, vocab) * 4
    lines = torch.log_softmax(logits.double(), -1)
    own, tops = likeliest(kernels, logits.unbind(), [0, 1, 2, 1, 0], 20, 1)
    for line, token, logprob, top in zip(lines, [0, 1, 2, 1, 0], own, tops, strict=True):
        assert logprob == pytest.approx(float(line[token]), abs=2e-6)
        values, ids = line.topk(min(20, vocab))
        assert [t for t, _ in top] == ids.tolist()
        assert [p for _, p in top] == pytest.approx(values.tolist(), abs=2e-6)


def test_a_row_is_chosen_from_as_it_would_be_alone(kernels: Library) -> None:
    logits = torch.randn(40, 20000)
    asked = [Sampling(temperature=0.0 if i % 5 == 0 else 0.9, top_p=1 - i % 3 * 0.1, top_k=i % 4 * 7,
                      logit_bias=((i, 3.0),) if i % 7 == 0 else ()) for i in range(40)]  # fmt: skip
    together = choose_for(logits, [Sampler(s, i) for i, s in enumerate(asked)])
    assert together == [Sampler(s, i)(row) for i, (s, row) in enumerate(zip(asked, logits, strict=True))]
    by_torch = [Sampler(s, i).with_torch(Sampler(s, i).biased(row)) for i, (s, row) in enumerate(
        zip(asked, logits, strict=True))]  # fmt: skip
    assert together == by_torch
    logits[3, 5] = math.nan
    mixed = choose_for(logits, [Sampler(s, i) for i, s in enumerate(asked)])
    assert isinstance(mixed[3], OddrankError)
    assert mixed[:3] + mixed[4:] == together[:3] + together[4:]
