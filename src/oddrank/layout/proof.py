"""The proof: seven checks on every plan before a weight is read. Each says what it checked, or what is wrong.

A check trusts the family file for what a tensor means and nothing else; the tests prove the proof against
transformers' logits, over random layouts.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import msgspec
import numpy as np

from oddrank.errors import OddrankError
from oddrank.formats import fill_word, format_named
from oddrank.layout.census import Census
from oddrank.layout.cost import kv_bytes_per_layer
from oddrank.layout.crosstalk import unhandled
from oddrank.layout.executors import RUNTIME
from oddrank.layout.layouts import Layout
from oddrank.layout.plan import Plan
from oddrank.layout.storage import storage_problem
from oddrank.layout.wellformed import faults


class Check(msgspec.Struct, frozen=True):
    """One check's verdict; `detail` is one sentence either way."""

    name: str
    ok: bool
    detail: str


class ProofError(OddrankError):
    """A plan that cannot be proven. `checks` has every verdict."""

    def __init__(self, checks: tuple[Check, ...]) -> None:
        failed = [c for c in checks if not c.ok]
        super().__init__(
            "this plan cannot be proven, so no weight is read. " + " ".join(f"{c.name}: {c.detail}" for c in failed),
            short=failed[0].detail.partition(";")[0],
        )
        self.checks = checks


class _FoundError(Exception):
    """Raised inside a check with the sentence to show."""


def prove(plan: Plan, census: Census | None) -> tuple[Check, ...]:
    """All checks on a plan. `census` is the checkpoint's; None leaves coverage to the time the plan is applied."""
    steps: list[tuple[str, Callable[[], str]]] = [
        ("exactly once", lambda: exactly_once(plan)),
        ("pairing", lambda: pairing(plan)),
        ("silence", lambda: silence(plan)),
        ("storage", lambda: storage(plan)),
        ("executor", lambda: executor(plan)),
        ("no crosstalk", lambda: no_crosstalk(plan)),
    ]
    if census is not None:
        steps.insert(0, ("coverage", lambda: coverage(plan, census)))
    malformed = next(faults(plan), None)
    checks = []
    for name, step in steps:
        try:
            checks.append(Check(name, True, step()))
        except _FoundError as wrong:
            checks.append(Check(name, False, str(wrong)))
        except (LookupError, ValueError):
            if malformed is None:
                raise
            checks.append(Check(name, False, f"cannot be checked: {malformed}."))
    return tuple(checks)


def require(plan: Plan, census: Census | None) -> tuple[Check, ...]:
    """The checks of a plan that passes all of them. Raises ProofError otherwise."""
    checks = prove(plan, census)
    if not all(c.ok for c in checks):
        raise ProofError(checks)
    return checks


def coverage(plan: Plan, census: Census) -> str:
    """Every stored tensor has its role, every role its tensors, with the shapes that the config implies."""
    if census.problems:
        more = f" (and {len(census.problems) - 3} more)" if len(census.problems) > 3 else ""
        raise _FoundError("; ".join(census.problems[:3]) + more + ".")
    if census.uses != plan.uses:
        raise _FoundError("the checkpoint's tensors are stored otherwise than those the plan was made for.")
    with_role = census.total - len(census.ignored) - len(census.aliased)
    return (
        f"{with_role} of {census.total} tensors have a role, {len(census.ignored)} are ignored, "
        f"{len(census.aliased)} aliased, none is left over or missing"
    )


