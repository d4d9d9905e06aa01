"""Random layouts that compute the right thing: units permuted, KV copies and dummies anywhere, ragged."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from layout.shapes import Config, subject

from oddrank.geometry import Model
from oddrank.layout.executors import Constraints
from oddrank.layout.layouts import Layout, Pairing, even_pairing
from oddrank.layout.plan import Plan
from oddrank.layout.widths import engine_vocab
from oddrank.planner import Subject

Rng = np.random.Generator
Ranks = list[list[int]]


def make(s: Subject, executor: str, layouts: dict[str, Layout], pairing: Pairing, rng: Rng, tp: int) -> Plan:
    """A plan of these layouts, owners on random ranks."""
    return Plan(
        name="random",
        config_digest=s.config_digest,
        model=s.model,
        uses=s.census.uses,
        tp=tp,
        executor=executor,
        kind="random",
        layouts=tuple(layouts[a.name] for a in s.model.axes),
        pairings=(pairing,),
        owners=tuple((r.name, int(rng.integers(tp))) for r in s.model.roles if r.joins is not None),
        constraints=Constraints(),
        context=4096,
        kv_itemsize=s.kv_itemsize,
    )


def shuffled(rng: Rng, items: list[Any]) -> list[Any]:
    return [items[i] for i in rng.permutation(len(items))]


def _split(rng: Rng, items: list[Any], parts: int) -> list[list[Any]]:
    """Items in order, cut at random places into `parts` lists, any of them possibly empty."""
    cuts = np.sort(rng.integers(0, len(items) + 1, parts - 1)).tolist()
    bounds = [0, *cuts, len(items)]
    return [items[a:b] for a, b in itertools.pairwise(bounds)]


def equal_plan(s: Subject, rng: Rng, tp: int | None = None) -> Plan:
    """Equal ranks, query slot i reads KV slot i // g: what vLLM and transformers can express.

    Each KV head's queries are cut into chunks of at most g, each chunk beside its own copy; more copies without
    queries and dummy KV slots are mixed in; all slots are shuffled.
    """
    model = s.model
    tp = int(rng.integers(1, 7)) if tp is None else tp
    q, kv = model.axis("q_heads").count, model.axis("kv_heads").count
    r = q // kv
    for _ in range(50):
        g = int(rng.integers(1, r + 2))
        slots: list[tuple[int, list[int]]] = []
        for head in range(kv):
            queries = shuffled(rng, list(range(head * r, (head + 1) * r)))
            while queries:
                take = int(rng.integers(1, min(g, len(queries)) + 1)) if rng.random() < 0.5 else g
                slots.append((head, queries[:take]))
                queries = queries[take:]
        slots += [(int(rng.integers(-1, kv)), []) for _ in range(rng.integers(0, 3))]
        while len(slots) % tp:
            slots.append((int(rng.integers(-1, kv)), []))
        slots = shuffled(rng, slots)
        per = len(slots) // tp
        ranks = [slots[i * per : (i + 1) * per] for i in range(tp)]
        if all(any(queries for _, queries in rank) for rank in ranks):
            break  # real units on every rank; else most layouts would only repeat a smaller size
    full = [[(head, shuffled(rng, queries + [-1] * (g - len(queries)))) for head, queries in rank] for rank in ranks]
    follow = Layout.of("q_heads", [[x for _, queries in rank for x in queries] for rank in full])
    lead = Layout.of("kv_heads", [[head for head, _ in rank] for rank in full])
    rows = model.axis("vocab").count
    vocab = engine_vocab("vocab", rows, tp, 64)
    assert vocab is not None
    layouts = {
        "q_heads": follow,
        "kv_heads": lead,
        "mlp": _equal_width(model, rng, tp),
        "vocab": vocab.layouts[0],
    }
    return make(s, "vllm", layouts, even_pairing(follow, lead), rng, tp)


def _equal_width(model: Model, rng: Rng, tp: int) -> Layout:
    width = model.axis("mlp").count
    total = (-(-width // tp) + int(rng.integers(0, 3))) * tp
    slots = shuffled(rng, list(range(width)) + [-1] * (total - width))
    per = total // tp
    return Layout.of("mlp", [slots[i * per : (i + 1) * per] for i in range(tp)])


def ragged_plan(s: Subject, rng: Rng, tp: int | None = None) -> Plan:
    """Any layout at all: queries on any rank, their KV heads there once or more, any map, dummies anywhere, ranks
    that may hold nothing real of an axis."""
    model = s.model
    tp = int(rng.integers(1, 8)) if tp is None else tp
    q, kv = model.axis("q_heads").count, model.axis("kv_heads").count
    r = q // kv
    follow: Ranks = []
    lead: Ranks = []
    maps: list[tuple[int, ...]] = []
    for queries in _split(rng, shuffled(rng, list(range(q))), tp):
        needed = sorted({h // r for h in queries})
        leaders = needed + [int(rng.choice(needed)) for _ in range(rng.integers(0, 2)) if needed]
        leaders += [int(rng.integers(-1, kv)) for _ in range(rng.integers(0, 3))]
        leaders = shuffled(rng, leaders)
        if leaders:
            queries = queries + [-1] * int(rng.integers(0, 3))
        queries = shuffled(rng, queries)
        chosen = []
        for h in queries:
            fitting = [i for i, x in enumerate(leaders) if h < 0 or x == h // r]
            chosen.append(int(rng.choice(fitting)))
        follow.append(queries)
        lead.append(leaders)
        maps.append(tuple(chosen))
    layouts = {
        "q_heads": Layout.of("q_heads", follow),
        "kv_heads": Layout.of("kv_heads", lead),
        "mlp": _ragged_width(model, "mlp", rng, tp),
        "vocab": _ragged_width(model, "vocab", rng, tp),
    }
    return make(s, "runtime", layouts, Pairing("q_heads", "kv_heads", tuple(maps)), rng, tp)


def _ragged_width(model: Model, axis: str, rng: Rng, tp: int) -> Layout:
    width = model.axis(axis).count
    parts = _split(rng, shuffled(rng, list(range(width))), tp)
    return Layout.of(axis, [shuffled(rng, p + [-1] * int(rng.integers(0, 3))) for p in parts])


def tiny_subject(c: Config) -> Subject:
    return subject(c, dtype="F64")
