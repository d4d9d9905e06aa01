"""What the page shows of a plan, as plain values: its report, who holds what, bars, alternatives."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import msgspec

from oddrank.layout.capacity import GIB
from oddrank.layout.executors import Constraints
from oddrank.layout.plan import Plan
from oddrank.picture.holdings import Holdings, holdings, words

PARTS = ("attention", "linear attention", "mlp", "experts", "shared", "vocab", "norms", "MTP", "vision")
"""Parts of a model in the order in which they are drawn; each has its colour and its pattern wherever it appears. What
else there is comes last, all in one colour."""

Pieces = list[tuple[str, str, int]]
"""(words, style, value) of each piece of a bar."""


class Segment(msgspec.Struct, frozen=True):
    """A piece of a bar. style: its colour and pattern. at, of: where it begins and how wide it is, in parts of the
    figure's longest bar."""

    words: str
    style: str
    value: int
    at: float
    of: float


class Bar(msgspec.Struct, frozen=True):
    """The bar of a rank, or of neighbours that are alike. mark: "largest" or "smallest" where ranks differ. dummies:
    how much of the value."""

    ranks: tuple[int, ...]
    value: int
    mark: str
    segments: tuple[Segment, ...]
    dummies: int


class Alternative(msgspec.Struct, frozen=True):
    """One candidate for axes that are laid out together. planned, per_rank: of each of these axes. weights, kv, read:
    bytes on the fullest rank: of weights, of KV cache a token, and that it reads to decode a token. more: how much more
    that is than the first candidate's, in parts of 1."""

    layout: str
    chosen: bool
    planned: tuple[int, ...]
    per_rank: tuple[tuple[int, ...], ...]
    weights: int
    kv: int
    read: int
    more: float
    segments: tuple[Segment, ...]
    why: str


class Weighed(msgspec.Struct, frozen=True):
    """What was weighed for the axes `words`, in the planner's order: by price."""

    words: str
    options: tuple[Alternative, ...]


class Picture(msgspec.Struct, frozen=True):
    """All that the page shows of one plan. report: `oddrank plan --json` without the plan itself. digest: of the
    config. asked: the user's constraints, as they are written. kv_bytes: that one of them, which a drafter gets from
    its target. parts: (words, style) of every part of the model. weights, kv, state, memory: figures, in bytes."""

    report: dict[str, Any]
    digest: str
    asked: tuple[str, ...]
    kv_bytes: int | None
    holdings: Holdings
    parts: tuple[tuple[str, str], ...]
    weights: tuple[Bar, ...]
    kv: tuple[Bar, ...]
    state: tuple[Bar, ...]
    memory: tuple[Bar, ...]
    weighed: tuple[Weighed, ...]


def picture(report: dict[str, Any]) -> Picture:
    """`report`: of `oddrank.report.describe`, with its plan under "plan"."""
    plan: Plan = report["plan"]
    parts = sorted(report["bytes"]["parts"], key=lambda part: _place(part["name"]))
    titles = [("embedding and head" if p["name"] == "vocab" else words(p["name"]), _style(p["name"])) for p in parts]
    weights = [[(*t, p["per_rank"][r]) for t, p in zip(titles, parts, strict=True)] for r in range(plan.tp)]
    return Picture(
        report={key: value for key, value in report.items() if key != "plan"},
        digest=plan.config_digest,
        asked=tuple(_written(plan.constraints)),
        kv_bytes=plan.constraints.kv_bytes,
        holdings=holdings(report, plan),
        parts=tuple(titles),
        weights=_bars(weights, report["bytes"]["dummies_per_rank"]),
        kv=_bars([("KV cache", "kv", n)] for n in report["kv"]["per_rank_bytes_per_token"]),
        state=_bars([("state", "state", n)] for n in report["state"]["per_rank_bytes_per_request"]),
        memory=_bars(_memory(report["capacity"])) if report["capacity"] else (),
        weighed=tuple(_weighed(report)),
    )


def _place(part: str) -> int:
    return PARTS.index(part) if part in PARTS else len(PARTS)


def _style(part: str) -> str:
    return f"part{_place(part)}"


def _written(wanted: Constraints) -> Iterator[str]:
    """As `--constraint` takes them."""
    named = {"gqa": wanted.gqa, "kv_bytes": wanted.kv_bytes, "block": wanted.block}
    for key, value in {**named, **wanted.exact}.items():
        if value is not None:
            yield f"{key}={value}"
    yield from (f"{axis}_multiple={n}" for axis, n in wanted.multiple.items())


def _memory(capacity: dict[str, Any]) -> Iterator[Pieces]:
    known = zip(capacity["memory_gib"], capacity["weight_bytes"], capacity["reserve_bytes"], strict=True)
    for gib, weights, reserve in known:
        left = max(0, int(gib * GIB) - weights - reserve)
        yield [("weights", "weights", weights), ("KV cache", "kv", left), ("kept back", "rest", reserve)]


def _bars(ranks: Iterable[Pieces], dummies: Sequence[int] = ()) -> tuple[Bar, ...]:
    """A figure of what each rank has. dummies: how much of that, by rank."""
    made = list(ranks)
    totals = [sum(value for _, _, value in pieces) for pieces in made]
    most, least = max(totals), min(totals)
    marks = {least: "smallest", most: "largest"} if least < most else {}
    figure = []
    for (pieces, dummy), alike in groupby(range(len(made)), lambda r: (made[r], dummies[r] if dummies else 0)):
        same = tuple(alike)
        total = totals[same[0]]
        figure.append(Bar(same, total, marks.get(total, ""), _segments(pieces, most), dummy))
    return tuple(figure)


def _segments(pieces: Pieces, longest: int) -> tuple[Segment, ...]:
    at, found = 0, []
    for name, style, value in pieces:
        if value:
            found.append(Segment(name, style, value, at / longest, value / longest))
        at += value
    return tuple(found)


def _weighed(report: dict[str, Any]) -> Iterator[Weighed]:
    for names, group in groupby(report["alternatives"], key=lambda alt: [axis["name"] for axis in alt["axes"]]):
        options = list(group)
        pairs = [(alt["weight_bytes_per_rank"], alt["kv_bytes_per_token_per_rank"]) for alt in options]
        reads = [weights + report["context"] * kv for weights, kv in pairs]
        yield Weighed(
            " and ".join(map(words, names)),
            tuple(
                Alternative(
                    layout=alt["layout"],
                    chosen=alt["chosen"],
                    planned=tuple(axis["planned"] for axis in alt["axes"]),
                    per_rank=tuple(tuple(axis["per_rank"]) for axis in alt["axes"]),
                    weights=weights,
                    kv=kv,
                    read=read,
                    more=read / max(1, reads[0]) - 1.0,
                    segments=_segments(
                        [("weights", "weights", weights), ("KV cache", "kv", read - weights)], max(reads)
                    ),
                    why=alt["why"],
                )
                for alt, (weights, kv), read in zip(options, pairs, reads, strict=True)
            ),
        )
