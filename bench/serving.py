"""Serving over HTTP: SmolLM2-135M by oddrank and by vLLM, known prompts, memory, what is not the model. Prints JSON.

Requests are streamed completions of token ids, greedy, of exactly the lengths that are asked for; a light client in
this process sends them. Servers that are compared are all up, and while one has its turn the others are stopped
(SIGSTOP).

throughput  Generated tokens per second with 1, 8 and 32 requests at a time: prompts of 64 tokens, answers of 32 to
            96, the same for all. oddrank with one rank of two threads and with two of one thread; vLLM's OpenAI
            server, bf16, on the same cores, in its eager and its compiled mode (which compiles for a minute or more
            when it is first started; .cache/vllm keeps that). A ratio is the median of the rounds'.
first       Seconds to the first token of a prompt of 1,000 tokens when it comes again, against when it came first:
            SmolLM2, and a hybrid model of random weights.
memory      RssAnon of the server and its ranks together after 2,000 requests against after 200, with as little KV
            cache as is full by then. Of the requests some are sampled, some want logprobs, two answers, or to stop at
            a string, and some answers are not waited for.
cost        With 32 requests at a time: what of a rank's step is not in the model (the time from the end of a step to
            the end of the next one less that in which logits are computed), and the processor time of the HTTP
            process for the tokens of a step. Their sum is held against the step, although the HTTP process works
            beside the ranks and not instead of them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from endpoint import Endpoint, oddrank, processor_seconds
from report import row

from oddrank.demo.smollm2 import DEFAULT_OUT, ensure_model
from oddrank.runtime.topology.limits import cores_available
from oddrank.synth import describe_release

HERE = Path(__file__).resolve().parent
AT_ONCE = {1: 2, 8: 16, 32: 64}
"""Requests at a time: requests of a round."""
PROMPT, ANSWERS, WARM = 64, (32, 96), (8, 24)
LONG = 1000
REQUESTS, EARLY, SHORT = 2000, 200, (8, 24)
KV_GIB, PAGE_BYTES = "0.15", 16 * 30 * 2 * 3 * 64 * 4
TWO_RANKS, FIRST, FLAT, COST = 0.85, 0.1, 0.02, 0.15

Rows = list[dict[str, Any]]


class Vllm(Endpoint):
    """vLLM's OpenAI server with its usual options, on as many cores as the others have threads."""

    def __init__(self, python: Path, model: Path, log: Path, threads: int, eager: bool) -> None:
        cores = ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:threads])
        environment = {
            "VLLM_CPU_OMP_THREADS_BIND": cores,
            "VLLM_CACHE_ROOT": str(HERE.parent / ".cache" / "vllm"),
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "PYTHONPATH": str(HERE.parent / "tests" / "vllm" / "compat"),
            "ODDRANK": "0",
        }
        # `vllm serve` starts this module; the command itself does not run where the distribution is called vllm-cpu
        command = [
            str(python), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model), "--dtype", "bfloat16",
            "--tensor-parallel-size", "1", "--max-model-len", "2048", "--kv-cache-memory-bytes", str(2 << 30),
            *(["--enforce-eager"] if eager else []),
        ]  # fmt: skip
        super().__init__(f"vLLM, {'eager' if eager else 'compiled'}", command, log, environment)


def vllm_python() -> tuple[Path | None, str]:
    """Of the environment where vLLM is, and its version; None and why it is left out."""
    python = Path(os.environ.get("VLLM_PYTHON") or HERE.parent / ".venv-vllm" / "bin" / "python").absolute()
    if not python.exists():
        return None, f"vLLM is not installed ({python} is not there): make install-vllm"
    code = (
        "from importlib.metadata import distributions as d\n"
        "print(*{f'{x.name} {x.version}' for x in d() if x.name in ('vllm', 'vllm-cpu')})"
    )
    done = subprocess.run([python, "-c", code], capture_output=True, text=True)
    found = done.stdout.strip()
    return (python, found) if found else (None, f"{python} has no vLLM: make install-vllm")


def by_turns(servers: Sequence[Endpoint], work: Callable[[Endpoint], float]) -> list[float]:
    """What work gives for each server, the others stopped meanwhile."""
    found = []
    for server in servers:
        server.resume()
        found.append(work(server))
        server.stop()
    return found


