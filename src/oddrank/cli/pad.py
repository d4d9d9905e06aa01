"""`oddrank pad`: the plan's virtual checkpoint on disk."""

from __future__ import annotations

import click
import msgspec

from oddrank.cli.options import Sizes, constraint_pairs, planning
from oddrank.words import counted


@click.command("pad", short_help="Write the plan's virtual checkpoint to disk")
@click.argument("model", type=click.Path())
@click.argument("out", type=click.Path())
@click.option("--tp", "sizes", type=Sizes(), required=True, help="Ranks the result must divide by.")
@planning("vllm")
@click.option("--restart", is_flag=True, help="Throw away an unfinished run that was made from another plan.")
@click.option("--json", "as_json", is_flag=True, help="Print what was written as JSON.")
def command(
    model: str,
    out: str,
    sizes: list[int],
    executor: str,
    layout: str,
    context: int,
    constraints: tuple[str, ...],
    restart: bool,
    as_json: bool,
) -> None:
    """Write MODEL, laid out for N equal ranks, as an ordinary checkpoint into the new directory OUT.

    An engine that divides evenly (vLLM, SGLang, transformers) then loads OUT at N ranks, or at any number that divides
    the planned counts, 1 included. Every other file of MODEL is carried over; oddrank.json records the plan and a
    SHA-256 per file. OUT appears only when it is complete; an interrupted run continues when called again.
    """
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn, TransferSpeedColumn

    from oddrank.checkpoint import Checkpoint
    from oddrank.layout.executors import Constraints
    from oddrank.layout.solver import Request
    from oddrank.planner import plan_subject, study
    from oddrank.report import notes_of
    from oddrank.transform.pad import output_bytes, pad

    checkpoint = Checkpoint.open(model)
    subject = study(checkpoint)
    wanted = Constraints.parse(constraint_pairs(constraints), subject.model)
    request = Request(tp=sizes[0], executor=executor, layout=layout, context=context, constraints=wanted)
    planned = plan_subject(subject, request)
    plan = planned.plan
    checkpoint = checkpoint.fetched()
    console = Console(stderr=True)
    columns = (BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, disable=as_json or not console.is_terminal, transient=True) as bar:
        task = bar.add_task("pad", total=output_bytes(plan, checkpoint))
        done = pad(plan, checkpoint, out, restart=restart, progress=lambda n: bar.advance(task, n))
    if as_json:
        click.echo(msgspec.json.encode({**msgspec.to_builtins(done), "tp": plan.tp, "layout": plan.kind}))
        return
    before, after = checkpoint.config.get("model_type"), Checkpoint.open(done.path).config.get("model_type")
    if before != after:
        click.echo(
            f"config.json says {after} instead of {before}: the same arithmetic, in a class that takes head_dim as "
            "written"
        )
    for note in notes_of(planned):
        click.echo(f"note: {note}")
    resumed = f", {counted(done.resumed, 'weight file')} kept from an earlier run" if done.resumed else ""
    click.echo(
        f"{done.path}: {plan.kind} for TP={plan.tp}, {done.changed} of {counted(done.tensors, 'tensor')} changed, "
        f"{done.bytes_written / 2**20:.1f} MiB of weights written{resumed}"
    )
