"""`oddrank vllm`: vLLM's own command line with the plugin on, and what the plugin finds in this vLLM."""

from __future__ import annotations

import json
import sys

import click

from oddrank.cli.options import constraint_pairs
from oddrank.errors import OddrankError

_PASSED_ON = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}


@click.group()
def command() -> None:
    """Serve with vLLM at any tensor-parallel size; nothing is rewritten on disk."""


@command.command(context_settings=_PASSED_ON)
@click.option("--oddrank-layout", "layout", type=click.Choice(("auto", "pad", "replicate")), help="ODDRANK_LAYOUT.")
@click.option("--oddrank-constraint", "constraints", multiple=True, metavar="K=V",
              help="ODDRANK_CONSTRAINTS: gqa=6, mlp_multiple=64, AXIS=N; repeatable.")  # fmt: skip
@click.option("--oddrank-drafter", "drafter", type=click.Choice(("on", "off")), help="ODDRANK_DRAFTER.")
@click.option("--oddrank-plan-tp", "plan_tp", type=click.IntRange(1, 1024), help="ODDRANK_PLAN_TP.")
@click.option("--oddrank-coverage", "coverage", type=click.Choice(("strict", "warn")), help="ODDRANK_COVERAGE.")
@click.help_option("--oddrank-help", help="These options; --help is vLLM's own.")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def serve(
    layout: str | None,
    constraints: tuple[str, ...],
    drafter: str | None,
    plan_tp: int | None,
    coverage: str | None,
    arguments: tuple[str, ...],
) -> None:
    """`vllm serve ARGUMENTS...` with ODDRANK=1.

    Every argument but the --oddrank-* ones is vLLM's own: oddrank vllm serve MODEL --tensor-parallel-size 3. An
    option that is not given here keeps what its environment variable says.
    """
    from oddrank.engines.vllm.launch import serve as launch

    unknown = [a for a in arguments if a.startswith("--oddrank")]
    if unknown:
        raise OddrankError(f"{unknown[0]} is no option of oddrank's; `oddrank vllm serve --oddrank-help` lists them.")

    pairs = constraint_pairs(constraints)
    given = {
        "ODDRANK_LAYOUT": layout,
        "ODDRANK_CONSTRAINTS": ",".join(f"{k}={v}" for k, v in pairs.items()) or None,
        "ODDRANK_DRAFTER": drafter,
        "ODDRANK_PLAN_TP": None if plan_tp is None else str(plan_tp),
        "ODDRANK_COVERAGE": coverage,
    }
    launch(arguments, {k: v for k, v in given.items() if v is not None})


@command.command()
@click.option("--json", "as_json", is_flag=True, help="Machine-readable.")
def doctor(as_json: bool) -> None:
    """Versions, the places in vLLM where the plugin hooks in, and what would be installed. Exit 1 if it cannot be."""
    from oddrank.engines.vllm.doctor import examine, show

    found = examine()
    if as_json:
        click.echo(json.dumps(found, indent=2))
    else:
        show(found)
    if not found["ok"]:
        sys.exit(1)
