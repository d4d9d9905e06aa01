"""Ways to break a plan. Each is one of the faults that tensor parallelism of real checkpoints is known for.

A mutation takes a sound plan and returns a broken one, with the check that must refuse it; None where the plan
offers no place for it. `random_edit` breaks anything anywhere, and may well break nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import msgspec
import numpy as np

from oddrank.layout.layouts import Layout, Pairing
from oddrank.layout.plan import Plan

Rng = np.random.Generator
Slots = list[list[int]]


class Broken(NamedTuple):
    """check: the name of the proof check that must refuse `plan`. across_ranks: the fault lies in how ranks are
    joined, so the virtual checkpoint (one rank) does not have it."""

    plan: Plan
    check: str
    across_ranks: bool = False


def slots(plan: Plan, axis: str) -> Slots:
    return [plan.layout(axis).slots(r).tolist() for r in range(plan.tp)]


def with_slots(plan: Plan, axis: str, ranks: Slots) -> Plan:
    old = plan.layout(axis)
    new = Layout.of(axis, ranks, old.in_engine)
    return msgspec.structs.replace(plan, layouts=tuple(new if la.axis == axis else la for la in plan.layouts))


def with_partner(plan: Plan, maps: list[list[int]]) -> Plan:
    (p,) = plan.pairings
    return msgspec.structs.replace(plan, pairings=(Pairing(p.follower, p.leader, tuple(tuple(m) for m in maps)),))


def partners(plan: Plan) -> list[list[int]]:
    return [list(m) for m in plan.pairings[0].ranks]


def _places(ranks: Slots, wanted: Callable[[int, int, int], bool]) -> list[tuple[int, int]]:
    return [(r, i) for r, held in enumerate(ranks) for i, x in enumerate(held) if wanted(r, i, x)]


def _pick(rng: Rng, places: list[tuple[int, int]]) -> tuple[int, int] | None:
    return places[int(rng.integers(len(places)))] if places else None


def _ratio(plan: Plan) -> int:
    return plan.model.ratio(plan.model.pairs[0])


def duplicate_query(plan: Plan, rng: Rng, prompt: list[int]) -> Broken | None:
    """A query head a second time, in a dummy's slot beside its own KV head: its output is added twice."""
    q, kv, maps, r = slots(plan, "q_heads"), slots(plan, "kv_heads"), partners(plan), _ratio(plan)
    at = _pick(rng, _places(q, lambda rank, i, x: x < 0 and kv[rank][maps[rank][i]] >= 0))
    if at is None:
        return None
    rank, i = at
    q[rank][i] = kv[rank][maps[rank][i]] * r + int(rng.integers(r))
    return Broken(with_slots(plan, "q_heads", q), "exactly once")


