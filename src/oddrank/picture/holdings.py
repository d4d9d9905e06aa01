"""Who holds what: the slots of a plan's axes as a page shows them, rank by rank. Plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from oddrank.layout.breakdown import expert_axes
from oddrank.layout.layouts import Layout, Run
from oddrank.layout.plan import Plan

_WORDS = {
    "q": "query", "kv": "KV", "k": "key", "v": "value", "gdn": "GDN", "mlp": "MLP", "moe": "each expert",
    "shared": "shared expert", "vocab": "vocabulary",
}  # fmt: skip
_NOUNS = {"heads": "heads", "width": "channels", "vocab": "rows", "experts": "experts"}


def words(axis: str) -> str:
    """An axis's name as people say it: "GDN value heads"."""
    return " ".join(_WORDS.get(part, part) for part in axis.split("_"))


class Axis(msgspec.Struct, frozen=True):
    """An axis's numbers, from the plan's report. words: its name; noun: what its elements are called."""

    name: str
    words: str
    noun: str
    stock: int
    planned: int
    per_rank: tuple[int, ...]
    real_per_rank: tuple[int, ...]
    unit: int
    why: str

    @property
    def dummies(self) -> int:
        return sum(self.per_rank) - sum(self.real_per_rank)


class Group(msgspec.Struct, frozen=True):
    """A leader's slot and the slots that read it. leader: the head it holds, -1 for a dummy. copy of copies: which of
    the slots that hold this head, over all ranks. others: other ranks that hold it. followers: runs of one head each,
    or of any number of dummies."""

    leader: int
    copy: int
    copies: int
    others: tuple[int, ...]
    followers: tuple[Run, ...]


class Heads(msgspec.Struct, frozen=True):
    """Head slots of every rank. leader: None where the followers read no other heads; each rank then has one group.
    alike: every follower has a leader of its own, of the same number, so that one number tells both."""

    follower: Axis
    leader: Axis | None
    ratio: int
    ranks: tuple[tuple[Group, ...], ...]
    alike: bool


class Piece(msgspec.Struct, frozen=True):
    """Consecutive slots of a width. rank: whose. start: of the elements they hold, -1 for dummies. at, of: where they
    lie among all slots of all ranks laid end to end, in parts of 1."""

    rank: int
    start: int
    count: int
    at: float
    of: float


class Width(msgspec.Struct, frozen=True):
    """The slots of a width or the vocabulary. finer: the block in which its scales are rewritten, 0 = as stored.
    experts: how many of a layer have such a width; 0 where it is not theirs."""

    axis: Axis
    ranks: tuple[tuple[Piece, ...], ...]
    finer: int
    experts: int

    @property
    def divided(self) -> bool:
        """Whether a rank begins inside a group of what is stored."""
        return any(piece.start >= 0 and piece.start % self.axis.unit for rank in self.ranks for piece in rank)


class Holdings(msgspec.Struct, frozen=True):
    """Everything that a plan's ranks hold, by axis."""

    heads: tuple[Heads, ...]
    widths: tuple[Width, ...]
    experts: tuple[Axis, ...]


def holdings(report: dict[str, Any], plan: Plan) -> Holdings:
    """`report`: what `oddrank.report.describe` says of `plan`."""
    model, refined = plan.model, report["refined"]
    kind = {axis.name: axis.kind for axis in model.axes}
    axes = {
        a["name"]: msgspec.convert({**a, "words": words(a["name"]), "noun": _NOUNS[kind[a["name"]]]}, Axis)
        for a in report["axes"]
    }
    paired = {name for pair in model.pairs for name in (pair.follower, pair.leader)}
    heads = [_pair(plan, axes[p.follower], axes[p.leader], model.ratio(p)) for p in model.pairs]
    heads += [_alone(plan, axis) for name, axis in axes.items() if kind[name] == "heads" and name not in paired]
    experts = tuple(axis for name, axis in axes.items() if kind[name] == "experts")
    inside = expert_axes(model)
    widths = tuple(
        Width(
            axis,
            _pieces(plan.layout(name)),
            finer=refined.get(name, refined.get("*", 0)),
            experts=experts[0].stock if name in inside else 0,
        )
        for name, axis in axes.items()
        if kind[name] in ("width", "vocab")
    )
    return Holdings(tuple(heads), widths, experts)


def _pair(plan: Plan, follower: Axis, leader: Axis, ratio: int) -> Heads:
    followers, leaders = plan.layout(follower.name), plan.layout(leader.name)
    maps = next(p for p in plan.pairings if p.follower == follower.name).ranks
    held = [leaders.slots(rank).tolist() for rank in range(plan.tp)]
    copies = Counter(head for slots in held for head in slots)
    seen: Counter[int] = Counter()
    ranks = []
    for rank, slots in enumerate(held):
        readers: list[list[int]] = [[] for _ in slots]
        for head, slot in zip(followers.slots(rank).tolist(), maps[rank], strict=True):
            readers[slot].append(head)
        groups = []
        for head, reading in zip(slots, readers, strict=True):
            seen[head] += 1
            others = tuple(r for r in range(plan.tp) if r != rank and head in held[r]) if head >= 0 else ()
            groups.append(Group(head, seen[head], copies[head], others, tuple(_each(reading))))
        ranks.append(tuple(groups))
    alike = all(
        group.followers == (Run(group.leader, 1),) and (group.leader < 0 or group.copies == 1)
        for groups in ranks
        for group in groups
    )
    return Heads(follower, leader, ratio, tuple(ranks), alike)


def _alone(plan: Plan, axis: Axis) -> Heads:
    slots = (plan.layout(axis.name).slots(rank).tolist() for rank in range(plan.tp))
    return Heads(axis, None, 1, tuple((Group(-1, 1, 1, (), tuple(_each(mine))),) for mine in slots), False)


def _each(slots: Sequence[int]) -> Iterator[Run]:
    """Every head by itself; dummies beside each other together."""
    dummies = 0
    for head in slots:
        if head < 0:
            dummies += 1
            continue
        if dummies:
            yield Run(-1, dummies)
        dummies = 0
        yield Run(head, 1)
    if dummies:
        yield Run(-1, dummies)


def _pieces(layout: Layout) -> tuple[tuple[Piece, ...], ...]:
    total, at = max(1, layout.total()), 0
    ranks = []
    for rank, runs in enumerate(layout.ranks):
        pieces = []
        for run in runs:
            pieces.append(Piece(rank, run.start, run.count, at / total, run.count / total))
            at += run.count
        ranks.append(tuple(pieces))
    return tuple(ranks)
