"""What the plugin costs vLLM: starting, streaming, memory. Prints JSON. Runs vLLM's own Python for each figure.

start: an engine at TP=2 for a model that needs no padding, with the plugin on and off by turns, from process start
until it is ready. stream: vLLM's iterator over a checkpoint that TP=3 pads, through the plan's stream; the floor is the
stock iterator and a copy of every tensor that changes into one of its new shape. memory: peak RssAnon of either.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
STARTS, STREAMS = 5, 15
START_RATIO, STREAM_RATIO = 1.03, 1.05
ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "PYTHONPATH": str(HERE.parent / "tests" / "vllm" / "compat"),
}


def ready(python: Path, model: Path, on: bool) -> float:
    """Seconds from process start until an engine of two ranks is ready."""
    code = (
        "import sys, time\n"
        "if __name__ == '__main__':\n"
        "    from vllm import LLM\n"
        "    LLM(model=sys.argv[1], tensor_parallel_size=2, dtype='float32', enforce_eager=True, max_model_len=256,\n"
        "        kv_cache_memory_bytes=100_000_000, skip_tokenizer_init=True)\n"
        "    print('ready', time.time(), flush=True)\n"
    )
    start = time.time()
    done = subprocess.run(
        [python, "-c", code, model], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
        env={**os.environ, **ENVIRONMENT, "ODDRANK": str(int(on))},
    )  # fmt: skip
    at = next((float(line.split()[1]) for line in done.stdout.splitlines() if line.startswith("ready")), None)
    if at is None:
        raise SystemExit(f"vLLM did not start: it ended with {done.returncode}")
    return at - start


def child(model: Path, what: str) -> dict[str, Any]:
    """In vLLM's Python: the streams by turns (what = "times"), or one kind of them for its peak memory."""
    import numpy as np
    from machine import AnonymousPeak
    from streams import copied, seconds
    from vllm.model_executor.model_loader.weight_utils import safetensors_weights_iterator

    from oddrank import Checkpoint, make_plan, stream
    from oddrank.transform.recipe import recipes

    plan = make_plan(model, 3, executor="vllm").plan
    made = recipes(plan, plan.virtual())
    files = [str(model / f) for f in Checkpoint.open(model).files]

    def stock() -> Any:
        return safetensors_weights_iterator(files, False)

    if what == "times":
        seconds(copied(stock(), made)), seconds(stream(plan, stock()))
        return {"pairs": [(seconds(stream(plan, stock())), seconds(copied(stock(), made))) for _ in range(STREAMS)]}
    with AnonymousPeak(os.getpid()) as memory:
        before = memory.peak
        seconds(stock() if what == "stock" else stream(plan, stock()))
    largest = max(np.prod(r.shape, dtype=int) * {"BF16": 2}.get(r.dtype, 1) for r in made.values())
    return {"peak": memory.peak - before, "largest": int(largest)}


def ask(python: Path, model: Path, what: str) -> dict[str, Any]:
    done = subprocess.run([python, __file__, "--child", model, what], stdout=subprocess.PIPE, text=True,
                          env={**os.environ, **ENVIRONMENT}, check=True)  # fmt: skip
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> int:
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(Path(sys.argv[2]), sys.argv[3])))
        return 0
    from report import row

    from oddrank.synth import describe_release, write_checkpoint

    load = round(os.getloadavg()[0], 2)
    python = Path(os.environ.get("VLLM_PYTHON") or HERE.parent / ".venv-vllm" / "bin" / "python").absolute()
    if not python.exists():
        raise SystemExit(f"{python} is not there: make install-vllm")
    with tempfile.TemporaryDirectory(prefix="oddrank-bench-") as folder:
        scratch = Path(folder)
        even = describe_release("qwen3", "bf16", layers=2, experts=None, vocab=1024, size="tiny")
        write_checkpoint(even, scratch / "even")
        odd = describe_release("qwen3_5_moe", "nvfp4-mixed", layers=8, experts=48, vocab=32768)
        write_checkpoint(odd, scratch / "odd")
        times = ask(python, scratch / "odd", "times")["pairs"]
        stock, ours = ask(python, scratch / "odd", "stock"), ask(python, scratch / "odd", "stream")
        starts = [tuple(ready(python, scratch / "even", on) for on in (True, False)) for _ in range(STARTS)]
    mine, bare = (statistics.quantiles(t, n=4)[0] for t in zip(*times, strict=True))
    start = statistics.median(a for a, _ in starts) / statistics.median(b for _, b in starts)
    more, allowed = (ours["peak"] - stock["peak"]) / 1e6, ours["largest"] / 1e6
    rows = [
        row("vLLM: start at TP=2 with the plugin on, nothing to pad, against off", start, "x", start <= START_RATIO,
            f"<= {START_RATIO} x", "off", 1.0, 1 / start),
        row("vLLM: seconds of such a start, off", statistics.median(b for _, b in starts), "s", None),
        row("vLLM: weights streamed for TP=3, against its iterator and copying", mine / bare, "x",
            mine / bare <= STREAM_RATIO, f"<= {STREAM_RATIO} x", "iterating and copying", 1.0, bare / mine),
        row("vLLM: memory beyond the stock iterator's", more, "MB", more <= allowed, f"<= {allowed:.0f} MB (a tensor)"),
    ]  # fmt: skip
    print(json.dumps({"load": load, "rows": rows}, indent=2))
    return 0 if all(r["passed"] is not False for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
