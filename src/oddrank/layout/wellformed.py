"""Is a plan that was read from JSON a plan at all: do its parts refer to each other, are its numbers in range?

What it computes is for the proof to say; this only makes sure that the proof can be asked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from oddrank.checkpoint.dtypes import BITS
from oddrank.formats import format_named
from oddrank.geometry import Along, Concat, Dim, Groups, Model, Whole
from oddrank.layout.census import Use
from oddrank.layout.executors import EXECUTORS
from oddrank.layout.layouts import Layout, Pairing
from oddrank.layout.plan import Plan

MAX = 2**40
"""No axis, width or count of a real model comes near; products of two stay within 64 bits or are refused later."""
MAX_SLOTS = 2**26
"""Slots of an axis on one rank."""


def faults(plan: Plan) -> Iterator[str]:
    """What is malformed, one sentence each. Later ones may only make sense once the earlier are mended."""
    if not 1 <= plan.tp <= 2**16:
        yield f"tp is {plan.tp}"
    if plan.executor not in EXECUTORS:
        yield f'executor "{plan.executor}" is not one of {", ".join(EXECUTORS)}'
    if plan.context < 0 or not 1 <= plan.kv_itemsize <= 16:
        yield f"context is {plan.context}, kv_itemsize {plan.kv_itemsize}"
    yield from _model(plan.model)
    for use in plan.uses:
        yield from _use(plan.model, use)
    names = [axis.name for axis in plan.model.axes]
    if sorted(la.axis for la in plan.layouts) != sorted(names):
        yield f"it lays out {', '.join(la.axis for la in plan.layouts)}; the model has {', '.join(names)}"
    for layout in plan.layouts:
        yield from _layout(plan, layout)
    paired = [(p.follower, p.leader) for p in plan.model.pairs]
    if sorted((p.follower, p.leader) for p in plan.pairings) != sorted(paired):
        yield "its pairings are not those of the model"
    for pairing in plan.pairings:
        yield from _pairing(plan, pairing)
    for name, block in plan.refined:
        if block < 1 or name not in (*names, "*"):
            yield f"it refines {name} to blocks of {block}"
    if plan.shares and (len(plan.shares) != plan.tp or not all(0 < share < float("inf") for share in plan.shares)):
        yield f"its shares are {', '.join(f'{share:g}' for share in plan.shares)}, for {plan.tp} ranks"
    constrained = {*plan.constraints.exact, *plan.constraints.multiple}
    if not constrained <= set(names):
        yield f"it constrains {', '.join(sorted(constrained - set(names)))}, which the model has not"
    if any(v < 1 for v in (*plan.constraints.exact.values(), *plan.constraints.multiple.values())):
        yield "a constraint is not a positive number"


def _model(model: Model) -> Iterator[str]:
    stock = model.stock()
    if len(stock) != len(model.axes):
        yield "two axes have the same name"
    for axis in model.axes:
        if not 1 <= axis.count <= MAX:
            yield f"axis {axis.name} has {axis.count} elements"
    for pair in model.pairs:
        if pair.follower not in stock or pair.leader not in stock or pair.follower == pair.leader:
            yield f"the pair {pair.follower}, {pair.leader} is none of axes"
        elif stock[pair.leader] < 1 or stock[pair.follower] % stock[pair.leader]:
            yield f"{stock[pair.follower]} {pair.follower} do not follow {stock[pair.leader]} {pair.leader}"
    if len({p.follower for p in model.pairs}) != len(model.pairs) or len({p.leader for p in model.pairs}) != len(
        model.pairs
    ):
        yield "an axis is in two pairs"
    for number, role in enumerate(model.roles):
        if len(re.findall(r"\{[a-z]+\}", role.name)) != len(role.index):
            yield f"role {role.name} has {len(role.index)} indices"
        if role.matrix and len(role.dims) < 2:
            yield f"role {role.name} is a matrix of {len(role.dims)} dimensions"
        if role.combine == "row" and not role.dims:
            yield f"role {role.name} sums over no dimension"
        for dim in role.dims:
            yield from _dim(dim, stock, f"role {number} ({role.name})")
    paired = {(p.leader, p.follower) for p in model.pairs}
    for cache in model.kv:
        read = cache.readers in stock if cache.axis is None else (cache.axis, cache.readers) in paired
        if not read or not 0 <= cache.layers <= MAX or not 0 <= cache.width <= MAX:
            yield f"the KV cache of {cache.axis or 'all ranks'} is none"
    for name in (*(c.axis for c in model.crosstalk), *(axis for _, axis in model.config_axes)):
        if name not in stock:
            yield f"{name} is no axis of the model"


def _dim(dim: Dim, stock: dict[str, int], where: str) -> Iterator[str]:
    if isinstance(dim, Whole):
        if not 0 <= dim.length <= MAX:
            yield f"{where} is {dim.length} long"
    elif isinstance(dim, Along):
        if dim.axis not in stock or not 1 <= dim.width <= MAX:
            yield f"{where} is {dim.width} along {dim.axis}"
    elif isinstance(dim, Concat):
        if not dim.parts:
            yield f"{where} concatenates nothing"
        for part in dim.parts:
            yield from _dim(part, stock, where)
    elif isinstance(dim, Groups):
        if dim.by not in stock or not dim.parts:
            yield f"{where} is grouped by {dim.by}"
        for part in dim.parts:
            yield from _dim(part, stock, where)
            if stock.get(dim.by, 0) < 1 or stock.get(part.axis, 0) % stock[dim.by]:
                yield f"{where}: {part.axis} does not group by {dim.by}"


def _use(model: Model, use: Use) -> Iterator[str]:
    try:
        stored = format_named(use.format).stored
    except KeyError:
        stored = ()
    if not 0 <= use.role < len(model.roles) or not stored:
        yield f"a use of role {use.role} in format {use.format} is unknown"
        return
    role = model.roles[use.role]
    fits = len(use.dtypes) == len(stored) and all(
        d in BITS if d is not None else st.optional for d, st in zip(use.dtypes, stored, strict=True)
    )
    if not fits:
        yield f"{role.name} in format {use.format} has dtypes {', '.join(map(str, use.dtypes)) or 'none'}"
    numbers = range(role.count()) if use.instances is None else use.instances
    if use.count != len(numbers) or not all(0 <= n < role.count() for n in numbers):
        yield f"{role.name} has {role.count()} instances; a use of it counts {use.count}"


def _layout(plan: Plan, layout: Layout) -> Iterator[str]:
    count = plan.model.stock().get(layout.axis, 0)
    if len(layout.ranks) != plan.tp:
        yield f"{layout.axis} is laid out over {len(layout.ranks)} ranks of {plan.tp}"
    for runs in layout.ranks:
        for run in runs:
            if run.start < -1 or not 1 <= run.count <= MAX_SLOTS or (run.start >= 0 and run.start + run.count > count):
                yield f"{layout.axis} has a run of {run.count} from {run.start}, of {count} elements"
    if any(n > MAX_SLOTS for n in layout.counts()):
        yield f"{layout.axis} has more than {MAX_SLOTS} slots on a rank"


def _pairing(plan: Plan, pairing: Pairing) -> Iterator[str]:
    if len(pairing.ranks) != plan.tp:
        yield f"{pairing.follower} has a map for {len(pairing.ranks)} ranks of {plan.tp}"
    if any(not 0 <= slot < MAX_SLOTS for slots in pairing.ranks for slot in slots):
        yield f"{pairing.follower} has a map to a slot out of range"
