"""`oddrank check`: every tensor of a checkpoint, its role, its format, and what a plan makes of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click
import msgspec
from click.core import ParameterSource

from oddrank.cli.options import RANK_MEMORY, Sizes, constraint_pairs, planning
from oddrank.errors import CheckFailedError
from oddrank.words import counted

if TYPE_CHECKING:
    from oddrank.checkpoint import Checkpoint
    from oddrank.geometry import Model
    from oddrank.layout.census import Census

SHOWN = 20


@click.command("check", short_help="Coverage: every tensor, its role, its format, its old and new shape")
@click.argument("model", type=click.Path())
@click.option("--tp", "sizes", type=Sizes(), required=True, help="Ranks.")
@planning("vllm")
@RANK_MEMORY
@click.option("--list", "as_list", is_flag=True, help="Print every tensor.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON (with --list, every tensor).")
def command(
    model: str,
    sizes: list[int],
    executor: str,
    layout: str,
    context: int,
    constraints: tuple[str, ...],
    rank_memory: list[float] | None,
    as_list: bool,
    as_json: bool,
) -> None:
    """Check that every tensor of MODEL is accounted for, reading only headers.

    Reports tensors without a role, missing ones, and linear layers that the quantization config says are stored
    otherwise than they are. With equal ranks the new shape is that in the virtual checkpoint, otherwise the fullest
    rank's. Exit code 1 on anything unmatched, missing or contradictory.
    """
    from oddrank.checkpoint import Checkpoint
    from oddrank.formats.declared import declared
    from oddrank.layout.coverage import disagreements
    from oddrank.layout.executors import Constraints
    from oddrank.layout.solver import Request
    from oddrank.planner import plan_subject, quantization_of, study
    from oddrank.transform.recipe import recipes

    source = click.get_current_context().get_parameter_source("executor")
    if rank_memory is not None and source is ParameterSource.DEFAULT:
        executor = "runtime"  # the only one whose ranks may differ
    checkpoint = Checkpoint.open(model)
    subject = study(checkpoint)
    census = subject.census
    modelopt = checkpoint.other_object("hf_quant_config.json")
    contrary = list(disagreements(subject.model, census, declared(quantization_of(checkpoint), modelopt)))
    shapes: dict[str, tuple[int, ...]] = {}
    if not census.problems:
        wanted = Constraints.parse(constraint_pairs(constraints), subject.model)
        request = Request(
            tp=sizes[0],
            executor=executor,
            layout=layout,
            context=context,
            constraints=wanted,
            shares=None if rank_memory is None else tuple(rank_memory),
        )
        plan = plan_subject(subject, request).plan
        fullest = max(range(plan.tp), key=lambda r: sum(plan.counts(r).values()))
        slots = plan.virtual() if plan.executor_facts().equal_ranks else plan.slots(fullest)
        shapes = {name: recipe.shape for name, recipe in recipes(plan, slots).items()}
    rows = list(_rows(subject.model, census, checkpoint, shapes)) if as_list or as_json else []
    counts = Counter(use.format for use in census.uses for _ in range(use.count))
    report = {
        "model": subject.name,
        "family": subject.model.family,
        "tp": sizes[0],
        "ok": not census.problems and not contrary,
        "tensors": {
            "total": census.total,
            "with_role": census.total - len(census.ignored) - len(census.aliased) - len(census.unmatched),
            "changed": sum(shapes[n] != tuple(checkpoint.tensors[n].shape) for n in shapes),
            "ignored": len(census.ignored),
            "aliased": len(census.aliased),
            "unmatched": len(census.unmatched),
        },
        "formats": dict(counts),
        "absent": list(census.absent),
        "problems": list(census.problems),
        "disagreements": contrary,
    }
    if as_json:
        click.echo(msgspec.json.encode({**report, "list": rows} if as_list else report))
    else:
        for row in rows:
            click.echo(
                f"{row['name']}  {row['dtype']} {row['shape']} -> {row['planned']}  {row['role']}  {row['format']}"
            )
        _summary(report)
    if not report["ok"]:
        _fail(census.problems, [f"{d.module} is stored as {d.stored}, declared {d.declared}" for d in contrary])


def _rows(
    model: Model, census: Census, checkpoint: Checkpoint, shapes: dict[str, tuple[int, ...]]
) -> Iterator[dict[str, object]]:
    """One dict a stored tensor, in the order of the files."""
    from oddrank.formats.base import stem
    from oddrank.layout.census import use_instances, use_parts

    known: dict[str, tuple[str, str]] = {}
    for use in census.uses:
        role = model.roles[use.role]
        for part, _ in use_parts(model, use):
            for name in use_instances(model, use):
                known[stem(name) + part.suffix] = (f"{role.combine} {role.name}", use.format)
    for name, info in checkpoint.tensors.items():
        role_name, fmt = known.get(name, ("aliased" if name in census.aliased else "none", "-"))
        yield {
            "name": name,
            "dtype": info.dtype,
            "shape": list(info.shape),
            "planned": list(shapes[name]) if name in shapes else None,
            "role": role_name,
            "format": fmt,
        }


def _summary(report: dict[str, object]) -> None:
    tensors, formats = report["tensors"], report["formats"]
    assert isinstance(tensors, dict) and isinstance(formats, dict)
    click.echo(
        f"{report['model']} ({report['family']}) at TP={report['tp']}: {tensors['with_role']} of {tensors['total']} "
        f"tensors have a role, {tensors['changed']} change, {tensors['unmatched']} unmatched, "
        f"{tensors['ignored']} ignored, {tensors['aliased']} aliased"
    )
    click.echo("stored as " + ", ".join(f"{name} {count}" for name, count in formats.items()))


def _fail(problems: tuple[str, ...], contrary: list[str]) -> None:
    for title, lines in (("problem", problems), ("config and tensors disagree", contrary)):
        for line in lines[:SHOWN]:
            click.echo(f"{title}: {line}", err=True)
        if len(lines) > SHOWN:
            click.echo(f"... and {len(lines) - SHOWN} more", err=True)
    found = f"{counted(len(problems), 'problem')} with coverage, {counted(len(contrary), 'layer')}"
    raise CheckFailedError(f"{found} the config is wrong about.")