def repeat_query(plan: Plan, rng: Rng, prompt: list[int]) -> Broken | None:
    """A query head in place of another of its group: one twice, one not at all."""
    q, r = slots(plan, "q_heads"), _ratio(plan)
    at = _pick(rng, _places(q, lambda rank, i, x: x >= 0))
    if at is None or r == 1:
        return None
    rank, i = at
    mates = [h for h in range(q[rank][i] // r * r, q[rank][i] // r * r + r) if h != q[rank][i]]
    q[rank][i] = int(rng.choice(mates))
    return Broken(with_slots(plan, "q_heads", q), "exactly once")


def drop_query(plan: Plan, rng: Rng, prompt: list[int]) -> Broken | None:
    return _drop(plan, "q_heads", rng)


def drop_channel(plan: Plan, rng: Rng, prompt: list[int]) -> Broken | None:
    return _drop(plan, "mlp", rng)


def _drop(plan: Plan, axis: str, rng: Rng) -> Broken | None:
    ranks = slots(plan, axis)
    at = _pick(rng, _places(ranks, lambda rank, i, x: x >= 0))
    assert at is not None
    ranks[at[0]][at[1]] = -1
    return Broken(with_slots(plan, axis, ranks), "exactly once")


def duplicate_channel(plan: Plan, rng: Rng, prompt: list[int]) -> Broken | None:
    """An MLP channel a second time, in a dummy's slot or at the end of a rank."""
    ranks, width = slots(plan, "mlp"), plan.model.axis("mlp").count
    at = _pick(rng, _places(ranks, lambda rank, i, x: x < 0))
    channel = int(rng.integers(width))
    if at is not None:
        ranks[at[0]][at[1]] = channel
    elif plan.executor == "runtime":
        ranks[int(rng.integers(plan.tp))].append(channel)
    else:
        return None
    return Broken(with_slots(plan, "mlp", ranks), "exactly once")


def replicate_mlp(plan: Plan, rng: Rng, prompt: list[int]) -> Broken | None:
    """Every rank holds the whole MLP and all are summed: exactly TP times the right value."""
    if plan.tp == 1 or plan.executor != "runtime":
        return None
    whole = list(range(plan.model.axis("mlp").count))
    return Broken(with_slots(plan, "mlp", [whole] * plan.tp), "exactly once")


def duplicate_row(plan: Plan, rng: Rng, prompt: list[int]) -> Broken | None:
    """A vocabulary row on two ranks: the embedding of a prompt's token is added twice."""
    if plan.executor != "runtime":
        return None
    ranks = slots(plan, "vocab")
    ranks[int(rng.integers(plan.tp))].append(int(rng.choice(prompt)))
    return Broken(with_slots(plan, "vocab", ranks), "exactly once")


def drop_row(plan: Plan, rng: Rng, prompt: list[int]) -> Broken | None:
    return _drop(plan, "vocab", rng)._replace(across_ranks=True)  # type: ignore[union-attr]


def swap_queries(plan: Plan, rng: Rng, prompt: list[int]) -> Broken | None:
    """Two query heads of different KV heads change places: shapes stay valid, text is fluent nonsense."""
    q, r = slots(plan, "q_heads"), _ratio(plan)
    at = _pick(rng, _places(q, lambda rank, i, x: x >= 0))
    assert at is not None
    mine = q[at[0]][at[1]]
    other = _pick(rng, _places(q, lambda rank, i, x: x >= 0 and x // r != mine // r))
    if other is None:
        return None
    q[at[0]][at[1]], q[other[0]][other[1]] = q[other[0]][other[1]], mine
    return Broken(with_slots(plan, "q_heads", q), "pairing")


def wrong_kv(plan: Plan, rng: Rng, prompt: list[int]) -> Broken | None:
    """The KV slot of a real query holds another KV head, or a dummy."""
    q, kv, maps = slots(plan, "q_heads"), slots(plan, "kv_heads"), partners(plan)
    at = _pick(rng, _places(q, lambda rank, i, x: x >= 0))
    assert at is not None
    rank, slot = at[0], maps[at[0]][at[1]]
    others = [x for x in range(-1, plan.model.axis("kv_heads").count) if x != kv[rank][slot]]
    kv[rank][slot] = int(rng.choice(others))
    return Broken(with_slots(plan, "kv_heads", kv), "pairing")


def wrong_partner(plan: Plan, rng: Rng, prompt: list[int]) -> Broken | None:
    """One entry of the query-to-KV map points to a slot with another KV head, or a dummy."""
    q, kv, maps, r = slots(plan, "q_heads"), slots(plan, "kv_heads"), partners(plan), _ratio(plan)
    at = _pick(rng, _places(q, lambda rank, i, x: x >= 0 and any(held != x // r for held in kv[rank])))
    if at is None:
        return None
    rank, i = at
    maps[rank][i] = int(rng.choice([s for s, held in enumerate(kv[rank]) if held != q[rank][i] // r]))
    return Broken(with_partner(plan, maps), "pairing", across_ranks=True)


def trained_ratio_lost(plan: Plan, rng: Rng, prompt: list[int]) -> Broken | None:
    """Dummies at the tail only, heads not moved: the group size changes under the queries (trap 1)."""
    q, kv = plan.model.axis("q_heads").count, plan.model.axis("kv_heads").count
    r = q // kv
    if plan.executor != "runtime" or kv == 1:
        return None
    g = r + 1
    followers = [*range(q), *[-1] * (kv * g - q)]
    plan = with_slots(plan, "q_heads", [followers] + [[] for _ in range(plan.tp - 1)])
    plan = with_slots(plan, "kv_heads", [list(range(kv))] + [[] for _ in range(plan.tp - 1)])
    maps = [[i // g for i in range(kv * g)]] + [[] for _ in range(plan.tp - 1)]
    return Broken(with_partner(plan, maps), "pairing")


def no_owner(plan: Plan, rng: Rng, prompt: list[int]) -> Broken | None:
    """A bias of a row-parallel layer that no rank adds."""
    if not plan.owners:
        return None
    out = int(rng.integers(len(plan.owners)))
    owners = tuple(o for i, o in enumerate(plan.owners) if i != out)
    return Broken(msgspec.structs.replace(plan, owners=owners), "exactly once", across_ranks=True)


def two_owners(plan: Plan, rng: Rng, prompt: list[int]) -> Broken | None:
    """A bias that two ranks add (or one adds twice)."""
    if not plan.owners:
        return None
    name, _ = plan.owners[int(rng.integers(len(plan.owners)))]
    owners = (*plan.owners, (name, int(rng.integers(plan.tp))))
    return Broken(msgspec.structs.replace(plan, owners=owners), "exactly once", across_ranks=True)


def owner_beyond(plan: Plan, rng: Rng, prompt: list[int]) -> Broken | None:
    """A bias owned by a rank that does not exist."""
    if not plan.owners:
        return None
    owners = ((plan.owners[0][0], plan.tp), *plan.owners[1:])
    return Broken(msgspec.structs.replace(plan, owners=owners), "exactly once", across_ranks=True)


MUTATIONS: tuple[Callable[[Plan, Rng, list[int]], Broken | None], ...] = (
    duplicate_query,
    repeat_query,
    drop_query,
    swap_queries,
    wrong_kv,
    wrong_partner,
    trained_ratio_lost,
    duplicate_channel,
    drop_channel,
    replicate_mlp,
    duplicate_row,
    drop_row,
    no_owner,
    two_owners,
    owner_beyond,
)


def random_edit(plan: Plan, rng: Rng, prompt: list[int]) -> Plan:
    """One random change to any slot, map entry or owner. Vocabulary rows are only doubled for tokens of the prompt,
    whose logits would tell."""
    kind = str(rng.choice(["q_heads", "q_heads", "kv_heads", "kv_heads", "mlp", "vocab", "map", "map", "owner"]))
    if kind == "owner":
        if not plan.owners:
            return plan
        i = int(rng.integers(len(plan.owners)))
        owners = list(plan.owners)
        owners[i] = (owners[int(rng.integers(len(owners)))][0], int(rng.integers(plan.tp)))
        return msgspec.structs.replace(plan, owners=tuple(owners))
    if kind == "map":
        maps, kv = partners(plan), slots(plan, "kv_heads")
        at = _pick(rng, _places(maps, lambda rank, i, x: True))
        assert at is not None
        maps[at[0]][at[1]] = int(rng.integers(len(kv[at[0]])))
        return with_partner(plan, maps)
    ranks, count = slots(plan, kind), plan.model.axis(kind).count
    at = _pick(rng, _places(ranks, lambda rank, i, x: True))
    assert at is not None
    if rng.random() < 0.3:
        other = _pick(rng, _places(ranks, lambda rank, i, x: True))
        assert other is not None
        ranks[at[0]][at[1]], ranks[other[0]][other[1]] = ranks[other[0]][other[1]], ranks[at[0]][at[1]]
    else:
        ranks[at[0]][at[1]] = int(rng.choice([-1, *prompt])) if kind == "vocab" else int(rng.integers(-1, count))
    return with_slots(plan, kind, ranks)