def exactly_once(plan: Plan) -> str:
    """On a summed axis every source element sits in one slot over all ranks; on any axis, slots name real
    elements; every replicated term that joins a sum has one owner among the ranks."""
    counted = 0
    for axis in plan.model.axes:
        layout = plan.layout(axis.name)
        if len(layout.ranks) != plan.tp:
            raise _FoundError(f"{axis.name} is laid out over {len(layout.ranks)} ranks, the plan has {plan.tp}.")
        slots = np.concatenate([layout.slots(r) for r in range(plan.tp)])
        if ((slots < -1) | (slots >= axis.count)).any():
            raise _FoundError(f"{axis.name} has a slot for element {int(slots.max())} of {axis.count}.")
        if not axis.summed:
            continue
        times = np.bincount(slots[slots >= 0], minlength=axis.count)
        if (times != 1).any():
            element = int(np.flatnonzero(times != 1)[0])
            raise _FoundError(
                f"{axis.name} is summed over the ranks, so each of its {axis.count} elements must sit on exactly "
                f"one; element {element} sits on {int(times[element])}."
            )
        counted += axis.count
    joining = [role.name for role in plan.model.roles if role.joins is not None]
    owned = Counter(name for name, _ in plan.owners)
    for name in joining:
        if owned[name] != 1:
            raise _FoundError(f"{name} joins a sum and must have one owner; it has {owned[name]}.")
    for name, rank in plan.owners:
        if name not in joining or not 0 <= rank < plan.tp:
            raise _FoundError(f"{name} is owned by rank {rank}, which is no term of a sum or no rank of {plan.tp}.")
    return f"{counted} elements of summed axes each in one slot, {len(joining)} replicated terms each with one owner"


