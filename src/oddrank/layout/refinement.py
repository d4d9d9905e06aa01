"""Which scales a plan rewrites in finer blocks, so that an axis can be cut where the stored blocks do not allow it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from oddrank.errors import OddrankError
from oddrank.geometry import Model, Slots
from oddrank.layout.census import Use, use_parts
from oddrank.layout.cost import weight_bytes
from oddrank.layout.layouts import Layout, fullest
from oddrank.layout.plan import Plan
from oddrank.layout.storage import storage_problem, units

WORTH = 1.05
"""Refine only where the stored blocks make the fullest rank more than 5% larger: fewer, larger blocks are faster."""


LEAST_BLOCK = 16
"""Elements that the smallest matrix instructions multiply at once."""


def stored_blocks(model: Model, uses: Iterable[Use]) -> set[int]:
    """The sizes of all blocks of scales, along any dimension."""
    return {
        size
        for use in uses
        for part, _ in use_parts(model, use)
        if part.stored.is_block_scale
        for size in part.stored.block
    }


def finer_widths(plan: Plan) -> tuple[int, int] | None:
    """(block, bytes of weights) of the fullest rank, were scales rewritten in blocks of half the size and widths cut
    there, heads as they are; None where the plan rewrites some already, or where that is not WORTH it."""
    model, facts = plan.model, plan.executor_facts()
    sizes = stored_blocks(model, plan.uses)
    block = min(sizes, default=0) // 2
    if block < LEAST_BLOCK or any(size % block for size in sizes) or facts.finest_block or plan.constraints.block:
        return None
    fine, counts = units(model, plan.uses, block), dict(plan.counts(0))
    for axis in model.axes:
        if axis.kind == "width" and axis.name not in plan.constraints.exact:
            unit = math.lcm(fine[axis.name], facts.width_multiple, plan.constraints.multiple.get(axis.name, 1))
            counts[axis.name] = min(counts[axis.name], int(fullest(axis.count, plan.tp, unit)))
    now = weight_bytes(model, plan.uses, plan.counts(0))
    then = weight_bytes(model, plan.uses, counts, refined={"*": block})
    return (block, then) if now > WORTH * then else None


def require_block(model: Model, uses: Iterable[Use], block: int) -> None:
    """Raises OddrankError unless this checkpoint has block scales, `block` divides all of them and is not so small that
    no kernel multiplies a block at once."""
    found = stored_blocks(model, uses)
    wrong = sorted(size for size in found if size % block)
    if not found:
        raise OddrankError(f"constraint block={block}: this checkpoint has no block scales to rewrite. Leave it out.")
    works = [n for n in range(LEAST_BLOCK, min(found) + 1) if all(size % n == 0 for size in found)]
    if block < LEAST_BLOCK:
        raise OddrankError(
            f"constraint block={block}: no kernel takes scales for fewer than {LEAST_BLOCK} elements, and as good as "
            f"every weight would have its own. {', '.join(map(str, works)) or 'No other block'} can be had."
        )
    if wrong:
        raise OddrankError(
            f"constraint block={block}: scales per {wrong[0]} elements cannot be rewritten per {block}, which does not "
            f"divide {wrong[0]}. {', '.join(map(str, works))} do."
        )


class Refinement:
    """The units of a model's axes with its blocks as stored (`coarse`) and at the finest its executor takes (`fine`).

    finest: that block, 0 = no refinement. forced: rewrite every scale in that block, whatever the layout needs.
    shares: of unequal ranks.
    """

    def __init__(
        self,
        model: Model,
        uses: Iterable[Use],
        ranks: int,
        finest: int,
        *,
        forced: bool,
        shares: Sequence[float] | None = None,
    ) -> None:
        self.model, self.uses, self.ranks, self.finest, self.forced = model, tuple(uses), ranks, finest, forced
        self.shares = shares
        self.coarse = units(model, self.uses)
        self.fine = units(model, self.uses, finest)
        self.everywhere: dict[str, int] = {"*": finest} if finest else {}

    def unit(self, axis: str, total: int | None = None) -> int:
        """The unit to cut an axis in; `total`: the planned size, where the user fixed it."""
        coarse, fine = self.coarse[axis], self.fine[axis]
        if self.forced or coarse == fine:
            return fine
        if total is not None:
            return coarse if total % (self.ranks * coarse) == 0 else fine
        count = self.model.axis(axis).count
        if self.shares is not None and -(-count // coarse) < self.ranks:
            return fine  # some ranks would have nothing
        largest = [fullest(count, self.ranks, u, self.shares) for u in (coarse, fine)]
        return coarse if largest[0] <= WORTH * largest[1] else fine

    def needed_by(self, layouts: Mapping[str, Layout]) -> tuple[tuple[str, int], ...]:
        """What a plan with these layouts has to refine: everything if forced, else the axes cut inside a block."""
        if self.forced:
            return tuple(self.everywhere.items())
        if not self.finest:
            return ()
        stock = self.model.stock()
        needed: dict[str, int] = {}
        for axis, layout in layouts.items():
            if self.coarse[axis] == self.fine[axis]:
                continue
            for rank in range(len(layout.ranks)):
                source = {name: np.arange(n, dtype=np.int64) for name, n in stock.items()} | {axis: layout.slots(rank)}
                if storage_problem(self.model, self.uses, Slots(source, {}, True), {axis}, needed):
                    needed[axis] = self.finest
                    break
        return tuple(needed.items())
