"""Decoding with the geometry of Qwen3.5-35B-A3B, cut to four layers and a small vocabulary. Prints JSON.

Each format: one rank with all threads, and two ranks with half of them each, as processes that take turns with reading
256 MB of memory by as many threads. Active bytes are what a token reads: every stored byte of attention, gated delta
nets, shared experts, routers, norms and head, the chosen experts' part of the routed ones, and the states of the delta
nets, read and written. Tokens are drawn at random, so that experts change. The head is of 1,024 rows only: about a
hundredth of what is read.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from engines import write_random
from report import row

from oddrank.checkpoint import Checkpoint
from oddrank.planner import make_plan
from oddrank.runtime.generate import Session
from oddrank.runtime.pages import in_large_pages
from oddrank.runtime.request import Sampling
from oddrank.runtime.topology.limits import cores_available
from oddrank.synth import Release, describe_release
from oddrank.synth.sizes import Hybrid
from oddrank.transform.slice import RankSlice

LAYERS, VOCAB = 4, 1024
FORMATS = {"NVFP4": "nvfp4-mixed", "fp8 block": "fp8-block"}
TOKENS, ROUNDS, READ = 48, 5, 256 << 20
SHARE, TWO_RANKS = 0.5, 0.9
PROMPT = [3, 141, 59, 265, 35]


def active_bytes(release: Release, model: Path) -> int:
    """That a token reads and writes."""
    size = release.size
    assert isinstance(size, Hybrid)
    with Checkpoint.open(model) as checkpoint:
        part = RankSlice(make_plan(model, 1).plan, checkpoint, 0)
        stored = {
            name: checkpoint.tensors[name].end - checkpoint.tensors[name].start
            for name in part.names()
            if part.part_of(name) is None and "embed_tokens" not in name
        }
    routed = sum(n for name, n in stored.items() if ".mlp.experts." in name)
    nets = size.layers - size.layers // 4
    states = 2 * 4 * nets * size.gdn_v_heads * size.gdn_width**2  # fp32, read and written
    return sum(stored.values()) - routed + routed * size.chosen // size.experts + states


def rate(session: Session, seed: int) -> float:
    """Tokens per second."""
    sampling = Sampling(max_tokens=TOKENS, ignore_eos=True, temperature=1.0, seed=seed)
    return session.generate([PROMPT], sampling)[1].tokens_per_second


def reading(memory: torch.Tensor) -> float:
    """Bytes per second: the best of three."""
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        memory.sum()
        best = min(best, time.perf_counter() - start)
    return memory.nbytes / best


def measure(model: Path, threads: int) -> dict[str, list[float]]:
    memory = in_large_pages(torch.empty(READ // 4)).fill_(1)
    found: dict[str, list[float]] = {"one": [], "two": [], "reading": []}
    with Session(model, make_plan(model, 1).plan, dtype="bf16", threads=threads) as one:
        one.wait()
        with Session(model, make_plan(model, 2).plan, dtype="bf16", threads=max(1, threads // 2)) as two:
            for turn in range(ROUNDS + 1):
                round_ = {"one": rate(one, turn), "two": rate(two, turn), "reading": reading(memory)}
                if turn:  # the first warms up
                    for name, value in round_.items():
                        found[name].append(value)
    return found


def rows_of(form: str, active: int, found: dict[str, list[float]], threads: int) -> list[dict[str, Any]]:
    what = f"decode, 35B-A3B's layers, {form}"
    share = statistics.median(t * active / r for t, r in zip(found["one"], found["reading"], strict=True))
    ratio = statistics.median(b / a for a, b in zip(found["one"], found["two"], strict=True))
    one, most = statistics.median(found["one"]), statistics.median(found["reading"])
    return [
        row(f"{what}, {threads} threads: active bytes, {active / 1e6:.0f} MB a token", one * active / 1e9, "GB/s",
            share >= SHARE, f">= {SHARE:.0%} of reading", "reading memory", most / 1e9, share),
        row(f"{what}, {threads} threads", one, "tokens/s", None, None, "reading the active bytes", most / active,
            share),
        row(f"{what}: TP=2, {max(1, threads // 2)} thread a rank, against TP=1", ratio, "x", ratio >= TWO_RANKS,
            f">= {TWO_RANKS} x"),
    ]  # fmt: skip


def main(wanted: list[str]) -> int:
    load, threads = round(os.getloadavg()[0], 2), cores_available()
    torch.set_num_threads(threads)
    rows, reports = [], {}
    for form in wanted or FORMATS:
        release = describe_release("qwen3_5_moe", FORMATS[form], layers=LAYERS, experts=None, vocab=VOCAB)
        with tempfile.TemporaryDirectory(prefix="oddrank-bench-") as scratch:
            model = Path(scratch) / "model"
            write_random(release, model)
            active, found = active_bytes(release, model), measure(model, threads)
        rows += rows_of(form, active, found, threads)
        reports[form] = {"active_bytes": active, **found}
    print(json.dumps({"load": load, "threads": threads, "formats": reports, "rows": rows}, indent=2))
    return 0 if all(r["passed"] is not False for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