def throughput(model: Path, logs: Path, rounds: int, report: dict[str, Any]) -> Rows:
    threads, draw = min(2, cores_available()), random.Random(1)
    python, version = vllm_python()
    report["skipped"] = [] if python is not None else [version]
    with ExitStack() as stack:
        servers: list[Endpoint] = []

        def start(make: Callable[[], Endpoint]) -> None:
            servers.append(stack.enter_context(make()))
            servers[-1].stop()

        start(lambda: oddrank(model, logs / "tp1.log", 1, threads))
        if threads > 1:
            start(lambda: oddrank(model, logs / "tp2.log", 2, 1))
        for eager in (True, False) if python is not None else ():
            try:
                start(lambda e=eager: Vllm(python, model, logs / f"vllm-{e}.log", threads, e))  # type: ignore[misc]
            except SystemExit as error:
                report["skipped"].append(str(error))
        report["starts_s"] = {server.name: round(server.start_seconds, 1) for server in servers}
        names = [server.name for server in servers]
        rates: dict[int, dict[str, list[float]]] = {}
        for at_once, requests in AT_ONCE.items():
            rates[at_once] = {name: [] for name in names}
            for turn in range(rounds + 1):  # the first warms up
                prompts = [_prompt(draw, PROMPT) for _ in range(requests)]
                lengths = [draw.randint(*(ANSWERS if turn else WARM)) for _ in range(requests)]
                told = by_turns(servers, lambda s: _rate(s, prompts, lengths, at_once))  # noqa: B023
                for name, rate in zip(names, told, strict=True):
                    rates[at_once][name] += [rate] if turn else []
    report["tokens_per_s"] = rates
    rows, one = [], names[0]
    for at_once, found in rates.items():
        what = f"serving, {_many(at_once)}"
        best = max((statistics.median(found[name]) for name in names if name.startswith("vLLM")), default=None)
        rows.append(row(f"{what}, TP=1, {threads} threads", statistics.median(found[one]), "tokens/s", None, None,
                        version if best else None, best))  # fmt: skip
        for name in names[1:]:
            if name.startswith("vLLM"):
                gain = _ratio(found[one], found[name])
                mode = name.removeprefix("vLLM, ")
                rows.append(row(f"{what}: against {version}, {mode}", gain, "x", gain >= 1, ">= 1.0 x"))
            else:
                share = _ratio(found[name], found[one])
                against = f"{what}: TP=2, one thread a rank, against TP=1, {threads} threads"
                rows.append(row(against, share, "x", share >= TWO_RANKS, f">= {TWO_RANKS} x"))
    return rows


def first(model: Path, logs: Path, rounds: int, report: dict[str, Any]) -> Rows:
    rows, draw, threads = [], random.Random(2), min(2, cores_available())
    hybrid = logs / "qwen3_5"
    _write_hybrid(hybrid, model)
    for name, path in (("SmolLM2-135M", model), ("qwen3_5, 8 layers of the 0.8B's", hybrid)):
        with oddrank(path, logs / "first.log", 1, threads) as server:
            asyncio.run(server.crowd([_prompt(draw, LONG)], [2], 1))
            pairs = []
            for _ in range(rounds):
                prompt = _prompt(draw, LONG)
                fresh, known = (asyncio.run(server.complete(prompt, 2)) for _ in range(2))
                if fresh.cached or known.cached < LONG - 32:
                    raise SystemExit(f"of {LONG} tokens {fresh.cached} were known at first and {known.cached} then")
                pairs.append((fresh.first, known.first))
        report[f"first_s, {name}"] = pairs
        what = f"first token of a known prompt of {LONG} tokens, {name}"
        ratio = statistics.median(known / fresh for fresh, known in pairs)
        rows += [
            row(f"{what}, against a new one", ratio, "x", ratio <= FIRST, f"<= {FIRST} x"),
            row(what, statistics.median(known for _, known in pairs) * 1e3, "ms", None),
        ]
    return rows