def pairing(plan: Plan) -> str:
    """Each real follower slot reads, on its own rank, a slot that holds its own leader."""
    checked = 0
    for pair in plan.model.pairs:
        maps = next((p for p in plan.pairings if p.follower == pair.follower), None)
        if maps is None or maps.leader != pair.leader or len(maps.ranks) != plan.tp:
            raise _FoundError(f"{pair.follower} has no map to {pair.leader} for each of {plan.tp} ranks.")
        ratio = plan.model.ratio(pair)
        for rank in range(plan.tp):
            followers = plan.layout(pair.follower).slots(rank)
            leaders = plan.layout(pair.leader).slots(rank)
            partner = np.asarray(maps.ranks[rank], dtype=np.int64)
            if len(partner) != len(followers):
                raise _FoundError(
                    f"rank {rank} has {len(followers)} {pair.follower} slots and a map for {len(partner)}."
                )
            if len(partner) and (partner.min() < 0 or partner.max() >= len(leaders)):
                raise _FoundError(
                    f"rank {rank}: a {pair.follower} slot reads {pair.leader} slot {int(partner.max())} of "
                    f"{len(leaders)}."
                )
            read = leaders[partner] if len(partner) else partner
            wrong = (followers >= 0) & (read != followers // ratio)
            if wrong.any():
                at = int(np.flatnonzero(wrong)[0])
                holds = f"holds {int(read[at])}" if read[at] >= 0 else "is a dummy"
                raise _FoundError(
                    f"rank {rank}, slot {at}: {pair.follower} {int(followers[at])} belongs to {pair.leader} "
                    f"{int(followers[at]) // ratio}, but the slot it reads {holds}."
                )
            checked += int((followers >= 0).sum())
    return f"{checked} real followers each read their own leader on their own rank"


def silence(plan: Plan) -> str:
    """A dummy adds nothing: its outgoing columns are zero, its incoming rows zero, every other fill finite."""
    dummies = {la.axis: sum(la.counts()) - sum(la.real()) for la in plan.layouts if sum(la.counts()) != sum(la.real())}
    for name in dummies:
        axis = plan.model.axis(name)
        if axis.summed and axis.kind != "vocab" and not any(True for _ in plan.summed_roles(name)):
            raise _FoundError(f"{name} has dummies, but no row-parallel tensor whose zero columns would silence them.")
        if axis.kind == "experts":
            raise _FoundError("experts cannot be padded: the router would choose a dummy expert.")
    for use in plan.uses:
        fmt = format_named(use.format)
        if fmt.stored[0].row_fill != fmt.zero_word or fmt.stored[0].column_fill != fmt.zero_word:
            raise _FoundError(f"format {fmt.name}: the fill of its values is not its word for zero.")
        points = fmt.zero_points
        if points is not None:
            held = fmt.at(points.suffix)
            for fill in (held.row_fill, held.column_fill):
                if points.meant(int(fill)) != fmt.zero_word:
                    raise _FoundError(f"format {fmt.name}: the fill of {held.suffix} does not make its values zero.")
        for stored, dtype in zip(fmt.stored, use.dtypes, strict=True):
            if dtype is None:
                continue
            for fill in (stored.row_fill, stored.column_fill):
                word = fill_word(fill, dtype)
                exponent = dtype == "U8" and stored.shared  # e8m0 is often stored as plain bytes
                if not word_is_finite("F8_E8M0" if exponent else dtype, word):
                    raise _FoundError(f"format {fmt.name}: {stored.suffix} would be filled with {word:#x}, not finite.")
    if not dummies:
        return "no dummies"
    shown = ", ".join(f"{n} {axis}" for axis, n in dummies.items())
    return f"{shown} dummies have zero rows and zero outgoing columns"


def word_is_finite(dtype: str, word: int) -> bool:
    """Is the raw word of this safetensors dtype a finite number? Integers always are."""
    exponents = {"BF16": (8, 7), "F16": (5, 10), "F32": (8, 23), "F64": (11, 52), "F8_E5M2": (5, 2)}
    if dtype == "F8_E4M3":
        return word & 0x7F != 0x7F
    if dtype == "F8_E8M0":
        return word != 0xFF
    if dtype not in exponents:
        return True
    exponent, mantissa = exponents[dtype]
    return (word >> mantissa) & ((1 << exponent) - 1) != (1 << exponent) - 1


def storage(plan: Plan) -> str:
    """Each stored entry of every rank, and of the virtual checkpoint, draws from one entry of the source."""
    for rank in range(plan.tp):
        problem = storage_problem(plan.model, plan.uses, plan.slots(rank), refined=dict(plan.refined))
        if problem is not None:
            raise _FoundError(f"rank {rank}: {problem}.")
    if plan.executor_facts().equal_ranks:
        problem = storage_problem(plan.model, plan.uses, plan.virtual(), refined=dict(plan.refined))
        if problem is not None:
            raise _FoundError(f"virtual checkpoint: {problem}.")
    return "every stored entry of the result comes from one entry of the source"


def executor(plan: Plan) -> str:
    """The executor's own constraints, and the user's."""
    facts = plan.executor_facts()
    if facts.equal_ranks and len(set(plan.shares)) > 1:
        raise _FoundError(
            f"the plan is for ranks of unequal memory ({', '.join(f'{s:g}' for s in plan.shares)} GiB), and "
            f"{facts.name} gives every rank the same.{_elsewhere(plan)}"
        )
    _engine_axes(plan)
    if facts.equal_ranks:
        for layout in plan.layouts:
            if len(set(layout.counts())) > 1:
                raise _FoundError(
                    f"{facts.name} gives every rank the same number of {layout.axis}; the plan has "
                    f"{' / '.join(map(str, layout.counts()))}.{_elsewhere(plan)}"
                )
        for axes in plan.model.counted_together():
            totals = {axis: plan.layout(axis).total() for axis in axes}
            if len(set(totals.values())) > 1:
                raise _FoundError(
                    f"one config key counts {' and '.join(axes)}, so {facts.name} has as many of each; the plan has "
                    f"{' and '.join(str(n) for n in totals.values())}.{_elsewhere(plan)}"
                )
        for pair in plan.pairings:
            f, le = plan.layout(pair.follower).counts()[0], plan.layout(pair.leader).counts()[0]
            if not le or f % le or any(m != tuple(i // (f // le) for i in range(f)) for m in pair.ranks):
                raise _FoundError(
                    f"{facts.name} lets {pair.follower} slot i read {pair.leader} slot i // g; the plan's map on "
                    f"{f} and {le} slots is another.{_elsewhere(plan)}"
                )
    _user_constraints(plan)
    return f"{facts.name}'s constraints hold"


def _elsewhere(plan: Plan) -> str:
    """Who runs a plan that its executor does not, where anybody does."""
    return " The runtime executor runs such a plan." if RUNTIME.has(plan.model) else ""


def _engine_axes(plan: Plan) -> None:
    """What the engine pads or copies in its own buffers it lays out by its own rule: rank i of N holds vocabulary
    rows i * rows / N on, or copy i * L // N of L leaders. The virtual checkpoint keeps such an axis as trained."""
    facts = plan.executor_facts()
    for layout in plan.layouts:
        axis = plan.model.axis(layout.axis)
        by_engine = axis.kind == "vocab" and facts.vocab_multiple > 0
        if axis.kind == "experts":
            slots = [layout.slots(rank) for rank in range(plan.tp)]
            everywhere = all(np.array_equal(s[s >= 0], np.arange(axis.count)) for s in slots)
            if not layout.in_engine or not everywhere:
                raise _FoundError(f"{layout.axis} are cut inside, so every rank must list all {axis.count} of them.")
            continue
        if by_engine:
            rows = np.arange(layout.total(), dtype=np.int64)
            rule = np.array_split(np.where(rows < axis.count, rows, -1), plan.tp)
        elif layout.in_engine and facts.copies_kv and axis.kind == "heads" and not axis.summed:
            rule = [np.asarray([i * axis.count // plan.tp]) for i in range(plan.tp)]
        elif layout.in_engine:
            raise _FoundError(f"{layout.axis} is left to {facts.name}, which neither pads nor copies it.")
        else:
            continue
        if not layout.in_engine or layout != Layout.of(axis.name, rule, True):
            raise _FoundError(f"{facts.name} lays out {layout.axis} by its own rule, and the plan has it otherwise.")


def _user_constraints(plan: Plan) -> None:
    wanted = plan.constraints
    for cache in plan.model.kv:
        if cache.axis is None or wanted.gqa is None:
            continue
        queries, keys = plan.layout(cache.readers).counts(), plan.layout(cache.axis).counts()
        for followers, leaders in zip(queries, keys, strict=True):
            if followers != wanted.gqa * leaders:
                raise _FoundError(
                    f"gqa={wanted.gqa} was asked for; a rank has {followers} {cache.readers} on {leaders}."
                )
    totals = {la.axis: la.total() for la in plan.layouts}
    for axis, total in wanted.exact.items():
        if totals[axis] != total:
            raise _FoundError(f"{axis}={total} was asked for; the plan has {totals[axis]}.")
    for axis, multiple in wanted.multiple.items():
        for count in plan.layout(axis).counts():
            if count % multiple:
                raise _FoundError(f"{axis}_multiple={multiple} was asked for; a rank has {count}.")
    if wanted.kv_bytes is not None:
        most = max(kv_bytes_per_layer(plan.model, plan.counts(r), plan.kv_itemsize) for r in range(plan.tp))
        if most != wanted.kv_bytes:
            raise _FoundError(f"kv_bytes={wanted.kv_bytes} was asked for; the plan needs {most}.")


def no_crosstalk(plan: Plan) -> str:
    """Operations across the units of an axis are handled by the executor by name, or their axis is unchanged."""
    facts = plan.executor_facts()
    remedy = (
        " The runtime executor computes it over the real ones, by their own numbers."
        if RUNTIME.has(plan.model)
        else f" Other sizes may leave it as it was: oddrank plan MODEL --tp 1-16 --executor {facts.name} says which."
    )
    for cross, what in unhandled(plan.model, plan.layouts, facts):
        raise _FoundError(
            f"{cross.where} computes {cross.operation} across all {plan.model.axis(cross.axis).count} {cross.axis}; "
            f"{facts.name} would {what}.{remedy}"
        )
    names = sorted({c.operation for c in plan.model.crosstalk})
    return f"{', '.join(names)} across units handled" if names else "no operation runs across units"
