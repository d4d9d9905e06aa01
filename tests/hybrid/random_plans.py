"""Random layouts of hybrid models that compute the right thing: both pairs of head axes with their units permuted,
copies and dummies anywhere, ragged; widths and vocabulary likewise."""

from __future__ import annotations

import itertools

import numpy as np
from proof.random_plans import shuffled

from oddrank.geometry import Pair
from oddrank.layout.executors import Constraints
from oddrank.layout.layouts import Layout, Pairing, even_pairing
from oddrank.layout.plan import Plan
from oddrank.layout.widths import engine_vocab
from oddrank.planner import Subject

Rng = np.random.Generator
Ranks = list[list[int]]


def _make(s: Subject, executor: str, layouts: dict[str, Layout], pairings: list[Pairing], rng: Rng, tp: int) -> Plan:
    """A plan of these layouts, owners on random ranks, experts on every rank."""
    for axis in s.model.axes:
        if axis.kind == "experts":
            layouts[axis.name] = Layout.of(axis.name, [range(axis.count)] * tp, in_engine=True)
    return Plan(
        name="random",
        config_digest=s.config_digest,
        model=s.model,
        uses=s.census.uses,
        tp=tp,
        executor=executor,
        kind="random",
        layouts=tuple(layouts[a.name] for a in s.model.axes),
        pairings=tuple(pairings),
        owners=tuple((r.name, int(rng.integers(tp))) for r in s.model.roles if r.joins is not None),
        constraints=Constraints(),
        context=4096,
        kv_itemsize=s.kv_itemsize,
    )


def _widths(s: Subject) -> list[str]:
    """Axes by themselves: widths, and heads without a partner."""
    paired = {name for p in s.model.pairs for name in (p.follower, p.leader)}
    return [a.name for a in s.model.axes if a.kind in ("width", "heads") and a.name not in paired]


def _split(rng: Rng, items: list[int], parts: int) -> Ranks:
    """Items in order, cut at random places into `parts` lists, any of them possibly empty."""
    bounds = [0, *np.sort(rng.integers(0, len(items) + 1, parts - 1)).tolist(), len(items)]
    return [items[a:b] for a, b in itertools.pairwise(bounds)]


def equal_plan(s: Subject, rng: Rng, tp: int | None = None) -> Plan:
    """Equal ranks, follower slot i reads leader slot i // g: what vLLM and transformers can express."""
    tp = int(rng.integers(1, 7)) if tp is None else tp
    layouts: dict[str, Layout] = {}
    pairings = []
    while not pairings:
        for pair in s.model.pairs:
            together = [axes for axes in s.model.counted_together() if pair.follower in axes]
            totals = {layouts[a].total() for axes in together for a in axes if a in layouts}
            made = _equal_pair(s, pair, rng, tp, next(iter(totals), None))
            if made is None:
                layouts, pairings = {}, []
                break
            layouts |= {pair.follower: made[0], pair.leader: made[1]}
            pairings.append(even_pairing(*made))
        if not s.model.pairs:
            break
    for name in _widths(s):
        width = s.model.axis(name).count
        total = (-(-width // tp) + int(rng.integers(0, 3))) * tp
        slots = shuffled(rng, list(range(width)) + [-1] * (total - width))
        layouts[name] = Layout.of(name, np.split(np.asarray(slots), tp))
    vocab = engine_vocab("vocab", s.model.axis("vocab").count, tp, 64)
    assert vocab is not None
    layouts["vocab"] = vocab.layouts[0]
    return _make(s, "vllm", layouts, pairings, rng, tp)


def _equal_pair(
    s: Subject, pair: Pair, rng: Rng, tp: int, total: int | None = None
) -> tuple[Layout, Layout] | None:
    """Each leader's followers cut into chunks of at most g, each chunk beside its own copy; more copies without
    followers and dummy leaders mixed in; all slots shuffled. total: of follower slots; None where it cannot be."""
    leaders, r = s.model.axis(pair.leader).count, s.model.ratio(pair)
    fitting = list(range(1, r + 2))
    if total is not None:
        fitting = [g for g in fitting if total % (g * tp) == 0 and total // g >= leaders * -(-r // g)]
    for _ in range(50 if fitting else 0):
        g = int(rng.choice(fitting))
        slots: list[tuple[int, list[int]]] = []
        for head in range(leaders):
            left = shuffled(rng, list(range(head * r, (head + 1) * r)))
            while left:
                take = int(rng.integers(1, min(g, len(left)) + 1)) if rng.random() < 0.5 else g
                slots.append((head, left[:take]))
                left = left[take:]
        if total is not None and len(slots) > total // g:
            continue
        slots += [(int(rng.integers(-1, leaders)), []) for _ in range(rng.integers(0, 3) if total is None else 0)]
        while len(slots) % tp or (total is not None and len(slots) < total // g):
            slots.append((int(rng.integers(-1, leaders)), []))
        slots = shuffled(rng, slots)
        per = len(slots) // tp
        ranks = [slots[i * per : (i + 1) * per] for i in range(tp)]
        if all(any(held for _, held in rank) for rank in ranks):
            break  # real units on every rank; else most layouts would only repeat a smaller size
    else:
        if total is not None:
            return None
    full = [[(head, shuffled(rng, held + [-1] * (g - len(held)))) for head, held in rank] for rank in ranks]
    follow = Layout.of(pair.follower, [[x for _, held in rank for x in held] for rank in full])
    return follow, Layout.of(pair.leader, [[head for head, _ in rank] for rank in full])


def ragged_plan(s: Subject, rng: Rng, tp: int | None = None) -> Plan:
    """Any layout at all: followers on any rank, their leaders there once or more, any map, dummies anywhere, ranks
    that may hold nothing real of an axis."""
    tp = int(rng.integers(1, 8)) if tp is None else tp
    layouts: dict[str, Layout] = {}
    pairings = []
    for pair in s.model.pairs:
        follow, lead, pairing = _ragged_pair(s, pair, rng, tp)
        layouts |= {pair.follower: follow, pair.leader: lead}
        pairings.append(pairing)
    for name in [*_widths(s), "vocab"]:
        parts = _split(rng, shuffled(rng, list(range(s.model.axis(name).count))), tp)
        layouts[name] = Layout.of(name, [shuffled(rng, p + [-1] * int(rng.integers(0, 3))) for p in parts])
    return _make(s, "runtime", layouts, pairings, rng, tp)


def _ragged_pair(s: Subject, pair: Pair, rng: Rng, tp: int) -> tuple[Layout, Layout, Pairing]:
    count, r = s.model.axis(pair.leader).count, s.model.ratio(pair)
    follow: Ranks = []
    lead: Ranks = []
    maps: list[tuple[int, ...]] = []
    for held in _split(rng, shuffled(rng, list(range(count * r))), tp):
        needed = sorted({h // r for h in held})
        leaders = needed + [int(rng.choice(needed)) for _ in range(rng.integers(0, 2)) if needed]
        leaders = shuffled(rng, leaders + [int(rng.integers(-1, count)) for _ in range(rng.integers(0, 3))])
        if leaders:
            held = held + [-1] * int(rng.integers(0, 3))
        held = shuffled(rng, held)
        fitting = [[i for i, x in enumerate(leaders) if h < 0 or x == h // r] for h in held]
        follow.append(held)
        lead.append(leaders)
        maps.append(tuple(int(rng.choice(f)) for f in fitting))
    pairing = Pairing(pair.follower, pair.leader, tuple(maps))
    return Layout.of(pair.follower, follow), Layout.of(pair.leader, lead), pairing
