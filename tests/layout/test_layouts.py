"""Properties of the layout words: runs, apportionment, pairings."""

from __future__ import annotations

import itertools
import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from oddrank.layout.layouts import Layout, Run, apportion, even_pairing, from_runs, to_runs

slots_st = st.lists(st.one_of(st.just(-1), st.integers(0, 30)), max_size=60)


@given(slots_st)
def test_runs_stand_for_their_slots(slots: list[int]) -> None:
    runs = to_runs(slots)
    assert from_runs(runs).tolist() == slots
    assert from_runs(runs).dtype == np.int64
    assert all(r.count > 0 for r in runs)
    # no two neighbours could be one run
    for a, b in itertools.pairwise(runs):
        assert not (a.start < 0 and b.start < 0)
        assert not (a.start >= 0 and b.start == a.start + a.count)


@given(st.lists(st.tuples(st.integers(-1, 30), st.integers(1, 5)), max_size=20))
def test_any_runs_normalise_to_one_form(pairs: list[tuple[int, int]]) -> None:
    runs = [Run(start, count) for start, count in pairs]
    slots = []
    for start, count in pairs:
        slots += [-1] * count if start < 0 else list(range(start, start + count))
    assert from_runs(runs).tolist() == slots
    assert to_runs(from_runs(runs)) == to_runs(slots)


@given(st.lists(slots_st, min_size=1, max_size=6))
def test_a_layout_counts_its_slots(ranks: list[list[int]]) -> None:
    layout = Layout.of("mlp", ranks)
    assert layout.counts() == tuple(len(r) for r in ranks)
    assert layout.real() == tuple(sum(s >= 0 for s in r) for r in ranks)
    assert layout.total() == sum(len(r) for r in ranks)
    assert [layout.slots(i).tolist() for i in range(len(ranks))] == ranks


@given(st.integers(1, 8), st.integers(1, 8), st.booleans(), st.randoms(use_true_random=False))
def test_even_split_means_every_element_once_in_order_and_equally(ranks: int, per: int, spoil: bool, rng) -> None:
    whole = list(range(ranks * per))
    if spoil and len(whole) > 1:
        i, j = rng.sample(range(len(whole)), 2)
        whole[i], whole[j] = whole[j], whole[i]
    layout = Layout.of("mlp", [whole[i * per : (i + 1) * per] for i in range(ranks)])
    assert layout.is_even_split(ranks * per) == (whole == list(range(ranks * per)))
    assert not layout.is_even_split(ranks * per + 1)


def test_an_uneven_or_short_layout_is_no_even_split() -> None:
    assert not Layout.of("mlp", [range(2), range(2, 3)]).is_even_split(3)
    assert not Layout.of("mlp", [[0, 1], [2, -1]]).is_even_split(3)


shares_st = st.lists(st.floats(0.01, 100.0, allow_nan=False), min_size=1, max_size=12)


@given(st.integers(0, 500), st.integers(1, 16))
def test_equal_shares_differ_by_one_unit_at_most(total: int, ranks: int) -> None:
    given_ = apportion(total, ranks)
    assert sum(given_) == total
    assert len(given_) == ranks
    assert max(given_) - min(given_) <= 1
    assert max(given_) == math.ceil(total / ranks)


@given(st.integers(0, 500), shares_st)
def test_shares_are_kept_to_within_a_unit(total: int, shares: list[float]) -> None:
    given_ = apportion(total, len(shares), shares)
    assert sum(given_) == total
    assert min(given_) >= 0
    exact = [total * s / sum(shares) for s in shares]
    if total >= len(shares):
        # everybody gets one; who would have had none is paid for by the largest
        assert min(given_) >= 1
        starved = sum(e < 1 for e in exact)
    else:
        starved = 0
    for g, e in zip(given_, exact, strict=True):
        assert g < e + 1 + 1e-6 or g == 1
        assert g > e - 1 - starved - 1e-6


def test_shares_by_hand() -> None:
    assert apportion(10, 3) == [4, 3, 3]
    assert apportion(10, 2, [3, 1]) == [8, 2]  # 7.5 and 2.5: of equal remainders the first rank wins
    assert apportion(24, 2, [24, 16]) == [14, 10]
    assert apportion(3, 3, [1000, 1, 1]) == [1, 1, 1]
    assert apportion(2, 3) == [1, 1, 0]


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 6)), min_size=1, max_size=5))
def test_even_pairing_is_slot_over_group(ranks: list[tuple[int, int]]) -> None:
    follow = Layout.of("q_heads", [range(le * g) for le, g in ranks])
    lead = Layout.of("kv_heads", [range(le) for le, _ in ranks])
    expected = tuple(tuple(i for i in range(le) for _ in range(g)) for le, g in ranks)
    assert even_pairing(follow, lead).ranks == expected


def test_even_pairing_of_an_empty_rank() -> None:
    pairing = even_pairing(Layout.of("q_heads", [[], [0]]), Layout.of("kv_heads", [[], [0]]))
    assert pairing.ranks == ((), (0,))
