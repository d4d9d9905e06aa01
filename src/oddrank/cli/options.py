"""Options that several commands share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from oddrank.errors import OddrankError
from oddrank.layout.plan import Plan
from oddrank.layout.shares import LEAST
from oddrank.layout.solver import DEFAULT_CONTEXT, LAYOUTS
from oddrank.runtime.expert_options import KINDS, LOADS

if TYPE_CHECKING:
    from oddrank.checkpoint import Checkpoint


def whole(text: str) -> int | None:
    """The whole number that is written in decimal digits, None where they are none or more than any count needs (Python
    refuses to read thousands of them)."""
    return int(text) if text.isdecimal() and len(text) <= 100 else None


def short(value: object) -> str:
    """What was given, for a message: no more of it than one line shows."""
    text = str(value)
    return text if len(text) <= 100 else f"{text[:97]}..."


class Sizes(click.ParamType[list[int]]):
    """A number of ranks: `3`; with `many`, also `1-16` or `2,3,5`."""

    name = "N"

    def __init__(self, many: bool = False) -> None:
        self.many = many

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        if isinstance(value, list):
            return value
        sizes: list[int] = []
        for part in str(value).split(","):
            low, dash, high = part.strip().partition("-")
            first, last = whole(low), whole(high if dash else low)
            if first is None or last is None:
                self.fail(f'"{short(value)}" is not a number of ranks' + (" (3, 1-16 or 2,3,5)." if self.many else "."))
            if first < 1:
                self.fail(f'"{value}": the number of ranks must be at least 1.')
            if last < first:
                self.fail(f'"{value}": the range ends before it begins.')
            if last - first > 4096:
                self.fail(f'"{value}" is more sizes than anybody reads: at most 4097.')
            sizes += range(first, last + 1)
        if not self.many and len(sizes) != 1:
            self.fail(f'"{value}": one number of ranks is wanted here.')
        return sizes


class Memory(click.ParamType[list[float]]):
    """GiB of memory: `24`; with `many`, of every rank: `24,24,16`."""

    name = "GiB"

    def __init__(self, many: bool = False) -> None:
        self.many = many

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[float]:
        if isinstance(value, list):
            return value
        sizes = []
        for part in str(value).split(","):
            try:
                size = float(part)
            except ValueError:
                size = 0.0
            if not LEAST <= size < 1e6:
                self.fail(f'"{value}" is not memory in GiB' + (", one number a rank (24,24,16)." if self.many else "."))
            sizes.append(size)
        if not self.many and len(sizes) != 1:
            self.fail(f'"{value}": one number of GiB is wanted here.')
        return sizes


RANK_MEMORY = click.option(
    "--rank-memory",
    type=Memory(many=True),
    metavar="G,G,..",
    help="Memory of each rank in GiB, as many numbers as ranks: unequal ranks get parts by their share (runtime only).",
)


def constraint_pairs(values: tuple[str, ...]) -> dict[str, int]:
    """`K=V` options as a dict. Raises OddrankError for anything else."""
    pairs: dict[str, int] = {}
    for value in values:
        key, equals, written = value.partition("=")
        number = whole(written.strip())
        if not equals or number is None:
            raise OddrankError(f'--constraint "{short(value)}": give NAME=NUMBER, e.g. gqa=6 or mlp_multiple=64.')
        if key.strip() in pairs:
            raise OddrankError(f"--constraint {key.strip()} is given twice.")
        pairs[key.strip()] = number
    return pairs


Command = Callable[..., Any]


def plan_for(
    checkpoint: Checkpoint,
    tp: int | None,
    *,
    executor: str,
    layout: str,
    context: int,
    constraints: tuple[str, ...],
    run_tp: list[int] | None = None,
    plan_file: str | None = None,
    rank_memory: list[float] | None = None,
) -> Plan:
    """The proven plan that a command's options ask for: made now, or read from `plan_file` and proven again.

    Raises OddrankError where there is neither a number of ranks nor a plan that has one.
    """
    from oddrank.planner import adopt_plan, make_plan

    if plan_file is not None and rank_memory is not None:
        raise OddrankError("--plan has its ranks' parts in it, and --rank-memory asks for others. Leave out one.")
    if plan_file is not None:
        return adopt_plan(plan_file, checkpoint, tp)
    if tp is None:
        raise OddrankError("how many ranks? Give --tp N, or --plan with a saved plan.")
    return make_plan(
        checkpoint,
        tp,
        executor=executor,
        layout=layout,
        context=context,
        constraints=constraint_pairs(constraints),
        run_tp=run_tp[0] if run_tp else None,
        rank_memory=rank_memory,
    ).plan


def expert_options(command: Command) -> Command:
    """--experts, --expert-cache and --expert-load: see ExpertOptions.parse."""
    for option in reversed(
        (
            click.option(
                "--experts",
                type=click.Choice(KINDS),
                help="Where routed experts are and who computes them: resident (on the device), offload (in host "
                "memory, computed on the device through a cache), cpu (by CPU threads), hybrid (cached ones on the "
                "device, the others on the CPU), auto (measured). Default: resident; with --expert-cache, offload.",
            ),
            click.option(
                "--expert-cache",
                metavar="COUNT|RATE|auto",
                help="Experts of each layer in the device's cache: how many (48), or which part (0.25 or 25%), or as "
                "many as there is room for.",
            ),
            click.option(
                "--expert-load",
                type=click.Choice(LOADS),
                help="Read experts one at a time, or on all of a rank's threads (default).",
            ),
        )
    ):
        command = option(command)
    return command


def planning(executor_default: str) -> Callable[[Command], Command]:
    """The options that shape a plan: --executor, --layout, --context, --constraint."""

    def add(command: Command) -> Command:
        for option in reversed(
            (
                click.option(
                    "--executor",
                    type=click.Choice(("runtime", "vllm")),
                    default=executor_default,
                    show_default=True,
                    help="Who runs the plan: oddrank's runtime (any layout) or vLLM (equal ranks).",
                ),
                click.option(
                    "--layout",
                    type=click.Choice(LAYOUTS),
                    default="auto",
                    show_default=True,
                    help="How heads are laid out: ragged (runtime only: no dummies), pad (keep the trained "
                    "group size), replicate (smaller groups, KV heads copied).",
                ),
                click.option(
                    "--context",
                    type=click.IntRange(min=0),
                    default=DEFAULT_CONTEXT,
                    show_default=True,
                    metavar="L",
                    help="Tokens of context at which the cost of KV cache and attention is weighed.",
                ),
                click.option(
                    "--constraint",
                    "constraints",
                    multiple=True,
                    metavar="K=V",
                    help="What the plan must meet; repeatable. gqa=6 (query slots per KV slot), AXIS=N (planned "
                    "total, e.g. mlp=17472), AXIS_multiple=N (per rank, e.g. mlp_multiple=64), kv_bytes=N (KV "
                    "bytes per token, layer and rank), block=N (rewrite "
                    "block scales in finer blocks).",
                ),
            )
        ):
            command = option(command)
        return command

    return add