def memory(model: Path, logs: Path, _rounds: int, report: dict[str, Any]) -> Rows:
    draw, threads = random.Random(3), min(2, cores_available())
    kinds: list[dict[str, Any]] = [
        {}, {"temperature": 0.8, "top_p": 0.9}, {"logprobs": 3}, {"stop": ["zyx"]}, {"leave": True}, {"n": 2},
    ]  # fmt: skip

    async def some(server: Endpoint, count: int) -> None:
        left = list(range(count))

        async def one() -> None:
            while left:
                kind = kinds[left.pop() % len(kinds)]
                await server.complete(_prompt(draw, draw.randint(*SHORT)), draw.randint(2, 8), **kind)

        await asyncio.gather(*(one() for _ in range(32)))

    with oddrank(model, logs / "memory.log", 1, threads, "--kv-memory", KV_GIB) as server:
        held = []
        for count in (EARLY, *[EARLY] * (REQUESTS // EARLY - 1)):
            asyncio.run(some(server, count))
            time.sleep(0.5)  # answers that nobody waited for are cancelled
            held.append(server.anonymous())
        full = server.metric("oddrank_kv_cache_remembered_pages") * PAGE_BYTES
    report["anonymous_bytes"] = {EARLY * (i + 1): n for i, n in enumerate(held)}
    report["kv_cache_bytes_remembered"] = full
    growth = held[-1] / held[0] - 1
    return [
        row(f"serving: memory after {REQUESTS} requests, against after {EARLY}: more by", growth * 100, "%",
            growth <= FLAT, f"<= {FLAT:.0%}"),
        row(f"serving: anonymous memory of server and rank after {REQUESTS} requests", held[-1] / 1e6, "MB", None),
    ]  # fmt: skip


def cost(model: Path, logs: Path, rounds: int, report: dict[str, Any]) -> Rows:
    draw, threads, rows = random.Random(4), min(2, cores_available()), []
    names = ("oddrank_step_seconds_count", "oddrank_step_seconds_sum", "oddrank_model_seconds_total")
    kinds: dict[str, dict[str, Any]] = {"greedy": {}, "top_p 0.9": {"temperature": 0.8, "top_p": 0.9}}
    with oddrank(model, logs / "cost.log", 1, threads) as server:
        for kind, more in kinds.items():
            parts = []
            for turn in range(rounds + 1):  # the first warms up
                prompts = [_prompt(draw, PROMPT) for _ in range(32)]
                before, used = [server.metric(n) for n in names], processor_seconds(server.process.pid)
                asyncio.run(server.crowd(prompts, [PROMPT] * 32, 32, **more))
                used = processor_seconds(server.process.pid) - used
                steps, seconds, inside = (server.metric(n) - b for n, b in zip(names, before, strict=True))
                if turn:
                    parts.append((seconds / steps, (seconds - inside) / steps, used / (32 * PROMPT)))
            step, outside, http = (statistics.median(p) for p in zip(*parts, strict=True))
            share = statistics.median((o + 32 * h) / s for s, o, h in parts)
            report[f"cost, {kind}"] = parts
            what = f"serving, 32 requests, {kind}"
            rows += [
                row(f"{what}: a step", step * 1e3, "ms", None),
                row(f"{what}: of it the rank outside of the model", outside * 1e3, "ms", None),
                row(f"{what}: the HTTP process's processor time, a token", http * 1e6, "us", None),
                row(f"{what}: both, of a step", share * 100, "%", share <= COST, f"<= {COST:.0%}"),
            ]
    return rows


PARTS: dict[str, Callable[[Path, Path, int, dict[str, Any]], Rows]] = {
    "throughput": throughput, "first": first, "memory": memory, "cost": cost,
}  # fmt: skip


def _many(at_once: int) -> str:
    return f"{at_once} request{'s' if at_once > 1 else ''} at a time"


def _prompt(draw: random.Random, length: int) -> list[int]:
    return [draw.randrange(1000, 40000) for _ in range(length)]


def _rate(server: Endpoint, prompts: Sequence[Sequence[int]], lengths: Sequence[int], at_once: int) -> float:
    start = time.perf_counter()
    asyncio.run(server.crowd(prompts, lengths, at_once))
    return sum(lengths) / (time.perf_counter() - start)


def _ratio(of: Sequence[float], to: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(of, to, strict=True))


def _write_hybrid(path: Path, tokenizer: Path) -> None:
    """Eight layers of the 0.8B's geometry, six of them gated delta nets, random weights and SmolLM2's tokenizer."""
    from engines import write_random

    write_random(describe_release("qwen3_5", "bf16", size="0.8B", layers=8, vocab=49152), path)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(tokenizer / name, path / name)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=PARTS, help="this part; repeatable")
    parser.add_argument("--rounds", type=int, default=3, help="of each that takes turns; default: 3")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # the servers end, too
    report: dict[str, Any] = {"load": round(os.getloadavg()[0], 2)}
    model = HERE.parent / DEFAULT_OUT
    ensure_model(model)
    rows: Rows = []
    seconds = report["seconds"] = {}
    with tempfile.TemporaryDirectory(prefix="oddrank-bench-") as folder:
        for name in options.only or PARTS:
            start = time.perf_counter()
            rows += PARTS[name](model, Path(folder), options.rounds, report)
            seconds[name] = round(time.perf_counter() - start, 1)
    report["rows"] = rows
    print("\n".join(report.get("skipped", ())), file=sys.stderr)
    print(json.dumps(report, indent=2))
    return 0 if all(r["passed"] is not False for r in rows) else 1


if __name__ == "__main__":
    sys.path.insert(0, str(HERE))
    sys.exit(main())
