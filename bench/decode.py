"""Decoding SmolLM2-135M in bf16: against transformers, what Python costs a token, and two ranks against one. Prints
JSON.

Our runtime and transformers' `generate` take turns in one process with the same threads, greedy, from the same prompt;
a rate is the tokens after the first over the time they took. Steps are replayed from their recording, and by turns
computed by the model's Python; "Python" is the time of the steps less that inside compiled operations in the very same
steps (choosing the token is in it). One rank with two threads and two ranks with one thread each take turns as
processes. The ceiling is the weights' bytes over what this machine reads per second.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from report import row

from oddrank.checkpoint import Checkpoint
from oddrank.demo.smollm2 import DEFAULT_OUT, ensure_model
from oddrank.native.calls import call
from oddrank.planner import make_plan
from oddrank.runtime.engine import Engine
from oddrank.runtime.generate import Session
from oddrank.runtime.parallel import SoloGroup
from oddrank.runtime.precision import Precision
from oddrank.runtime.request import Sampling
from oddrank.runtime.topology.limits import cores_available
from oddrank.runtime.worker import load_rank

PROMPT = [504, 3575, 282, 4649, 314]
TARGET_SPEEDUP = 2.5
TARGET_TWO_RANKS = 0.9


def bandwidth(nbytes: int) -> float:
    """Bytes per second at which this process reads `nbytes` of memory, with torch's threads: the best of five."""
    data = torch.ones(nbytes // 4)
    best = 0.0
    for _ in range(5):
        start = time.perf_counter()
        data.sum()
        best = max(best, nbytes / (time.perf_counter() - start))
    return best


def ours(engine: Engine, tokens: int) -> float:
    engine.generate([PROMPT], Sampling(max_tokens=tokens, ignore_eos=True))
    return engine.timings.tokens_per_second


def theirs(model: Any, tokens: int) -> float:
    """Of transformers' generate: the time of `tokens` less that of one."""
    ids = torch.tensor([PROMPT])
    mask = torch.ones_like(ids)
    seconds = []
    for count in (1, tokens):
        start = time.perf_counter()
        with torch.inference_mode():
            model.generate(ids, attention_mask=mask, max_new_tokens=count, min_new_tokens=count, do_sample=False)
        seconds.append(time.perf_counter() - start)
    return (tokens - 1) / (seconds[1] - seconds[0])


def replayed(engine: Engine, tokens: int) -> tuple[float, dict[str, float]]:
    """Milliseconds of a replayed step of one sequence, and of those what the operations of each name took."""
    tape = engine.steps.tape(1)
    assert tape is not None, "the model's steps are not recorded: ODDRANK_LOG=debug says why"
    tape.nanoseconds = np.zeros(len(tape), np.int64)
    total, found = step_ms(engine, tokens), dict.fromkeys(tape.names, 0.0)
    for name, nanoseconds in zip(tape.names, tape.nanoseconds, strict=True):
        found[name] += float(nanoseconds) / 1e6 / engine.timings.decode_steps
    assert engine.steps.tape(1) is tape
    tape.nanoseconds = None
    return total, found


def computed(engine: Engine, tokens: int) -> tuple[float, float]:
    """Milliseconds of a step of one sequence that is not recorded, and of those what compiled operations took."""
    users = [m for name, m in sys.modules.items() if name.startswith("oddrank.") and getattr(m, "call", None) is call]
    inside = [0]

    def timed(function: Any, arguments: Any, *kept: object) -> None:
        start = time.perf_counter_ns()
        function(ctypes.addressof(arguments))
        inside[0] += time.perf_counter_ns() - start

    for module in users:
        module.call = timed  # type: ignore[attr-defined]
    try:
        engine.generate([PROMPT], Sampling(max_tokens=1, ignore_eos=True))
        prefill, inside[0] = inside[0], 0
        total = step_ms(engine, tokens)
    finally:
        for module in users:
            module.call = call  # type: ignore[attr-defined]
    return total, (inside[0] - prefill) / 1e6 / engine.timings.decode_steps


def step_ms(engine: Engine, tokens: int) -> float:
    """Of a decode step of one sequence."""
    engine.generate([PROMPT], Sampling(max_tokens=tokens, ignore_eos=True))
    return engine.timings.decode_seconds / engine.timings.decode_steps * 1e3


def against_transformers(model: Path, threads: int, tokens: int, rounds: int) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    torch.set_num_threads(threads)
    with Checkpoint.open(model) as checkpoint:
        made, loaded = load_rank(make_plan(model, 1).plan, checkpoint, SoloGroup(), Precision.of("bf16"))
    engine, plain = Engine(made), Engine(made, record=False)
    hf = AutoModelForCausalLM.from_pretrained(model, dtype=torch.bfloat16).eval()
    hf.generation_config.eos_token_id = None
    gc.collect()
    gc.freeze()
    mine, other, steps, operations = [], [], [], []
    ours(engine, 8), ours(plain, 8), theirs(hf, 8)
    for _ in range(rounds):
        mine.append(ours(engine, tokens))
        other.append(theirs(hf, tokens))
        total, inside = replayed(engine, tokens)
        operations.append(inside)
        steps.append((total - sum(inside.values()), *computed(plain, tokens)))
    return {
        "threads": threads,
        "oddrank_tokens_per_s": mine,
        "transformers_tokens_per_s": other,
        "python_ms": [first for first, _, _ in steps],
        "python_not_recorded_ms": [total - compiled for _, total, compiled in steps],
        "operations_ms": operations,
        "calls": len(engine.steps.tape(1) or ()),
        "weight_bytes": loaded.stored_bytes,
        "prepare_s": engine.prepare_seconds,
        "read_bytes_per_s": bandwidth(loaded.stored_bytes),
    }


def two_ranks(model: Path, tokens: int, rounds: int) -> dict[str, list[float]]:
    """Tokens per second of one rank with two threads, and of two ranks with one each, by turns."""
    sampling = Sampling(max_tokens=tokens, ignore_eos=True)
    rates: dict[str, list[float]] = {"one_rank": [], "two_ranks": []}
    with (
        Session(model, make_plan(model, 1).plan, dtype="bf16", threads=2) as one,
        Session(model, make_plan(model, 2).plan, dtype="bf16", threads=1) as two,
    ):
        for session in (one, two):
            session.generate([PROMPT], Sampling(max_tokens=8, ignore_eos=True))
        for _ in range(rounds):
            for name, session in (("one_rank", one), ("two_ranks", two)):
                rates[name].append(session.generate([PROMPT], sampling)[1].tokens_per_second)
    return rates


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, help="default: the demo's model, made if it is missing")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    average = round(os.getloadavg()[0], 2)
    model = options.model
    if model is None:
        model = Path(__file__).resolve().parents[1] / DEFAULT_OUT
        ensure_model(model)

    threads = min(2, cores_available())
    pairs = two_ranks(model, options.tokens, options.rounds) if cores_available() >= 2 else None
    single = against_transformers(model, threads, options.tokens, options.rounds)
    rate = statistics.median(single["oddrank_tokens_per_s"])
    speedup = statistics.median(
        a / b for a, b in zip(single["oddrank_tokens_per_s"], single["transformers_tokens_per_s"], strict=True)
    )
    compiled = statistics.median(sum(each.values()) for each in single["operations_ms"])
    least = single["weight_bytes"] / single["read_bytes_per_s"]
    rows = [
        row(f"decode at TP=1, bf16, {threads} threads", rate, "tokens/s", None, None, "reading the weights",
            1 / least),
        row("decode at TP=1 against transformers' generate", speedup, "x", speedup >= TARGET_SPEEDUP,
            f">= {TARGET_SPEEDUP} x"),
        row("decode: inside the compiled operations", compiled, "ms/token", None, None, "reading the weights",
            least * 1e3, least * 1e3 / compiled),
        row("decode: Python, steps replayed", statistics.median(single["python_ms"]), "ms/token", None),
        row("decode: Python, steps not recorded", statistics.median(single["python_not_recorded_ms"]), "ms/token",
            None),
    ]  # fmt: skip
    for name in single["operations_ms"][0]:
        taken = statistics.median(each[name] for each in single["operations_ms"])
        rows.append(row(f"decode: of that in {name.replace('_', ' ')}", taken, "ms/token", None))
    if pairs is not None:
        ratio = statistics.median(b / a for a, b in zip(pairs["one_rank"], pairs["two_ranks"], strict=True))
        rows.append(
            row("decode at TP=2, one thread a rank, against TP=1, two threads", ratio, "x", ratio >= TARGET_TWO_RANKS,
                f">= {TARGET_TWO_RANKS} x")
        )  # fmt: skip
    report = {"load": average, "single": single, "pairs": pairs, "rows": rows}
    print(json.dumps(report, indent=2))
    return 0 if all(r["passed"] is not False for r in rows) else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
