"""`oddrank plan`: how a model is laid out, what that costs, and the proof."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click
import msgspec

from oddrank.cli.options import RANK_MEMORY, Memory, Sizes, constraint_pairs, planning
from oddrank.errors import OddrankError

PAGE_START = b"<!doctype html>"


@click.command("plan", short_help="How a model is laid out over N ranks, what it costs, and the proof")
@click.argument("model", type=click.Path())
@click.option("--tp", "sizes", type=Sizes(many=True), required=True, help="Ranks: 3; or several sizes, 1-16 or 2,3,5.")
@planning("runtime")
@RANK_MEMORY
@click.option(
    "--memory",
    type=Memory(),
    help="Memory of every rank in GiB: how many tokens of KV cache then fit beside the weights.",
)
@click.option("--run-tp", type=Sizes(), help="Ranks the plan will run on, where that is not --tp.")
@click.option(
    "--drafter", type=click.Path(), help="A speculative drafter to plan with MODEL, so that their KV caches agree."
)
@click.option(
    "--html", type=click.Path(dir_okay=False), help="Write a page that shows the plan: who holds what, and why."
)
@click.option("--json", "as_json", is_flag=True, help='Print JSON, with the whole plan under "plan".')
def command(
    model: str,
    sizes: list[int],
    executor: str,
    layout: str,
    context: int,
    constraints: tuple[str, ...],
    rank_memory: list[float] | None,
    memory: list[float] | None,
    run_tp: list[int] | None,
    drafter: str | None,
    html: str | None,
    as_json: bool,
) -> None:
    """Plan MODEL for N ranks: a directory with config.json and safetensors files, or a model of the Hugging Face hub
    (owner/name, or owner/name@revision).

    Reads headers only, those of a model of the hub over HTTP. Shows every axis as trained and as planned, bytes per
    rank, the alternatives, and the proof that the plan computes what the model computes; a plan that cannot be proven
    is an error.
    """
    from oddrank.checkpoint import Checkpoint
    from oddrank.layout.executors import Constraints
    from oddrank.layout.solver import Request
    from oddrank.planner import plan_subject, plan_with_drafter, study
    from oddrank.report import describe

    if memory is not None and rank_memory is not None:
        raise OddrankError("--rank-memory says what every rank has, and so does --memory. Leave out one.")
    if memory is not None and len(sizes) > 1:
        raise OddrankError("--memory is for one size of --tp, not several.")
    if html is not None and len(sizes) > 1:
        raise OddrankError("--html shows one size of --tp, not several.")
    subject = study(Checkpoint.open(model))
    if html is not None:
        spare_the_model(Path(html), model, drafter)
    wanted = Constraints.parse(constraint_pairs(constraints), subject.model)

    def request(tp: int) -> Request:
        return Request(
            tp=tp,
            executor=executor,
            layout=layout,
            context=context,
            constraints=wanted,
            run_tp=run_tp[0] if run_tp else None,
            shares=None if rank_memory is None else tuple(rank_memory),
        )

    if len(sizes) == 1:
        if drafter is None:
            every = [plan_subject(subject, request(sizes[0]))]
        else:
            every = [*plan_with_drafter(subject, study(Checkpoint.open(drafter)), request(sizes[0]))]
        known = [memory[0]] * sizes[0] if memory else None
        reports = [{**describe(p.solution, p.census, p.checks, known), "plan": p.plan} for p in every]
        if html is not None:
            from oddrank.checkpoint.wholefile import write_whole
            from oddrank.picture import page

            write_whole(Path(html), page(reports).encode())
        if as_json:
            click.echo(msgspec.json.encode({**reports[0], "drafter": reports[1]} if drafter else reports[0]))
        else:
            from oddrank.cli.tables import show_plan

            for report in reports:
                show_plan(report)
        return
    if drafter is not None:
        raise OddrankError("--drafter is planned with one size of --tp, not several.")
    lines = [size_line(subject, request(tp)) for tp in sizes]
    if as_json:
        click.echo(msgspec.json.encode(lines))
    else:
        from oddrank.cli.tables import show_sizes

        show_sizes(subject.name, executor, lines)
    if all(line["refused"] for line in lines):
        raise OddrankError(f"none of these sizes can be planned: {lines[0]['refused']}")


def spare_the_model(page: Path, *models: str | None) -> None:
    """Raises OddrankError where `page` is a file of one of the models' directories: a page would take the place of
    weights or a config. A page that is there may be replaced."""
    if not page.is_file():
        return
    # a link is followed, and the hub's cache has links for files
    within = {os.path.realpath(page.parent), os.path.dirname(os.path.realpath(page))}
    with open(page, "rb") as file:
        earlier = file.read(len(PAGE_START)) == PAGE_START
    if not earlier and any(model is not None and os.path.realpath(model) in within for model in models):
        raise OddrankError(
            f"{page} is a file of the model, and --html would replace it with a page. Give a name that is free."
        )


def size_line(subject: Any, request: Any) -> dict[str, Any]:
    """One size of `--tp 1-16`: does stock vLLM serve it, what oddrank does there, what that costs."""
    from oddrank.planner import plan_subject, stock_vllm
    from oddrank.report import describe

    line: dict[str, Any] = {"tp": request.tp, **stock_vllm(subject, request.tp), "refused": None}
    try:
        planned = plan_subject(subject, request)
    except OddrankError as error:
        return {**line, "refused": str(error), "refused_short": error.short}
    report = describe(planned.solution, planned.census, planned.checks)
    keys = ("layout", "axes", "bytes", "kv", "idle_ranks", "tensors")
    return {**line, **{k: report[k] for k in keys}}
