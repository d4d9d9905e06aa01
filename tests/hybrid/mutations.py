"""Ways to break a plan of a hybrid model: the faults of both pairs of heads, of every width, and of the experts.

As in proof.mutations: a mutation takes a sound plan and returns a broken one with the check that must refuse it, or
None where the plan offers no place for it.
"""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
from proof.mutations import Broken, Slots, _pick, _places, slots, with_slots

from oddrank.geometry import Model, Pair
from oddrank.layout.layouts import Pairing
from oddrank.layout.plan import Plan

Rng = np.random.Generator
Mutation = Callable[[Plan, Rng, list[int]], Broken | None]


def partners(plan: Plan, pair: Pair) -> list[list[int]]:
    return next([list(m) for m in p.ranks] for p in plan.pairings if p.follower == pair.follower)


def with_partners(plan: Plan, pair: Pair, maps: list[list[int]]) -> Plan:
    new = Pairing(pair.follower, pair.leader, tuple(tuple(m) for m in maps))
    made = tuple(new if p.follower == pair.follower else p for p in plan.pairings)
    return msgspec.structs.replace(plan, pairings=made)


def _widths(plan: Plan) -> list[str]:
    """Axes by themselves: widths, and heads without a partner."""
    paired = {name for p in plan.model.pairs for name in (p.follower, p.leader)}
    return [a.name for a in plan.model.axes if a.kind in ("width", "heads") and a.name not in paired]


def _put(plan: Plan, axis: str, ranks: Slots, at: tuple[int, int], value: int) -> Plan:
    ranks[at[0]][at[1]] = value
    return with_slots(plan, axis, ranks)


def duplicate_follower(pair: Pair) -> Mutation:
    """A query or value head a second time, in a dummy's slot beside its own leader: its output is added twice."""

    def mutate(plan: Plan, rng: Rng, prompt: list[int]) -> Broken | None:
        held, lead, maps = slots(plan, pair.follower), slots(plan, pair.leader), partners(plan, pair)
        at = _pick(rng, _places(held, lambda rank, i, x: x < 0 and lead[rank][maps[rank][i]] >= 0))
        if at is None:
            return None
        r = plan.model.ratio(pair)
        head = lead[at[0]][maps[at[0]][at[1]]] * r + int(rng.integers(r))
        return Broken(_put(plan, pair.follower, held, at, head), "exactly once")

    return mutate


