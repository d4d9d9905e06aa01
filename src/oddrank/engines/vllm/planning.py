"""Which plan a served model gets: the same planner and proof as everywhere, asked for vLLM's executor."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import msgspec

from oddrank.checkpoint import Checkpoint
from oddrank.checkpoint.hub import HubModel
from oddrank.engines.vllm.settings import Settings
from oddrank.layout.executors import Constraints
from oddrank.layout.plan import Plan
from oddrank.layout.proof import require
from oddrank.layout.solver import Request
from oddrank.planner import Subject, plan_subject, plan_with_drafter, study


class Pair(NamedTuple):
    """The plans of a target and of its drafter (None without one). Identities are plans too."""

    target: Plan
    drafter: Plan | None


def plan_pair(target: Path, drafter: Path | None, tp: int, settings: Settings) -> Pair:
    """Plan and prove what is served at `tp` ranks.

    A drafter that lies in the target's own checkpoint (MTP layers) shares the target's plan. Raises OddrankError where
    there is no layout, ProofError where a check fails; with ODDRANK_COVERAGE=warn not for a tensor without a role.
    """
    subject = _study(target, settings)
    planned_for = settings.plan_tp or tp
    request = Request(
        tp=planned_for,
        executor="vllm",
        layout=settings.layout,
        constraints=Constraints.parse(settings.constraints, subject.model),
        run_tp=tp if planned_for != tp else None,
    )
    if drafter is None or drafter.resolve() == target.resolve() or not settings.drafter:
        plan = _at(plan_subject(subject, request).plan, tp, subject)
        return Pair(plan, plan if drafter is not None and settings.drafter else None)
    other = _study(drafter, settings)
    mine, its = plan_with_drafter(subject, other, request)
    return Pair(_at(mine.plan, tp, subject), _at(its.plan, tp, other))


def _study(folder: Path, settings: Settings) -> Subject:
    subject = study(Checkpoint.open(folder))
    if settings.strict or not subject.census.unmatched:
        return subject
    # the stream passes these on as they are, with a warning each
    unmatched = set(subject.census.unmatched)
    others = tuple(p for p in subject.census.problems if p.partition(" ")[0] not in unmatched)
    return msgspec.structs.replace(subject, census=msgspec.structs.replace(subject.census, problems=others))


def _at(plan: Plan, tp: int, subject: Subject) -> Plan:
    run = plan.at(tp)
    if run is not plan:
        require(run, subject.census)
    return run


def checkpoint_folder(model: str, revision: str | None, download_dir: str | None) -> Path:
    """The directory of a model that vLLM was given as a path or a hub id. Files of a hub id are fetched into the
    cache that vLLM itself would use. Raises OddrankError where neither is to be had."""
    path = Path(model)
    if path.is_dir():
        return path
    from oddrank.checkpoint.repository import download

    named = HubModel(model, revision or "main")
    return download(named, named.revision, ("*.json", "*.safetensors"), download_dir)
