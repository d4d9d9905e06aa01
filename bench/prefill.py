"""Prompts of 512 tokens on the CPU: against transformers in bf16, quantized against our own bf16. Prints JSON.

All engines are in this process and take turns, with the same threads. SmolLM2 is the demo's; the others are random
checkpoints of published widths, of four layers. The ceiling is the multiplications with weights over how many a second
torch's fp32 product of two matrices (2048 x 2048 by 2048 x 512) does in the same round.
"""

from __future__ import annotations

import gc
import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from engines import engine, products
from report import row

from oddrank.demo.smollm2 import DEFAULT_OUT, ensure_model
from oddrank.runtime.engine import Engine
from oddrank.runtime.request import Sampling
from oddrank.runtime.topology.limits import cores_available
from oddrank.synth import describe_release, write_checkpoint

TOKENS, ROUNDS = 512, 3
AGAINST_TRANSFORMERS, AGAINST_BF16 = 1.0, 0.7
RELEASES = {
    "qwen3 0.6B's layers": ("qwen3", "0.6B", {"bf16": "bf16"}),
    "qwen3_5 2B's layers": (
        "qwen3_5", "2B", {"bf16": "bf16", "fp8 block": "fp8-block", "NVFP4": "nvfp4-mixed", "MXFP4": "mxfp4"},
    ),
}  # fmt: skip


def ours(made: Engine, prompt: list[int]) -> float:
    made.generate([prompt], Sampling(max_tokens=1, ignore_eos=True))
    return made.timings.prefill_seconds


def theirs(model: Any, prompt: list[int]) -> float:
    """Of transformers: the prompt, the cache, the last token's logits."""
    ids = torch.tensor([prompt])
    start = time.perf_counter()
    with torch.inference_mode():
        model(ids, use_cache=True, logits_to_keep=1)
    return time.perf_counter() - start


def multiplications() -> float:
    """A second, of torch's fp32 product."""
    a, b = torch.ones(2048, 2048), torch.ones(2048, TOKENS)
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        torch.mm(a, b)
        best = min(best, time.perf_counter() - start)
    return 2048 * 2048 * TOKENS / best


def transformers_model(path: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.bfloat16).eval()


def measure(name: str, paths: dict[str, Path], threads: int) -> tuple[list[dict[str, Any]], dict[str, list[float]]]:
    """paths: the model in each format, "bf16" among them."""
    engines = {form: engine(path) for form, path in paths.items()}
    reference = transformers_model(paths["bf16"])
    vocab = next(iter(engines.values())).model.config.vocab
    prompt = [(7 * i * i + 3) % vocab for i in range(TOKENS)]
    gc.collect()
    seconds: dict[str, list[float]] = {form: [] for form in (*engines, "transformers", "roof")}
    each = products(paths["bf16"]) * TOKENS
    for turn in range(ROUNDS + 1):
        found = {form: ours(made, prompt) for form, made in engines.items()}
        if turn:  # the first warms up
            found |= {"transformers": theirs(reference, prompt), "roof": each / multiplications()}
            for form, value in found.items():
                seconds[form].append(value)
        else:
            theirs(reference, prompt[:8])

    def ratio(of: str, to: str) -> float:
        """How many times as fast `of` is as `to`."""
        return statistics.median(b / a for a, b in zip(seconds[of], seconds[to], strict=True))

    rows = []
    for form in engines:
        what = f"prefill of {TOKENS} tokens, {name}, {form}, {threads} threads"
        share = ratio(form, "roof")
        rows.append(
            row(what, TOKENS / min(seconds[form]), "tokens/s", None, None, "torch's fp32 product, as often",
                TOKENS / min(seconds["roof"]), share)
        )  # fmt: skip
        if form == "bf16":
            gain = ratio("bf16", "transformers")
            met = gain >= AGAINST_TRANSFORMERS
            rows.append(row(f"{what}, against transformers", gain, "x", met, f">= {AGAINST_TRANSFORMERS} x"))
        else:
            gain = ratio(form, "bf16")
            rows.append(row(f"{what}, against bf16", gain, "x", gain >= AGAINST_BF16, f">= {AGAINST_BF16} x"))
    return rows, seconds


def main() -> int:
    load, threads = round(os.getloadavg()[0], 2), cores_available()
    torch.set_num_threads(threads)
    smol = Path(__file__).resolve().parents[1] / DEFAULT_OUT
    ensure_model(smol)
    rows, seconds = measure("SmolLM2-135M", {"bf16": smol}, threads)
    reports = {"SmolLM2-135M": seconds}
    for name, (family, size, formats) in RELEASES.items():
        with tempfile.TemporaryDirectory(prefix="oddrank-bench-") as scratch:
            paths = {form: Path(scratch) / form.replace(" ", "-") for form in formats}
            for form, path in paths.items():
                write_checkpoint(describe_release(family, formats[form], size=size, layers=4, vocab=8192), path)
            more, reports[name] = measure(name, paths, threads)
        rows += more
    print(json.dumps({"load": load, "threads": threads, "seconds": reports, "rows": rows}, indent=2))
    return 0 if all(r["passed"] is not False for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
