"""How many tokens of KV cache a rank has room for beside its weights."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from oddrank.errors import OddrankError
from oddrank.layout.cost import kv_bytes, state_bytes, weight_bytes
from oddrank.layout.plan import Plan

GIB = 1 << 30
RESERVE = 0.10
"""Part of a rank's memory kept back: activations, what kernels write in between, the device's own."""


class Room(msgspec.Struct, frozen=True):
    """One rank's memory, in bytes. weights: its slice. token: of KV cache, over all layers that keep one. state: of a
    sequence, whatever its length (recurrent states)."""

    memory: int
    weights: int
    token: int
    state: int = 0

    @property
    def reserve(self) -> int:
        return int(self.memory * RESERVE)

    def tokens(self, sequences: int = 1) -> int | None:
        """Tokens of KV cache, of `sequences` sequences together; None where the rank keeps none at all."""
        free = self.memory - self.reserve - self.weights - sequences * self.state
        if self.token:
            return max(0, free // self.token)
        return None if free >= 0 else 0


def rooms(plan: Plan, memory: Sequence[float]) -> list[Room]:
    """Of every rank; `memory`: GiB of each. As the plan has it: every stored tensor with a role counts as weight, an
    element of KV cache has `plan.kv_itemsize` bytes."""
    model, refined = plan.model, dict(plan.refined)
    made = []
    for rank, gib in enumerate(memory):
        counts = plan.counts(rank)
        token = kv_bytes(model, counts, plan.kv_itemsize)
        weights = weight_bytes(model, plan.uses, counts, refined=refined)
        made.append(Room(int(gib * GIB), weights, token, state_bytes(model, counts)))
    return made


def require_room(plan: Plan) -> None:
    """Raises OddrankError where a rank's weights alone are more than the memory the plan was made for."""
    for rank, room in enumerate(rooms(plan, plan.shares or ())):
        if room.weights > room.memory:
            needed = ", ".join(f"{r.weights / GIB:.2f}" for r in rooms(plan, plan.shares or ()))
            raise OddrankError(
                f"--rank-memory gives rank {rank} of {plan.tp} {room.memory / GIB:.2f} GiB, and its slice of "
                f"{plan.name} is {room.weights / GIB:.2f} GiB. The slices need {needed} GiB, "
                "and the KV cache comes on top: give more memory or more ranks."
            )


def tokens_together(ranks: Sequence[Room], sequences: int = 1) -> int | None:
    """What fits on every rank: a token of the cache is on all of them, so the fullest rank decides."""
    told = [n for n in (room.tokens(sequences) for room in ranks) if n is not None]
    return min(told, default=None)
