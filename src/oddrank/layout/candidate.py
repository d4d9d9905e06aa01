"""A candidate: one way to lay out one axis, or a pair of axes that belong together."""

from __future__ import annotations

import msgspec

from oddrank.layout.layouts import Layout, Pairing


class Candidate(msgspec.Struct, frozen=True):
    """kind: `identity` (the executor's stock engine serves the size), `even` (a plain split, no dummies),
    `ragged`, `groups` (whole KV groups, uneven), `pad` (the trained ratio kept), `replicate` (smaller groups).
    gqa: follower slots per leader slot where that is uniform. why: one sentence for the user."""

    kind: str
    layouts: tuple[Layout, ...]
    pairings: tuple[Pairing, ...] = ()
    gqa: int | None = None
    why: str = ""

    def largest(self) -> tuple[int, ...]:
        """Slots of the fullest rank, per axis."""
        return tuple(max(layout.counts()) for layout in self.layouts)

    def totals(self) -> tuple[int, ...]:
        return tuple(layout.total() for layout in self.layouts)

    def dominated_by(self, other: Candidate) -> bool:
        """Does `other` need no more of anything, on its fullest rank and over all, and less of something?"""
        mine, theirs = self.largest() + self.totals(), other.largest() + other.totals()
        return all(t <= m for t, m in zip(theirs, mine, strict=True)) and theirs != mine
