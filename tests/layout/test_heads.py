"""Every candidate layout of a pair of head axes keeps each real follower beside its own leader, exactly once."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oddrank.layout import heads
from oddrank.layout.candidate import Candidate
from oddrank.layout.heads import PairSizes


@st.composite
def pairs(draw: st.DrawFn, max_units: int = 2) -> tuple[PairSizes, int]:
    """A pair with units of one or two heads, and a number of ranks."""
    ratio, leaders = draw(st.integers(1, 8)), draw(st.integers(1, 8))
    units = (draw(st.integers(1, max_units)), draw(st.integers(1, max_units)))
    return PairSizes("q_heads", "kv_heads", ratio * leaders, leaders, units), draw(st.integers(1, 9))


def check(p: PairSizes, ranks: int, c: Candidate, *, uniform: bool | None = None) -> None:
    """What must hold for any candidate, checked slot by slot."""
    follow, lead = c.layouts
    (pairing,) = c.pairings
    assert (follow.axis, lead.axis) == ("q_heads", "kv_heads") == (pairing.follower, pairing.leader)
    assert len(follow.ranks) == len(lead.ranks) == len(pairing.ranks) == ranks
    seen: list[int] = []
    for rank in range(ranks):
        f, le, partner = follow.slots(rank).tolist(), lead.slots(rank).tolist(), pairing.ranks[rank]
        assert len(partner) == len(f)
        for slot, (q, at) in enumerate(zip(f, partner, strict=True)):
            assert 0 <= at < len(le)
            if q >= 0:
                assert le[at] == q // (p.followers // p.leaders), (rank, slot)
                seen.append(q)
        assert all(-1 <= x < p.leaders for x in le)
    assert sorted(seen) == list(range(p.followers))
    if uniform:
        assert len(set(follow.counts())) == 1 and len(set(lead.counts())) == 1
        g = follow.counts()[0] // lead.counts()[0]
        assert c.gqa == g
        assert all(m == tuple(i // g for i in range(len(m))) for m in pairing.ranks)


@given(pairs(), st.data())
def test_grouped(pair: tuple[PairSizes, int], data: st.DataObject) -> None:
    p, ranks = pair
    g = data.draw(st.integers(1, p.ratio + 2))
    c = heads.grouped(p, ranks, g)
    assert c is not None
    check(p, ranks, c, uniform=True)
    follow, lead = c.layouts
    copies = -(-p.ratio // g)
    assert follow.total() == lead.total() * g
    assert lead.total() >= p.leaders * copies
    # cut in whole units on every rank
    assert lead.counts()[0] % p.leader_unit == 0
    assert follow.counts()[0] % p.follower_unit == 0
    # no smaller total would do: searched, not computed
    for per in range(lead.counts()[0]):
        enough = per * ranks >= p.leaders * copies
        assert not (enough and per % p.leader_unit == 0 and (per * g) % p.follower_unit == 0)
    # every real leader is held `copies` times, none more often than the others
    held = np.bincount([x for r in range(ranks) for x in lead.slots(r) if x >= 0], minlength=p.leaders)
    assert set(held.tolist()) == {copies}


@given(pairs(), st.data())
def test_grouped_at_a_fixed_total(pair: tuple[PairSizes, int], data: st.DataObject) -> None:
    p, ranks = pair
    g, total = data.draw(st.integers(1, p.ratio)), data.draw(st.integers(1, 40))
    c = heads.grouped(p, ranks, g, total)
    per = total // ranks
    fits = (
        total >= p.leaders * -(-p.ratio // g)
        and total % ranks == 0
        and per % p.leader_unit == 0
        and per * g % p.follower_unit == 0
    )
    assert (c is not None) == fits
    if c is not None:
        assert c.layouts[1].total() == total
        check(p, ranks, c, uniform=True)


@given(pairs())
def test_all_groupings_go_from_the_trained_ratio_to_one(pair: tuple[PairSizes, int]) -> None:
    p, ranks = pair
    made = list(heads.all_groupings(p, ranks))
    assert [c.gqa for c in made] == list(range(p.ratio, 0, -1))
    for c in made:
        check(p, ranks, c, uniform=True)


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4), st.integers(1, 4))
def test_engine_copies(leaders: int, copies: int, per: int, _: int) -> None:
    ranks = leaders * copies
    p = PairSizes("q_heads", "kv_heads", ranks * per, leaders, (1, 1))
    c = heads.engine_copies(p, ranks)
    check(p, ranks, c, uniform=True)
    assert c.layouts[1].in_engine
    assert c.layouts[1].counts() == (1,) * ranks


@settings(max_examples=200)
@given(pairs(max_units=1))
def test_ragged_takes_the_best_of_all_cuts(pair: tuple[PairSizes, int]) -> None:
    """Against every possible cut with the smallest largest part: fewest leaders on the fullest rank, then in all."""
    p, ranks = pair
    c = heads.ragged(p, ranks)
    if p.followers < ranks:
        assert c is None
        return
    assert c is not None
    check(p, ranks, c)
    follow, lead = c.layouts
    most = -(-p.followers // ranks)
    assert max(follow.counts()) == most and min(follow.counts()) >= 1
    assert follow.total() == p.followers  # no dummies
    assert all((s >= 0).all() for s in (lead.slots(r) for r in range(ranks)))
    if p.followers <= 18 and ranks <= 5:
        best = min(_touched(p, cut) for cut in _cuts(p.followers, ranks, most))
        assert (max(lead.counts()), lead.total()) == best


def _cuts(total: int, ranks: int, most: int) -> list[tuple[int, ...]]:
    return [cut for cut in itertools.product(range(1, most + 1), repeat=ranks) if sum(cut) == total]


def _touched(p: PairSizes, cut: tuple[int, ...]) -> tuple[int, int]:
    ratio, start, counts = p.followers // p.leaders, 0, []
    for n in cut:
        counts.append(len({h // ratio for h in range(start, start + n)}))
        start += n
    return max(counts), sum(counts)


@given(pairs())
def test_ragged_in_units(pair: tuple[PairSizes, int]) -> None:
    p, ranks = pair
    c = heads.ragged(p, ranks)
    units = -(-p.followers // p.follower_unit)
    assert (c is None) == (units < ranks)
    if c is None:
        return
    check(p, ranks, c)
    # ranks meet at whole units; only the last may be short
    at = 0
    for rank in range(ranks - 1):
        at += c.layouts[0].counts()[rank]
        assert at % p.follower_unit == 0
    for rank in range(ranks):
        held = c.layouts[1].slots(rank)
        assert held[0] % p.leader_unit == 0
        assert (held[-1] + 1) % p.leader_unit == 0 or held[-1] + 1 == p.leaders
        assert (np.diff(held) == 1).all()


@given(pairs(), st.data())
def test_ragged_by_shares(pair: tuple[PairSizes, int], data: st.DataObject) -> None:
    p, ranks = pair
    shares = data.draw(st.lists(st.floats(0.1, 10), min_size=ranks, max_size=ranks))
    c = heads.ragged(p, ranks, shares)
    if -(-p.followers // p.follower_unit) < ranks:
        assert c is None
        return
    assert c is not None
    check(p, ranks, c)
    assert min(c.layouts[0].counts()) >= 1


@given(pairs(), st.booleans(), st.data())
def test_whole_groups(pair: tuple[PairSizes, int], weighted: bool, data: st.DataObject) -> None:
    p, ranks = pair
    shares = data.draw(st.lists(st.floats(0.1, 10), min_size=ranks, max_size=ranks)) if weighted else None
    c = heads.whole_groups(p, ranks, shares)
    if c is None:
        return
    check(p, ranks, c)
    follow, lead = c.layouts
    assert lead.total() == p.leaders  # no leader twice
    assert all(f == le * p.ratio for f, le in zip(follow.counts(), lead.counts(), strict=True))
    assert min(lead.counts()) >= 1


@given(pairs())
def test_ragged_is_never_dominated_by_a_grouping(pair: tuple[PairSizes, int]) -> None:
    """The runtime's default needs no more of anything than any equal-rank layout does."""
    p, ranks = pair
    p = PairSizes("q_heads", "kv_heads", p.followers, p.leaders, (1, 1))
    c = heads.ragged(p, ranks)
    if c is None:
        return
    for other in heads.all_groupings(p, ranks):
        assert not c.dominated_by(other), (c.largest(), c.totals(), other.largest(), other.totals())