def repeat_follower(pair: Pair) -> Mutation:
    """A head in place of another of its group: one twice, one not at all."""

    def mutate(plan: Plan, rng: Rng, prompt: list[int]) -> Broken | None:
        held, r = slots(plan, pair.follower), plan.model.ratio(pair)
        at = _pick(rng, _places(held, lambda rank, i, x: x >= 0))
        if at is None or r == 1:
            return None
        head = held[at[0]][at[1]]
        mates = [h for h in range(head // r * r, head // r * r + r) if h != head]
        return Broken(_put(plan, pair.follower, held, at, int(rng.choice(mates))), "exactly once")

    return mutate


def drop_follower(pair: Pair) -> Mutation:
    def mutate(plan: Plan, rng: Rng, prompt: list[int]) -> Broken | None:
        return _drop(plan, pair.follower, rng)

    return mutate


def _drop(plan: Plan, axis: str, rng: Rng) -> Broken:
    ranks = slots(plan, axis)
    at = _pick(rng, _places(ranks, lambda rank, i, x: x >= 0))
    assert at is not None
    return Broken(_put(plan, axis, ranks, at, -1), "exactly once")


def swap_followers(pair: Pair) -> Mutation:
    """Two heads of different leaders change places: a value head moved away from its key head."""

    def mutate(plan: Plan, rng: Rng, prompt: list[int]) -> Broken | None:
        held, r = slots(plan, pair.follower), plan.model.ratio(pair)
        at = _pick(rng, _places(held, lambda rank, i, x: x >= 0))
        assert at is not None
        mine = held[at[0]][at[1]]
        other = _pick(rng, _places(held, lambda rank, i, x: x >= 0 and x // r != mine // r))
        if other is None:
            return None
        theirs = held[other[0]][other[1]]
        held[other[0]][other[1]] = mine
        return Broken(_put(plan, pair.follower, held, at, theirs), "pairing")

    return mutate


def wrong_leader(pair: Pair) -> Mutation:
    """The KV or key slot of a real follower holds another head, or a dummy."""

    def mutate(plan: Plan, rng: Rng, prompt: list[int]) -> Broken | None:
        held, lead, maps = slots(plan, pair.follower), slots(plan, pair.leader), partners(plan, pair)
        at = _pick(rng, _places(held, lambda rank, i, x: x >= 0))
        assert at is not None
        place = (at[0], maps[at[0]][at[1]])
        others = [x for x in range(-1, plan.model.axis(pair.leader).count) if x != lead[place[0]][place[1]]]
        return Broken(_put(plan, pair.leader, lead, place, int(rng.choice(others))), "pairing")

    return mutate


def wrong_partner(pair: Pair) -> Mutation:
    """One entry of the map points to a slot with another leader, or a dummy."""

    def mutate(plan: Plan, rng: Rng, prompt: list[int]) -> Broken | None:
        held, lead, maps = slots(plan, pair.follower), slots(plan, pair.leader), partners(plan, pair)
        r = plan.model.ratio(pair)
        at = _pick(rng, _places(held, lambda rank, i, x: x >= 0 and any(n != x // r for n in lead[rank])))
        if at is None:
            return None
        rank, i = at
        maps[rank][i] = int(rng.choice([s for s, n in enumerate(lead[rank]) if n != held[rank][i] // r]))
        return Broken(with_partners(plan, pair, maps), "pairing", across_ranks=True)

    return mutate


def trained_ratio_lost(pair: Pair) -> Mutation:
    """Dummies at the tail only, heads not moved: the group size changes under the followers (trap 1)."""

    def mutate(plan: Plan, rng: Rng, prompt: list[int]) -> Broken | None:
        count, leaders = (plan.model.axis(a).count for a in (pair.follower, pair.leader))
        if plan.executor != "runtime":
            return None
        g, rest = count // leaders + 1, plan.tp - 1
        plan = with_slots(plan, pair.follower, [[*range(count), *[-1] * (leaders * g - count)]] + [[]] * rest)
        plan = with_slots(plan, pair.leader, [list(range(leaders))] + [[]] * rest)
        return Broken(with_partners(plan, pair, [[i // g for i in range(leaders * g)]] + [[]] * rest), "pairing")

    return mutate


def drop_channel(plan: Plan, rng: Rng, prompt: list[int]) -> Broken | None:
    return _drop(plan, str(rng.choice(_widths(plan))), rng)


def duplicate_channel(plan: Plan, rng: Rng, prompt: list[int]) -> Broken | None:
    """A channel a second time, in a dummy's slot or at the end of a rank."""
    axis = str(rng.choice(_widths(plan)))
    ranks, channel = slots(plan, axis), int(rng.integers(plan.model.axis(axis).count))
    at = _pick(rng, _places(ranks, lambda rank, i, x: x < 0))
    if at is not None:
        return Broken(_put(plan, axis, ranks, at, channel), "exactly once")
    if plan.executor != "runtime":
        return None
    ranks[int(rng.integers(plan.tp))].append(channel)
    return Broken(with_slots(plan, axis, ranks), "exactly once")


def replicate_width(plan: Plan, rng: Rng, prompt: list[int]) -> Broken | None:
    """Every rank holds a whole MLP, bank of experts or shared expert, and all are summed: TP times the right value."""
    if plan.tp == 1 or plan.executor != "runtime":
        return None
    axis = str(rng.choice(_widths(plan)))
    return Broken(with_slots(plan, axis, [list(range(plan.model.axis(axis).count))] * plan.tp), "exactly once")


def duplicate_row(plan: Plan, rng: Rng, prompt: list[int]) -> Broken | None:
    """A vocabulary row on two ranks: the embedding of a prompt's token is added twice."""
    if plan.executor != "runtime":
        return None
    ranks = slots(plan, "vocab")
    ranks[int(rng.integers(plan.tp))].append(int(rng.choice(prompt)))
    return Broken(with_slots(plan, "vocab", ranks), "exactly once")


def drop_row(plan: Plan, rng: Rng, prompt: list[int]) -> Broken | None:
    return _drop(plan, "vocab", rng)._replace(across_ranks=True)


def _owners(change: Callable[[Plan, Rng], tuple[tuple[str, int], ...]]) -> Mutation:
    def mutate(plan: Plan, rng: Rng, prompt: list[int]) -> Broken | None:
        if not plan.owners:
            return None
        changed = msgspec.structs.replace(plan, owners=change(plan, rng))
        return Broken(changed, "exactly once", across_ranks=True)

    return mutate


def no_owner(plan: Plan, rng: Rng) -> tuple[tuple[str, int], ...]:
    """A bias of a row-parallel layer that no rank adds. Owners of an MTP layer have no part in the logits; the first
    role that joins a sum is the main layers'."""
    return plan.owners[1:]


def two_owners(plan: Plan, rng: Rng) -> tuple[tuple[str, int], ...]:
    """A bias that two ranks add (or one adds twice)."""
    return (*plan.owners, (plan.owners[0][0], int(rng.integers(plan.tp))))


def owner_beyond(plan: Plan, rng: Rng) -> tuple[tuple[str, int], ...]:
    """A bias owned by a rank that does not exist."""
    return ((plan.owners[0][0], plan.tp), *plan.owners[1:])


def router_cut(plan: Plan, rng: Rng, prompt: list[int]) -> Broken | None:
    """Each rank knows a share of the experts and routes among those."""
    axis = next((a for a in plan.model.axes if a.kind == "experts"), None)
    if plan.executor != "runtime" or plan.tp == 1 or axis is None:
        return None
    parts = min(plan.tp, axis.count)
    ranks = [list(range(rank % parts, axis.count, parts)) for rank in range(plan.tp)]
    return Broken(_in_engine(plan, axis.name, ranks), "executor")


def dummy_experts(plan: Plan, rng: Rng, prompt: list[int]) -> Broken:
    """The router padded: a dummy's logit is zero, which beats every negative one (trap 30). Not among MUTATIONS, for
    with another router's logits nobody would notice."""
    return Broken(_in_engine(plan, "experts", [[*held, *[-1] * 8] for held in slots(plan, "experts")]), "silence")


def _in_engine(plan: Plan, axis: str, ranks: Slots) -> Plan:
    assert plan.layout(axis).in_engine
    return with_slots(plan, axis, ranks)


OF_PAIRS = (
    duplicate_follower, repeat_follower, drop_follower, swap_followers, wrong_leader, wrong_partner,
    trained_ratio_lost,
)  # fmt: skip
OTHERS: tuple[Mutation, ...] = (
    drop_channel, duplicate_channel, replicate_width, duplicate_row, drop_row, router_cut,
)  # fmt: skip
OF_OWNERS = (no_owner, two_owners, owner_beyond)


def mutations(model: Model) -> dict[str, Mutation]:
    """Every mutation of a model by name, those of head pairs once for each pair."""
    return {
        **{f"{m.__name__} of {p.follower}": m(p) for m in OF_PAIRS for p in model.pairs},
        **{m.__name__: m for m in OTHERS if m is not router_cut or any(a.kind == "experts" for a in model.axes)},
        **{m.__name__: _owners(m) for m in OF_OWNERS},
    }


def random_edit(plan: Plan, rng: Rng, prompt: list[int]) -> Plan:
    """One random change to any slot, map entry or owner. Vocabulary rows are only doubled for tokens of the prompt,
    whose logits would tell."""
    heads = [a for p in plan.model.pairs for a in (p.follower, p.leader)]
    maps = ["map", "map"] if plan.model.pairs else []
    kind = str(rng.choice([*heads, *heads, *maps, "vocab", "owner", *_widths(plan)]))
    if kind == "owner":
        if not plan.owners:
            return plan
        i = int(rng.integers(len(plan.owners)))
        owners = list(plan.owners)
        owners[i] = (owners[int(rng.integers(len(owners)))][0], int(rng.integers(plan.tp)))
        return msgspec.structs.replace(plan, owners=tuple(owners))
    if kind == "map":
        pair = plan.model.pairs[int(rng.integers(len(plan.model.pairs)))]
        reads, lead = partners(plan, pair), slots(plan, pair.leader)
        at = _pick(rng, _places(reads, lambda rank, i, x: True))
        assert at is not None
        reads[at[0]][at[1]] = int(rng.integers(len(lead[at[0]])))
        return with_partners(plan, pair, reads)
    ranks, count = slots(plan, kind), plan.model.axis(kind).count
    at = _pick(rng, _places(ranks, lambda rank, i, x: True))
    assert at is not None
    if rng.random() < 0.3:
        other = _pick(rng, _places(ranks, lambda rank, i, x: True))
        assert other is not None
        mine, theirs = ranks[at[0]][at[1]], ranks[other[0]][other[1]]
        ranks[other[0]][other[1]] = mine
        return _put(plan, kind, ranks, at, theirs)
    value = int(rng.choice([-1, *prompt])) if kind == "vocab" else int(rng.integers(-1, count))
    return _put(plan, kind, ranks, at, value)


def without_inert_followers(plan: Plan) -> Plan:
    """The same plan with a dummy for every follower that reads a dummy leader: its values or its keys are zero, so
    it adds nothing, and yet the proof refuses it."""
    for pair in plan.model.pairs:
        held, lead, maps = slots(plan, pair.follower), slots(plan, pair.leader), partners(plan, pair)
        quiet = [
            [x if lead[r][at] >= 0 else -1 for x, at in zip(row, maps[r], strict=True)] for r, row in enumerate(held)
        ]
        plan = with_slots(plan, pair.follower, quiet)
    return plan
