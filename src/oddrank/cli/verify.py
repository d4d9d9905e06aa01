"""`oddrank verify`: logits at TP=N against transformers on the original."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click
import msgspec

from oddrank.cli.options import RANK_MEMORY, Sizes, expert_options, plan_for
from oddrank.errors import CheckFailedError, OddrankError
from oddrank.layout.solver import DEFAULT_CONTEXT
from oddrank.runtime.expert_options import ExpertOptions
from oddrank.words import counted

if TYPE_CHECKING:
    from oddrank.verify.verify import Verdict


@click.command("verify", short_help="Compare logits with transformers on the original")
@click.argument("model", type=click.Path())
@click.option("--tp", "sizes", type=Sizes(), required=True, help="Ranks.")
@click.option(
    "--dtype",
    type=click.Choice(("fp32", "fp64", "bf16", "fp16")),
    default="fp32",
    show_default=True,
    help="Compute all sides in this.",
)
@click.option("--prompt", "prompts", multiple=True, help="Texts to compare on; by default three fixed ones.")
@click.option(
    "--only", type=click.Choice(("runtime", "padded")), help="Verify only the runtime, or only the padded checkpoint."
)
@click.option("--layout", type=click.Choice(("auto", "ragged", "pad", "replicate")), default="auto", show_default=True)
@click.option("--constraint", "constraints", multiple=True, metavar="K=V", help="As for `oddrank plan`.")
@RANK_MEMORY
@expert_options
@click.option("--run-tp", type=Sizes(), help="Run the plans for --tp ranks on this many instead.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(
    model: str,
    sizes: list[int],
    dtype: str,
    prompts: tuple[str, ...],
    only: str | None,
    layout: str,
    constraints: tuple[str, ...],
    rank_memory: list[float] | None,
    experts: str | None,
    expert_cache: str | None,
    expert_load: str | None,
    run_tp: list[int] | None,
    as_json: bool,
) -> None:
    """Compare MODEL at N ranks with transformers on the original checkpoint.

    Two things are compared, position by position over all logits: oddrank's runtime with one process per rank, and
    the padded checkpoint in plain transformers. Exit code 1 beyond tolerance.
    """
    from oddrank.checkpoint import Checkpoint
    from oddrank.planner import not_served, study

    ragged = layout == "ragged" or len(set(rank_memory or ())) > 1
    if ragged and only == "padded":
        asked = "a ragged layout" if layout == "ragged" else "--rank-memory"
        raise OddrankError(f"{asked} has no padded checkpoint; choose --layout pad, replicate or auto.")
    chosen = ExpertOptions.parse(experts, expert_cache, expert_load)
    checkpoint = Checkpoint.open(model)
    vocab = study(checkpoint).model.axis("vocab").count
    plans = {}
    for what, executor in (("runtime", "runtime"), ("padded", "vllm")):
        if only in (None, what) and not (ragged and what == "padded"):
            plans[what] = plan_for(
                checkpoint,
                sizes[0],
                executor=executor,
                layout=layout,
                context=DEFAULT_CONTEXT,
                constraints=constraints,
                run_tp=run_tp,
                rank_memory=rank_memory,
            )
    if chosen != ExpertOptions() and "runtime" not in plans:
        raise OddrankError("--experts and its like are the runtime's, which --only padded leaves out.")
    if "runtime" in plans:
        chosen.check(plans["runtime"].model)
        why = not_served(plans["runtime"])
        if why is not None:
            raise OddrankError(f"{plans['runtime'].name}: {why} `--only padded` verifies the padded checkpoint.")
    model = str(checkpoint.fetched().path)
    try:
        from oddrank.verify.oracle import default_prompts, transformers_logits
        from oddrank.verify.verify import verify_padded, verify_runtime

        if prompts:
            from pathlib import Path

            from oddrank.runtime.generate import encode, load_tokenizer

            tokenizer = load_tokenizer(Path(model))
            ids = [encode(tokenizer, p) for p in prompts]
        else:
            ids = default_prompts(model, vocab)
        reference = transformers_logits(model, ids, dtype)
    except ModuleNotFoundError as error:
        raise OddrankError(
            f"oddrank verify needs {error.name}, which is not installed: pip install 'oddrank[runtime,verify]'."
        ) from None
    verdicts: list[Verdict] = []
    if "runtime" in plans:
        verdicts.append(verify_runtime(model, plans["runtime"], ids, reference, dtype, chosen))
    if "padded" in plans:
        verdicts.append(verify_padded(model, plans["padded"], ids, reference, dtype))
    ok = all(v.ok for v in verdicts)
    if as_json:
        click.echo(msgspec.json.encode({"ok": ok, "dtype": dtype, "tp": sizes[0], "verdicts": verdicts}))
    else:
        for v in verdicts:
            click.echo(_line(v))
        if ok:
            click.echo(f"verified: {len(verdicts)} ways of running it at TP={sizes[0]} give transformers' logits")
    if not ok:
        worst = max(verdicts, key=lambda v: v.comparison.max_rel / v.tolerance)
        raise CheckFailedError(
            f"{worst.what} at TP={worst.tp} differs from transformers by {worst.comparison.max_rel:.2e} of the largest "
            f"logit; {dtype} allows {worst.tolerance:.0e}."
        )


def _line(v: Verdict) -> str:
    c = v.comparison
    text = (
        f"{'same' if v.ok else 'DIFFERENT':<9} {v.what} TP={v.tp} ({v.layout}): max |difference| {c.max_abs:.2e}, "
        f"relative {c.max_rel:.2e} (allowed {v.tolerance:.0e}), KL {c.kl_max:.1e}, greedy agreement "
        f"{c.greedy_agreement:.1%} of {counted(c.positions, 'position')}"
    )
    if c.first_divergence is not None:
        d = c.first_divergence
        text += (
            f"; first divergence in prompt {d.prompt} at position {d.position}: {d.reference_token} against "
            f"{d.other_token}, margin {d.margin:.2e}"
        )
    return text
