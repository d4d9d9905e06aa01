"""Ranks of unequal size: which plans can be made for their shares, and when one is too small to take part."""

from __future__ import annotations

import math
from collections.abc import Sequence

from oddrank.errors import OddrankError
from oddrank.layout.cost import weight_bytes
from oddrank.layout.executors import EXECUTORS, Constraints
from oddrank.layout.plan import Plan

TOO_SMALL = 2.0
"""A rank whose part, cut in whole units, is more than this many times its share is refused: it cannot hold that."""


LEAST = 2.0**-30
"""GiB: a byte. Parts of the whole that are next to nothing cannot be divided by."""


def require_shares(shares: Sequence[float], tp: int, executor: str, layout: str, wanted: Constraints) -> None:
    """Raises OddrankError for shares that mean nothing, or beside wishes that only equal ranks can meet."""
    shown = f"--rank-memory {','.join(f'{s:g}' for s in shares)}"
    if len(shares) != tp:
        raise OddrankError(f"{shown} is for {len(shares)} ranks, and --tp is {tp}.")
    if not all(math.isfinite(s) and s >= LEAST for s in shares):
        raise OddrankError(f"{shown}: every rank needs some memory, in GiB.")
    if len(set(shares)) == 1:
        return
    if EXECUTORS[executor].equal_ranks:
        raise OddrankError(
            f"{shown} gives the ranks unequal parts, and the {executor} executor gives every rank the same. Use "
            "--executor runtime, or give all ranks the memory of the smallest."
        )
    if layout in ("pad", "replicate"):
        raise OddrankError(
            f"{shown} gives the ranks unequal parts, and --layout {layout} is one of equal ranks. Leave out one."
        )
    equal = [k for k, v in (("gqa", wanted.gqa), ("kv_bytes", wanted.kv_bytes)) if v is not None] + [*wanted.exact]
    if equal:
        raise OddrankError(
            f"{shown} gives the ranks unequal parts, and constraint {equal[0]} says what every rank has. Leave out one."
        )


def require_large_enough(plan: Plan) -> None:
    """Raises OddrankError where the smallest units that a rank could hold are more than its share."""
    held = [weight_bytes(plan.model, plan.uses, plan.counts(r), refined=dict(plan.refined)) for r in range(plan.tp)]
    whole, memory = sum(held), sum(plan.shares)
    for rank, (n, share) in enumerate(zip(held, plan.shares, strict=True)):
        if n > TOO_SMALL * whole * share / memory:
            raise OddrankError(
                f"rank {rank} has {share:g} of {memory:g} GiB, {share / memory:.2%} of all the memory, and the least "
                f"it could hold, a unit of everything, is {n / whole:.2%} of all the weights. Leave it out, or give it "
                "more.",
                short=f"rank {rank} is too small to hold a unit of everything",
            )
