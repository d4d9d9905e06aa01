"""Layouts: for one axis, the slots of every rank in order; for a pair, also each slot's partner.

Even split, padding, KV replication, regrouping, ragged and weighted splits are all just layouts. Slots are kept
as runs of consecutive source elements, so that a layout of 248,320 vocabulary rows is a few numbers.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from oddrank.geometry.dims import IntArray

DUMMY = -1


class Run(msgspec.Struct, frozen=True, array_like=True):
    """`count` slots holding source elements start, start + 1, ...; or `count` dummies where start is -1."""

    start: int
    count: int


def to_runs(source: IntArray | Sequence[int]) -> tuple[Run, ...]:
    """Compress slots (source elements, -1 = dummy) into runs."""
    if isinstance(source, range) and source.step == 1 and source.start >= 0:
        return (Run(source.start, len(source)),) if source else ()
    a = np.asarray(source, dtype=np.int64)
    if not len(a):
        return ()
    step = np.where(a[:-1] < 0, a[1:] < 0, a[1:] == a[:-1] + 1)
    starts = np.flatnonzero(np.concatenate([[True], ~step]))
    ends = np.append(starts[1:], len(a))
    return tuple(Run(int(a[s]), int(e - s)) for s, e in zip(starts, ends, strict=True))


def from_runs(runs: Iterable[Run]) -> IntArray:
    """The slots a sequence of runs stands for, int64 [slots]."""
    parts = [
        np.full(r.count, DUMMY, dtype=np.int64)
        if r.start < 0
        else np.arange(r.start, r.start + r.count, dtype=np.int64)
        for r in runs
    ]
    return np.concatenate(parts) if parts else np.empty(0, dtype=np.int64)


class Layout(msgspec.Struct, frozen=True):
    """One axis laid out over ranks.

    in_engine: the ranks' slots are not parts of one whole: the executor makes the dummies or the copies itself, in
        its own buffers, and the virtual checkpoint keeps the axis as trained (vLLM's vocabulary padding and KV
        copies; experts, which every rank has all of and which are cut inside).
    """

    axis: str
    ranks: tuple[tuple[Run, ...], ...]
    in_engine: bool = False

    @classmethod
    def of(cls, axis: str, ranks: Iterable[IntArray | Sequence[int]], in_engine: bool = False) -> Layout:
        return cls(axis, tuple(to_runs(r) for r in ranks), in_engine)

    def slots(self, rank: int) -> IntArray:
        return from_runs(self.ranks[rank])

    def counts(self) -> tuple[int, ...]:
        """Slots per rank."""
        return tuple(sum(r.count for r in runs) for runs in self.ranks)

    def real(self) -> tuple[int, ...]:
        """Slots per rank that hold a source element."""
        return tuple(sum(r.count for r in runs if r.start >= 0) for runs in self.ranks)

    def total(self) -> int:
        return sum(self.counts())

    def is_even_split(self, stock: int) -> bool:
        """Every element once, in order, the same number on each rank."""
        return len(set(self.counts())) == 1 and to_runs(from_runs(r for k in self.ranks for r in k)) == (Run(0, stock),)


class Pairing(msgspec.Struct, frozen=True):
    """For every rank and every follower slot, the local leader slot it reads."""

    follower: str
    leader: str
    ranks: tuple[tuple[int, ...], ...]


def even_pairing(follower: Layout, leader: Layout) -> Pairing:
    """The map of executors that know none: follower slot i reads leader slot i // g on every rank."""
    maps = []
    for f, le in zip(follower.counts(), leader.counts(), strict=True):
        g = max(1, f // le) if le else 1
        maps.append(tuple(i // g for i in range(f)))
    return Pairing(follower.axis, leader.axis, tuple(maps))


def apportion(total: int, ranks: int, shares: Sequence[float] | None = None) -> list[int]:
    """Whole units to ranks, in proportion to `shares` (equal by default): each gets its part rounded down or up, up
    where that overfills a rank the least for its share. Every rank gets at least one where there are enough."""
    weights = [1.0 / ranks] * ranks if shares is None else [share / sum(shares) for share in shares]
    exact = [w * total for w in weights]
    given = [int(x) for x in exact]
    overfull = [round((n + 1) / w, 9) for n, w in zip(given, weights, strict=True)]
    order = sorted(range(ranks), key=lambda i: (overfull[i], given[i] - exact[i], i))
    for i in order[: total - sum(given)]:
        given[i] += 1
    while total >= ranks and 0 in given:
        given[given.index(max(given))] -= 1
        given[given.index(0)] += 1
    return given


def fullest(total: int, ranks: int, unit: int, shares: Sequence[float] | None = None) -> float:
    """Elements of the rank that is fullest for its share, when `total` of them are dealt in whole units: as many as it
    would have if its share were an equal one."""
    units = -(-total // unit)
    if shares is None:
        return -(-units // ranks) * unit
    mean = sum(shares) / ranks
    return max(n * unit * mean / share for n, share in zip(apportion(units, ranks, shares), shares, strict=True))
