"""Layouts of a pair of head axes: followers (query heads, GDN value heads) beside their leaders (KV, key heads).

The ratio r = followers / leaders is part of the trained weights: follower h reads leader h // r. Every layout here
keeps each real follower beside its own leader; what they differ in is how many leaders are copied and how many
dummies are added.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

from oddrank.geometry.axis import MOST
from oddrank.layout.candidate import Candidate
from oddrank.layout.layouts import DUMMY, Layout, Pairing, apportion, even_pairing


class PairSizes:
    """The numbers of one pair: followers, leaders, and the units (whole heads) in which each may be cut."""

    def __init__(self, follower: str, leader: str, followers: int, leaders: int, units: tuple[int, int]) -> None:
        self.follower, self.leader = follower, leader
        self.followers, self.leaders = followers, leaders
        self.ratio = followers // leaders
        self.follower_unit, self.leader_unit = units


def grouped(p: PairSizes, ranks: int, g: int, leader_slots: int | None = None) -> Candidate | None:
    """Equal ranks with g follower slots on every leader slot.

    Each leader takes ceil(r / g) slots (the same leader repeated), each with g follower slots, short ones filled
    with dummies; dummy leaders are added until the slots divide by the ranks in whole units. `leader_slots` fixes
    the total instead. None where that total is too small, does not divide, or is beyond any model.
    """
    copies = -(-p.ratio // g)
    needed = p.leaders * copies
    # per rank, leaders in whole units, and g times as many followers in whole units
    step = math.lcm(p.leader_unit, p.follower_unit // math.gcd(p.follower_unit, g)) * ranks
    total = -(-needed // step) * step if leader_slots is None else leader_slots
    if total < needed or total % step or total * g > MOST["heads"]:
        return None
    leaders = np.full(total, DUMMY, dtype=np.int64)
    followers = np.full((total, g), DUMMY, dtype=np.int64)
    for leader in range(p.leaders):
        for copy in range(copies):
            slot = leader * copies + copy
            leaders[slot] = leader
            first = leader * p.ratio + copy * g
            count = min(g, p.ratio - copy * g)
            followers[slot, :count] = np.arange(first, first + count)
    per = total // ranks
    lead = Layout.of(p.leader, [leaders[i * per : (i + 1) * per] for i in range(ranks)])
    follow = Layout.of(p.follower, [followers[i * per : (i + 1) * per].reshape(-1) for i in range(ranks)])
    kind = "pad" if g >= p.ratio else "replicate"
    if total == p.leaders and g == p.ratio:
        kind = "even"
    return Candidate(kind, (follow, lead), (even_pairing(follow, lead),), g, _why(p, total, g, copies))


def _why(p: PairSizes, total: int, g: int, copies: int) -> str:
    dummies, extra = total * g - p.followers, total - p.leaders * copies
    parts = [f"{g} {p.follower} a {p.leader} slot" + (f" (trained: {p.ratio})" if g != p.ratio else "")]
    if copies > 1:
        parts.append(f"each of {p.leaders} {p.leader} held {copies} times")
    if dummies:
        parts.append(f"{dummies} dummy {p.follower}")
    if extra:
        parts.append(f"{extra} dummy {p.leader}")
    return ", ".join(parts)


def all_groupings(p: PairSizes, ranks: int) -> Iterator[Candidate]:
    """Every group size from the trained ratio down to one."""
    for g in range(p.ratio, 0, -1):
        candidate = grouped(p, ranks, g)
        if candidate is not None:
            yield candidate


def engine_copies(p: PairSizes, ranks: int) -> Candidate:
    """Fewer leaders than ranks, served by an engine that copies them itself: rank i holds leader i * L // N."""
    per = p.followers // ranks
    follow = Layout.of(p.follower, [range(i * per, (i + 1) * per) for i in range(ranks)])
    lead = Layout.of(p.leader, [[i * p.leaders // ranks] for i in range(ranks)], in_engine=True)
    why = f"the engine serves this size: it holds each of {p.leaders} {p.leader} {ranks // p.leaders} times"
    return Candidate("identity", (follow, lead), (even_pairing(follow, lead),), per, why)


def ragged(p: PairSizes, ranks: int, shares: Sequence[float] | None = None) -> Candidate | None:
    """Followers cut in order, evenly or by `shares`; each rank holds the leaders its followers read, with an explicit
    map.

    Where the followers do not divide, some ranks take one unit fewer; which ones is chosen so that the rank that is
    fullest for its share touches the fewest leaders, then so that the fewest are stored in all. None where there are
    fewer units than ranks.
    """
    units = -(-p.followers // p.follower_unit)
    if units < ranks:
        return None
    if shares is None:
        sizes = [range(1, -(-units // ranks) + 1)] * ranks
    else:
        exact = [units * share / sum(shares) for share in shares]
        given = apportion(units, ranks, shares)
        sizes = [
            range(max(1, min(n, math.floor(x))), max(n, math.ceil(x)) + 1) for n, x in zip(given, exact, strict=True)
        ]
    return _cut(p, _in_elements(p, _fewest_leaders(p, units, sizes, shares or (1.0,) * ranks)), "ragged")


def nearest(p: PairSizes, ranks: int, shares: Sequence[float]) -> Candidate | None:
    """As `ragged`, every rank as near to its share as whole units allow, wherever that cuts. None where there are
    fewer units than ranks."""
    units = -(-p.followers // p.follower_unit)
    if units < ranks:
        return None
    return _cut(p, _in_elements(p, [0, *itertools.accumulate(apportion(units, ranks, shares))]), "ragged")


def _in_elements(p: PairSizes, bounds: Sequence[int]) -> list[int]:
    return [min(b * p.follower_unit, p.followers) for b in bounds]


_Score = tuple[float, int, float]


def _fewest_leaders(p: PairSizes, units: int, sizes: Sequence[range], shares: Sequence[float]) -> list[int]:
    """Cut positions in units, each part of one of its rank's `sizes`: the smallest by (most leaders touched for a
    share, leaders stored in all, sum of squared sizes over shares), by dynamic programming over the ranks."""
    best: dict[int, tuple[_Score, list[int]]] = {0: ((0, 0, 0), [0])}
    for rank, allowed in enumerate(sizes):
        reached: dict[int, tuple[_Score, list[int]]] = {}
        least = sum(later[0] for later in sizes[rank + 1 :])
        most = sum(later[-1] for later in sizes[rank + 1 :])
        for start, ((touched, stored, squares), cuts) in best.items():
            for size in allowed:
                stop = start + size
                if not least <= units - stop <= most:
                    continue
                first, last = _leaders(p, start * p.follower_unit, min(stop * p.follower_unit, p.followers))
                count = last - first
                score = (max(touched, count / shares[rank]), stored + count, squares + size**2 / shares[rank])
                cut = [*cuts, stop]
                # of equally good cuts, the one with its larger parts first
                if stop not in reached or (score, [-c for c in cut]) < (
                    reached[stop][0],
                    [-c for c in reached[stop][1]],
                ):
                    reached[stop] = (score, cut)
        best = reached
    return best[units][1]


def _leaders(p: PairSizes, a: int, b: int) -> tuple[int, int]:
    """The range of leaders, in whole units, that followers a .. b - 1 read."""
    first = a // p.ratio // p.leader_unit * p.leader_unit
    last = -(-((b - 1) // p.ratio + 1) // p.leader_unit) * p.leader_unit
    return first, min(last, p.leaders)


def whole_groups(p: PairSizes, ranks: int, shares: Sequence[float] | None = None) -> Candidate | None:
    """Whole leaders with all their followers, unevenly: no leader is stored twice. None where there are fewer
    leaders than ranks."""
    unit = math.lcm(p.leader_unit, p.follower_unit // math.gcd(p.follower_unit, p.ratio))
    units = -(-p.leaders // unit)
    if units < ranks:
        return None
    bounds = np.minimum(np.cumsum([0, *apportion(units, ranks, shares)]) * unit, p.leaders) * p.ratio
    return _cut(p, bounds.tolist(), "groups")


def _cut(p: PairSizes, bounds: list[int], kind: str) -> Candidate:
    follow: list[range] = []
    lead: list[range] = []
    maps: list[tuple[int, ...]] = []
    for a, b in itertools.pairwise(bounds):
        first, last = _leaders(p, a, b)
        follow.append(range(a, b))
        lead.append(range(first, last))
        maps.append(tuple(h // p.ratio - first for h in range(a, b)))
    layouts = (Layout.of(p.follower, follow), Layout.of(p.leader, lead))
    sizes = [" or ".join(str(n) for n in sorted({len(r) for r in part})) for part in (follow, lead)]
    if layouts[0].is_even_split(p.followers) and layouts[1].is_even_split(p.leaders):
        kind = "even"
    stored = layouts[1].total()
    once = "each stored once" if stored == p.leaders else f"{stored} stored for {p.leaders}"
    why = f"{sizes[0]} {p.follower} a rank beside {sizes[1]} {p.leader}, no dummies, {p.leader} {once}"
    uniform = kind == "even"
    pairing = Pairing(p.follower, p.leader, tuple(maps))
    return Candidate(kind, layouts, (pairing,), p.ratio if uniform else None, why)
