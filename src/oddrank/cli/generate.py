"""`oddrank generate`: text from the runtime, one process per rank."""

from __future__ import annotations

import sys
from typing import Any

import click
import msgspec

from oddrank.cli.number import Number
from oddrank.cli.options import RANK_MEMORY, Sizes, expert_options, plan_for, planning, short
from oddrank.errors import OddrankError
from oddrank.runtime.expert_options import ExpertOptions
from oddrank.words import counted


class TokenIds(click.ParamType[list[int]]):
    """`3,17,52`."""

    name = "ID,ID,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> list[int]:
        parts = [part.strip() for part in str(value).split(",")]
        if not all(part.isdecimal() and len(part) < 10 for part in parts):
            self.fail(f'"{short(value)}" is not token ids: numbers from 0 on with commas between them (3,17,52).')
        return [int(part) for part in parts]


@click.command("generate", short_help="Generate text with the runtime, one process per rank")
@click.argument("model", type=click.Path())
@click.option("--tp", "sizes", type=Sizes(), help="Ranks; with --plan, by default the plan's own.")
@click.option("--prompt", "prompts", multiple=True, help="Text to continue; repeatable (a batch).")
@click.option(
    "--prompt-ids",
    "id_prompts",
    type=TokenIds(),
    multiple=True,
    metavar="ID,ID,...",
    help="Token ids to continue, in place of a text: needs no tokenizer.",
)
@click.option("--max-tokens", type=click.IntRange(min=1), default=64, show_default=True, help="Tokens at most.")
@click.option("--temperature", type=Number(min=0), default=0.0, show_default=True, help="0 is greedy.")
@click.option("--top-p", type=Number(0, 1, min_open=True), default=1.0, show_default=True)
@click.option("--top-k", type=click.IntRange(min=0), default=0, show_default=True, help="0: all tokens.")
@click.option("--seed", type=int, help="For sampling; the same seed gives the same text at any TP size.")
@click.option("--chat", is_flag=True, help="Put each prompt in the model's chat template, as a user's message.")
@click.option(
    "--dtype", type=click.Choice(("bf16", "fp16", "fp32", "fp64")), help="Compute in; by default what the config says."
)
@click.option(
    "--cpu-threads",
    "--threads",
    "threads",
    type=click.IntRange(min=1),
    help="Threads of each rank, within its slice of the cores; by default one on each.",
)
@expert_options
@planning("runtime")
@RANK_MEMORY
@click.option("--run-tp", type=Sizes(), help="Run a plan for --tp ranks on this many instead.")
@click.option("--plan", "plan_file", type=click.Path(), help="Use a plan saved by `oddrank plan --json`.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: text, token_ids, tp, seconds, tokens_per_second.")
def command(
    model: str,
    sizes: list[int] | None,
    prompts: tuple[str, ...],
    id_prompts: tuple[list[int], ...],
    max_tokens: int,
    temperature: float,
    top_p: float,
    top_k: int,
    seed: int | None,
    chat: bool,
    dtype: str | None,
    threads: int | None,
    experts: str | None,
    expert_cache: str | None,
    expert_load: str | None,
    executor: str,
    layout: str,
    context: int,
    constraints: tuple[str, ...],
    rank_memory: list[float] | None,
    run_tp: list[int] | None,
    plan_file: str | None,
    as_json: bool,
) -> None:
    """Generate text from MODEL on N ranks of this machine, each holding only its slice.

    The model is planned and the plan proven first; see `oddrank plan`.
    """
    if not prompts and not id_prompts:
        raise OddrankError("there is nothing to continue: give --prompt, or --prompt-ids with token ids.")
    for prompt in prompts:
        if not prompt:
            raise OddrankError("--prompt is empty; the model needs at least one token to start from.")
        if any("\ud800" <= c <= "\udfff" for c in prompt):
            raise OddrankError("--prompt is not valid UTF-8.")
    chosen = ExpertOptions.parse(experts, expert_cache, expert_load)
    from oddrank.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(model)
    plan = plan_for(
        checkpoint,
        None if sizes is None else sizes[0],
        executor=executor,
        layout=layout,
        context=context,
        constraints=constraints,
        run_tp=run_tp,
        plan_file=plan_file,
        rank_memory=rank_memory,
    )
    from oddrank.layout.capacity import require_room
    from oddrank.layout.executors import RUNTIME
    from oddrank.planner import require_served

    require_served(msgspec.structs.replace(plan, executor=RUNTIME.name))
    if experts in (None, "resident") and expert_cache is None:
        require_room(plan)
    try:
        from oddrank.runtime.generate import generate
        from oddrank.runtime.request import Sampling
    except ModuleNotFoundError as error:
        raise OddrankError(
            f"oddrank generate needs {error.name}, which is not installed: pip install 'oddrank[runtime]'."
        ) from None
    asked: list[str | list[int]] = [*prompts, *id_prompts]
    live = not as_json and len(asked) == 1

    def show(index: int, piece: str) -> None:
        sys.stdout.write(piece)
        sys.stdout.flush()

    result = generate(
        checkpoint.fetched().path,
        plan,
        asked,
        Sampling(max_tokens=max_tokens, temperature=temperature, top_p=top_p, top_k=top_k, seed=seed),
        chat=chat,
        on_text=show if live else None,
        dtype=dtype,
        threads=threads,
        experts=chosen,
    )
    first = result.outputs[0]
    if as_json:
        report = {
            "text": first.text,
            "token_ids": first.token_ids,
            "finish": first.finish,
            "tp": result.tp,
            "layout": plan.kind,
            "dtype": result.dtype,
            "seconds": result.seconds,
            "tokens_per_second": result.tokens_per_second,
            "load_seconds": result.load_seconds,
            "outputs": result.outputs,
            "timings": result.timings,
            "ranks": result.ranks,
        }
        click.echo(msgspec.json.encode(report))
        return
    if live and first.text is not None:
        click.echo()
    else:
        for asked_for, output in zip(asked, result.outputs, strict=True):
            words = output.token_ids if output.text is None else output.text
            if not live:
                click.echo(f"--- {asked_for}")
            click.echo(words)
    generated = counted(sum(len(o.token_ids) for o in result.outputs), "token")
    click.echo(
        f"TP={result.tp} {plan.kind}, {result.dtype}: {generated}, "
        f"{result.tokens_per_second:.1f} tokens/s, loaded in {result.load_seconds:.1f} s",
        err=True,
    )
