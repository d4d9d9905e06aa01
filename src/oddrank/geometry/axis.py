"""Axes: the logical dimensions that several tensors share, and the pairs whose ratio is part of the weights."""

from __future__ import annotations

from typing import Literal

import msgspec

from oddrank.errors import OddrankError

AxisKind = Literal["heads", "width", "vocab", "experts"]

MOST: dict[AxisKind, int] = {"heads": 1 << 14, "width": 1 << 22, "vocab": 1 << 22, "experts": 1 << 14}
"""Elements of an axis: far above any real model, and few enough to lay out one by one."""


class Axis(msgspec.Struct, frozen=True):
    """A logical dimension that several stored tensors share.

    count: elements in the trained model (heads, channels, vocabulary rows, experts).
    kind: what an element is. Heads move as whole heads; widths as whole units of channels.
    summed: the ranks' contributions along this axis are added (query heads, MLP channels, vocabulary rows in
        the embedding), so each element must sit on exactly one rank. A non-summed axis (KV heads) may repeat.
    """

    name: str
    count: int
    kind: AxisKind
    summed: bool = True

    def __post_init__(self) -> None:
        if self.count > MOST[self.kind]:
            raise OddrankError(
                f"the config implies {self.count} {self.name}, which is beyond any model: at most {MOST[self.kind]}. "
                "Correct it, or download the model's config again."
            )


class Pair(msgspec.Struct, frozen=True):
    """Two axes bound by the trained weights: element i of `follower` reads element i // r of `leader`,
    r = count(follower) / count(leader). Query heads follow KV heads; GDN value heads follow key heads."""

    follower: str
    leader: str
