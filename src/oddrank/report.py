"""What a plan says of itself: the numbers behind `oddrank plan`, as plain values."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec

from oddrank.geometry import Model
from oddrank.layout.breakdown import bytes_by_part, dummy_bytes, held
from oddrank.layout.candidate import Candidate
from oddrank.layout.capacity import rooms, tokens_together
from oddrank.layout.census import Census, Use
from oddrank.layout.cost import kv_bytes, macs, rank_cost, state_bytes, weight_bytes
from oddrank.layout.plan import Plan
from oddrank.layout.proof import Check
from oddrank.layout.refinement import finer_widths
from oddrank.layout.solver import Choice, Solution
from oddrank.layout.storage import units
from oddrank.planner import Planned, not_served
from oddrank.transform.recipe import recipes


def describe(
    solution: Solution, census: Census, checks: tuple[Check, ...], memory: Sequence[float] | None = None
) -> dict[str, Any]:
    """The JSON of `oddrank plan --json`. Bytes are bytes; per_rank lists have one entry a rank; an axis's unit is what
    its storage lets be cut, in elements. memory: GiB of every rank, where it is known and the plan was not made for it:
    how much KV cache fits."""
    plan = solution.plan
    model, stock = plan.model, plan.model.stock()
    refined = dict(plan.refined)
    costs = [
        rank_cost(
            model,
            plan.uses,
            plan.counts(r),
            context=plan.context,
            kv_itemsize=plan.kv_itemsize,
            refined=refined,
        )
        for r in range(plan.tp)
    ]
    stock_bytes = weight_bytes(model, plan.uses, stock)
    candidates = chosen(solution)
    return {
        "model": plan.name,
        "family": model.family,
        "architecture": model.architecture,
        "tp": plan.tp,
        "executor": plan.executor,
        "layout": plan.kind,
        "context": plan.context,
        "axes": [
            {
                "name": la.axis,
                "stock": stock[la.axis],
                "planned": stock[la.axis] if model.axis(la.axis).kind == "experts" else la.total(),
                "per_rank": list(la.counts()),
                "real_per_rank": list(la.real()),
                "unit": units(model, plan.uses, refined.get(la.axis, refined.get("*", 0)))[la.axis],
                "why": candidates[la.axis].why,
            }
            for la in plan.layouts
        ],
        "tensors": {
            "total": census.total,
            "changed": changed_tensors(plan),
            "unmatched": len(census.unmatched),
        },
        "bytes": {
            "stock": stock_bytes,
            "per_rank": [c.weight_bytes for c in costs],
            "overhead": max(c.weight_bytes for c in costs) * plan.tp / stock_bytes - 1.0,
            "parts": [msgspec.structs.asdict(part) for part in bytes_by_part(plan)],
            "dummies_per_rank": list(dummy_bytes(plan)),
            "held": msgspec.structs.asdict(held(plan)),
        },
        "macs_per_token": {"stock": macs(model, stock, plan.context), "per_rank": [c.macs for c in costs]},
        "kv": {
            "stock_bytes_per_token": kv_bytes(model, stock, plan.kv_itemsize),
            "per_rank_bytes_per_token": [c.kv_bytes for c in costs],
            "layers": sum(cache.layers for cache in model.kv),
        },
        "state": {
            "stock_bytes_per_request": state_bytes(model, stock),
            "per_rank_bytes_per_request": [state_bytes(model, plan.counts(r)) for r in range(plan.tp)],
        },
        "capacity": capacity(plan, plan.shares or memory),
        "refined": refined,
        "formats": dict(_formats(plan)),
        "absent": list(census.absent),
        "notes": notes(plan, candidates),
        "idle_ranks": idle_ranks(plan),
        "alternatives": [
            alternative(choice, model, plan.uses) for group in solution.choices if len(group) > 1 for choice in group
        ],
        "proof": {
            "ok": all(c.ok for c in checks),
            "checks": [{"name": c.name, "ok": c.ok, "detail": c.detail} for c in checks],
        },
    }


def capacity(plan: Plan, memory: Sequence[float] | None) -> dict[str, Any] | None:
    """What fits beside the weights; None where no rank's memory is known."""
    if memory is None:
        return None
    ranks = rooms(plan, memory)
    return {
        "memory_gib": list(memory),
        "reserve_bytes": [room.reserve for room in ranks],
        "weight_bytes": [room.weights for room in ranks],
        "per_rank_tokens": [room.tokens() for room in ranks],
        "tokens": tokens_together(ranks),
        "fits": all(room.tokens() != 0 for room in ranks),
    }