@given(pairs(max_units=1))
def test_ragged_is_the_even_split_where_there_is_one(pair: tuple[PairSizes, int]) -> None:
    p, ranks = pair
    c = heads.ragged(p, ranks)
    if p.leaders % ranks == 0:
        assert c is not None and c.kind == "even" and c.gqa == p.ratio
        assert c.layouts[0].is_even_split(p.followers) and c.layouts[1].is_even_split(p.leaders)


@pytest.mark.parametrize(
    ("followers", "leaders", "ranks", "q", "kv"),
    [
        (24, 4, 3, [8, 8, 8], [2, 2, 2]),
        (9, 3, 2, [5, 4], [2, 2]),
        (40, 10, 4, [10, 10, 10, 10], [3, 3, 3, 3]),
    ],
)
def test_published_ragged_cuts(followers: int, leaders: int, ranks: int, q: list[int], kv: list[int]) -> None:
    c = heads.ragged(PairSizes("q_heads", "kv_heads", followers, leaders, (1, 1)), ranks)
    assert c is not None
    assert sorted(c.layouts[0].counts(), reverse=True) == q
    assert list(c.layouts[1].counts()) == kv


def test_28_over_4_at_8_keeps_each_rank_on_one_kv_head() -> None:
    c = heads.ragged(PairSizes("q_heads", "kv_heads", 28, 4, (1, 1)), 8)
    assert c is not None
    assert sorted(c.layouts[0].counts()) == [3, 3, 3, 3, 4, 4, 4, 4]
    assert set(c.layouts[1].counts()) <= {1, 2}


def test_plain_padding_of_24_over_4_at_3_by_hand() -> None:
    c = heads.grouped(PairSizes("q_heads", "kv_heads", 24, 4, (1, 1)), 3, 6)
    assert c is not None
    assert [c.layouts[0].slots(r).tolist() for r in range(3)] == [
        list(range(12)),
        list(range(12, 24)),
        [-1] * 12,
    ]
    assert [c.layouts[1].slots(r).tolist() for r in range(3)] == [[0, 1], [2, 3], [-1, -1]]


def test_regrouping_9_over_3_in_twos_by_hand() -> None:
    c = heads.grouped(PairSizes("q_heads", "kv_heads", 9, 3, (1, 1)), 2, 2)
    assert c is not None
    assert [c.layouts[0].slots(r).tolist() for r in range(2)] == [[0, 1, 2, -1, 3, 4], [5, -1, 6, 7, 8, -1]]
    assert [c.layouts[1].slots(r).tolist() for r in range(2)] == [[0, 0, 1], [1, 2, 2]]
