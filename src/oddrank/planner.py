"""From a model directory to a proven plan: the front door that the commands, the engine and Python users share."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from oddrank.checkpoint import Checkpoint
from oddrank.checkpoint.config import ConfigView
from oddrank.errors import OddrankError, printable
from oddrank.families import family_of
from oddrank.formats import formats
from oddrank.formats.declared import kind_of
from oddrank.geometry import Model
from oddrank.layout.census import Census, take_census
from oddrank.layout.cost import kv_bytes_per_layer
from oddrank.layout.executors import Constraints
from oddrank.layout.plan import Plan, config_digest
from oddrank.layout.proof import Check, require
from oddrank.layout.solver import DEFAULT_CONTEXT, Request, Solution, solve

KV_ITEMSIZE = {"float64": 8, "float32": 4, "float16": 2, "bfloat16": 2}
"""Bytes of a KV-cache element, by the dtype the config says the model is used in."""


class Subject(msgspec.Struct, frozen=True):
    """A checkpoint as far as planning needs it: read once, planned at any number of sizes."""

    name: str
    config_digest: str
    model: Model
    census: Census
    kv_itemsize: int


class Planned(msgspec.Struct, frozen=True):
    """A proven plan with what was weighed on the way."""

    solution: Solution
    checks: tuple[Check, ...]
    census: Census

    @property
    def plan(self) -> Plan:
        return self.solution.plan


def study(checkpoint: Checkpoint) -> Subject:
    """Read a checkpoint's geometry and census. Raises OddrankError for an unknown family or a senseless config."""
    view = ConfigView(checkpoint.config, file=str(checkpoint.path / "config.json"))
    family = family_of(view)
    values = {fmt.stored[0].suffix for fmt in formats().values()}  # the table too may be stored in any format
    tables = {p: {f"{p}embed_tokens{suffix}" for suffix in values} for p in family.prefixes}
    prefix = next((p for p, names in tables.items() if names & checkpoint.tensors.keys()), family.prefixes[0])
    model = family.build(view, prefix)
    return Subject(
        name=printable(os.fsencode(checkpoint.name).decode("utf-8", "replace")),
        config_digest=config_digest(checkpoint.config),
        model=model,
        census=take_census(model, checkpoint.tensors, quantization_of(checkpoint), checkpoint.array),
        kv_itemsize=KV_ITEMSIZE.get(view.dtype() or "bfloat16", 2),
    )


def quantization_of(checkpoint: Checkpoint) -> dict[str, Any] | None:
    """What a checkpoint says of how it is quantized: `quantization_config` of config.json or of its text part, or the
    file of its own that older GPTQ and AWQ exporters wrote; None where nothing does. Raises OddrankError where it is no
    object."""
    view = ConfigView(checkpoint.config, file=str(checkpoint.path / "config.json"))
    text = view.child("text_config")
    for holder in (view, text):
        found = holder.child("quantization_config") if holder is not None else None
        if found is not None and found.data:
            return dict(found.data)
    for file, method in (("quantize_config.json", "gptq"), ("quant_config.json", "awq")):
        stored = checkpoint.other_object(file)
        if stored is not None:
            return {"quant_method": method, **stored}
    return None


def plan_subject(subject: Subject, request: Request) -> Planned:
    """Solve and prove. Raises OddrankError where no layout exists, ProofError where a check fails."""
    solution = solve(
        subject.model,
        subject.census,
        msgspec.structs.replace(request, kv_itemsize=subject.kv_itemsize),
        name=subject.name,
        config_digest=subject.config_digest,
    )
    return Planned(solution, require(solution.plan, subject.census), subject.census)


def make_plan(
    model: str | os.PathLike[str] | Checkpoint,
    tp: int,
    *,
    executor: str = "runtime",
    layout: str = "auto",
    context: int = DEFAULT_CONTEXT,
    constraints: Mapping[str, int] | None = None,
    run_tp: int | None = None,
    rank_memory: Sequence[float] | None = None,
) -> Planned:
    """Plan `model`, a model directory or a model of the hub (`owner/name`), for `tp` ranks and prove the plan.

    executor: `runtime` or `vllm`. layout: `auto`, `ragged`, `pad` or `replicate`. context: tokens of context the
    cost is weighed at. constraints: e.g. {"gqa": 6, "mlp_multiple": 64}. run_tp: ranks it will run on, where that
    is not `tp`. rank_memory: GiB of each rank, where they are unequal; each gets its share.
    """
    subject = study(model if isinstance(model, Checkpoint) else Checkpoint.open(model))
    request = Request(
        tp=tp,
        executor=executor,
        layout=layout,
        context=context,
        constraints=Constraints.parse(constraints or {}, subject.model),
        run_tp=run_tp,
        shares=None if rank_memory is None else tuple(rank_memory),
    )
    return plan_subject(subject, request)