def notes_of(planned: Planned) -> list[str]:
    """The notes of a plan just made."""
    return notes(planned.plan, chosen(planned.solution))


def chosen(solution: Solution) -> dict[str, Candidate]:
    """The candidate that was taken, by axis."""
    picked = [c.candidate for group in solution.choices for c in group if c.chosen]
    return {la.axis: c for c in picked for la in c.layouts}


def notes(plan: Plan, candidates: dict[str, Candidate]) -> list[str]:
    """What a user should know beyond the numbers, one sentence each."""
    found = []
    why = not_served(plan)
    if why is not None:
        found.append(why)
    facts = plan.executor_facts()
    finer = finer_widths(plan) if facts.equal_ranks else None
    if finer is not None:
        block, then = finer
        now = weight_bytes(plan.model, plan.uses, plan.counts(0))
        found.append(
            f"the blocks of scales make widths longer than {plan.tp} ranks need: with --constraint block={block}, "
            f"which rewrites them losslessly, the fullest rank has {amount(then)} of weights instead of {amount(now)}, "
            f"where the kernels of {facts.name} take such blocks."
        )
    for axis in plan.model.axes:
        if axis.kind == "vocab" and facts.vocab_multiple and candidates[axis.name].kind == "pad":
            found.append(
                f"stock {facts.name} pads the {axis.count} vocabulary rows to a multiple of {facts.vocab_multiple}, "
                f"which {plan.tp} ranks do not divide, and refuses; the stored tensor must stay as it is, so the "
                f"engine has to be told to pad to {plan.layout(axis.name).total()}."
            )
    return found


def _formats(plan: Plan) -> Counter[str]:
    """How many matrices are stored in each format."""
    found: Counter[str] = Counter()
    for use in plan.uses:
        if plan.model.roles[use.role].matrix:
            found[use.format] += use.count
    return found


def changed_tensors(plan: Plan) -> int:
    """Stored tensors that differ between the stock and the virtual checkpoint; 0 where ranks only take slices."""
    if not plan.executor_facts().equal_ranks:
        return 0
    return sum(1 for recipe in recipes(plan, plan.virtual()).values() if not recipe.unchanged)


def idle_ranks(plan: Plan) -> list[int]:
    """Ranks that hold no real element of some summed axis: they compute zeros there."""
    idle = set()
    for axis in plan.model.axes:
        if axis.summed:
            idle |= {r for r, n in enumerate(plan.layout(axis.name).real()) if n == 0}
    return sorted(idle)


def alternative(choice: Choice, model: Model, uses: tuple[Use, ...]) -> dict[str, Any]:
    """One candidate of a group of axes, with its price on the fullest rank (of these axes alone)."""
    c: Candidate = choice.candidate
    return {
        "layout": c.kind,
        "chosen": choice.chosen,
        "group": c.gqa,
        "axes": [{"name": la.axis, "planned": la.total(), "per_rank": list(la.counts())} for la in c.layouts],
        "weight_bytes_per_rank": choice.cost.weight_bytes,
        "kv_bytes_per_token_per_rank": choice.cost.kv_bytes,
        "macs_per_token_per_rank": choice.cost.macs,
        "why": c.why,
    }


def amount(n: float) -> str:
    """Bytes with a binary unit: 270.3 MiB."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024 or unit == "GiB":
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n /= 1024
    raise AssertionError