def plan_with_drafter(target: Subject, drafter: Subject, request: Request) -> tuple[Planned, Planned]:
    """Plan a model and its speculative drafter together.

    With equal ranks both must need the same KV bytes per token, layer and rank: an engine gives them one page size, and
    prefix caching breaks where they differ. The cheapest layout of the target for which the drafter has one is taken.
    The request's constraints are the target's. Raises OddrankError where no pair of layouts agrees.
    """
    alone = plan_subject(target, request)
    own = msgspec.structs.replace(request, constraints=Constraints(block=request.constraints.block))
    model = target.model
    leader, its = _cached(model), _cached(drafter.model)
    if leader is None or its is None or not alone.plan.executor_facts().equal_ranks:
        return alone, plan_subject(drafter, own)
    heads = next(g for g in alone.solution.choices if leader in {la.axis for la in g[0].candidate.layouts})
    tried = []
    for choice in sorted(heads, key=lambda c: not c.chosen):
        layouts = {la.axis: la for la in choice.candidate.layouts}
        needed = kv_bytes_per_layer(model, {leader: max(layouts[leader].counts())}, target.kv_itemsize)
        tried.append(needed)
        agreeing = Constraints(kv_bytes=needed, block=own.constraints.block)
        try:
            matched = plan_subject(drafter, msgspec.structs.replace(own, constraints=agreeing))
        except OddrankError:
            continue
        if choice.chosen:
            return alone, matched
        exact = {**request.constraints.exact, **{a: la.total() for a, la in layouts.items()}}
        wanted = msgspec.structs.replace(request.constraints, exact=exact)
        return plan_subject(target, msgspec.structs.replace(request, constraints=wanted)), matched
    slot = kv_bytes_per_layer(drafter.model, {its: 1}, drafter.kv_itemsize)
    raise OddrankError(
        f"{target.name} and its drafter {drafter.name} have no layouts at {request.tp} ranks with the same KV bytes "
        f"per token, layer and rank, which one cache for both needs: the target can have "
        f"{', '.join(map(str, tried))}, and a KV slot of the drafter is {slot}."
    )


def _cached(model: Model) -> str | None:
    """The axis of the heads that the model's KV cache holds; None where it has several caches, or one all ranks share,
    whose bytes no layout of a drafter's heads can match."""
    axes = {cache.axis for cache in model.kv}
    return next(iter(axes)) if len(axes) == 1 else None


def adopt_plan(file: str | os.PathLike[str], checkpoint: Checkpoint, tp: int | None = None) -> Plan:
    """A plan saved by `oddrank plan --json`, to run on `tp` ranks (None: its own), proven again for this checkpoint.

    Raises OddrankError for a file that is no plan, a plan of another checkpoint, or a size it does not run at.
    """
    data = Path(file).read_bytes()
    try:
        report = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise OddrankError(f"{file} is not a plan: {error}.") from None
    plan = Plan.from_json(bytes(report["plan"]) if "plan" in report else data)
    check_made_for(plan, checkpoint)
    subject = study(checkpoint)
    if plan.model != subject.model:
        raise OddrankError(f"{file} describes another model than {checkpoint.path}. Plan it again.")
    require(plan, subject.census)
    if tp is not None:
        plan = plan.at(tp)
        require(plan, subject.census)
    return plan


def check_made_for(plan: Plan, checkpoint: Checkpoint) -> None:
    """Raises OddrankError unless `plan` was made for this checkpoint's config."""
    if plan.config_digest != config_digest(checkpoint.config):
        raise OddrankError(
            f"the plan was made for {plan.name} with another config.json than {checkpoint.path} has now "
            f"(digest {plan.config_digest[:12]}). Plan it again: oddrank plan {checkpoint.path} --tp {plan.tp}."
        )


def not_served(plan: Plan) -> str | None:
    """Why the plan's executor cannot run this model however it is laid out; None where it can, as far as is known."""
    facts, model = plan.executor_facts(), plan.model
    if not facts.has(model):
        return (
            f"the {facts.name} has no model of family {model.family} yet (it has {', '.join(facts.families)}). "
            "The plan holds all the same: pad, stream and rank slices carry it out."
        )
    stored = {u.format for u in plan.uses if model.roles[u.role].matrix}
    used = sorted(name for name in stored if kind_of(name) not in facts.formats)
    if facts.formats and used:
        return (
            f"the {facts.name} has no kernels for {', '.join(used)} yet (it has {', '.join(facts.formats)}). The plan "
            "holds all the same: pad, stream and rank slices carry it out."
        )
    return None


def require_served(plan: Plan) -> None:
    """Raises OddrankError where the runtime cannot run the plan's model, before any rank is started."""
    why = not_served(plan)
    if why is not None:
        raise OddrankError(f"{plan.name}: {why}")


def stock_vllm(subject: Subject, tp: int) -> dict[str, object]:
    """Does stock vLLM serve this size? {"stock_vllm": bool, "stock_vllm_why": what does not divide, or None}."""
    try:
        request = Request(tp=tp, executor="vllm", kv_itemsize=subject.kv_itemsize)
        solution = solve(subject.model, subject.census, request, name=subject.name, config_digest=subject.config_digest)
    except OddrankError as error:
        return {"stock_vllm": False, "stock_vllm_why": error.short}
    picked = [c.candidate for group in solution.choices for c in group if c.chosen]
    stock = subject.model.stock()
    odd = [
        f"{stock[la.axis]} {la.axis}"
        for c in picked
        if c.kind not in ("identity", "even")
        for la in c.layouts
        if la.total() != stock[la.axis] or la.axis == "vocab"
    ]
    return {"stock_vllm": not odd, "stock_vllm_why": f"{', '.join(odd)}" if odd else None}
