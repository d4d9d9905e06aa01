"""Planning, padding and streaming quantized checkpoints. Prints JSON.

plan: the 35B-A3B's NVFP4 release, 124,468 tensors, as headers and holes, from process start to end. pad and stream: a
checkpoint of the same geometry with fewer layers and experts and real quantized values. A stream's floor is iterating
the same files with the safetensors library and copying every tensor that changes into one of its new shape, by numpy.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import AnonymousPeak, sync_files
from report import row
from safetensors import safe_open
from streams import copied, seconds

from oddrank import Checkpoint, make_plan, stream
from oddrank.synth import describe_release, write_checkpoint, write_headers
from oddrank.transform.recipe import recipes

RUNS = 5
STREAM_RUNS = 31
PLAN_S, PLAN_MB = 1.5, 400.0
PAD_RATIO, PAD_MB = 0.8, 300.0
STREAM_RATIO = 1.05


def timed(command: list[str]) -> tuple[float, float, str]:
    """(wall seconds, peak anonymous megabytes, standard output)."""
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process, AnonymousPeak(process.pid) as memory:
        said = process.communicate()[0]
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}")
    return time.perf_counter() - start, memory.peak / 1e6, said


def plan_rows(scratch: Path) -> list[dict[str, Any]]:
    release = describe_release("qwen3_5_moe", "nvfp4-mixed", layers=None, experts=None, vocab=None, vision=True)
    write_headers(release, scratch / "headers")
    command = [sys.executable, "-m", "oddrank", "plan", str(scratch / "headers"), "--tp", "3", "--json"]
    runs = [timed([*command, "--executor", "vllm"]) for _ in range(RUNS + 1)][1:]
    count = json.loads(runs[0][2])["tensors"]["total"]
    seconds, memory = statistics.median(r[0] for r in runs), max(r[1] for r in runs)
    return [
        row(f"plan of {count} tensors, cold start", seconds, "s", seconds < PLAN_S, f"< {PLAN_S} s"),
        row("plan: peak anonymous memory of it", memory, "MB", memory <= PLAN_MB, f"<= {PLAN_MB:.0f} MB"),
    ]


def pad_rows(scratch: Path, model: Path) -> list[dict[str, Any]]:
    command = [sys.executable, "-m", "oddrank", "pad", str(model), str(scratch / "out"), "--tp", "3", "--json"]
    ratios, peaks = [], []
    for run in range(RUNS + 1):
        os.sync()
        seconds, peak, _ = timed(command)
        start = time.perf_counter()
        subprocess.run(["cp", "-r", "--reflink=never", str(scratch / "out"), str(scratch / "copy")], check=True)
        sync_files([*(scratch / "copy").rglob("*"), scratch / "copy"])
        copied = time.perf_counter() - start
        shutil.rmtree(scratch / "out")
        shutil.rmtree(scratch / "copy")
        if run:
            ratios.append(copied / seconds)
            peaks.append(peak)
    ratio = statistics.median(ratios)
    return [
        row(
            "pad of a quantized checkpoint, against cp + fsync",
            ratio,
            "x",
            ratio >= PAD_RATIO,
            f">= {PAD_RATIO} x",
            "cp + fsync of the same output",
            1.0,
        ),
        row("pad: its peak anonymous memory", max(peaks), "MB", max(peaks) <= PAD_MB, f"<= {PAD_MB:.0f} MB"),
    ]


def stream_rows(model: Path) -> list[dict[str, Any]]:
    plan = make_plan(model, 3, executor="vllm").plan
    made = recipes(plan, plan.virtual())
    files = [model / f for f in Checkpoint.open(model).files]

    def stored() -> Any:
        for file in files:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():  # noqa: SIM118 (not a dict)
                    yield name, opened.get_tensor(name)

    def floor() -> float:
        return seconds(copied(stored(), made))

    def ours() -> float:
        return seconds(stream(plan, stored()))

    floor(), ours()
    runs = [(ours(), floor()) for _ in range(STREAM_RUNS)]
    # A fresh page costs one of two prices, whoever asks (0.07 or 0.45 s of system time a run here); a quarter of the
    # runs of either kind gets the low one throughout, so the first quartiles compare like with like.
    mine, bare = (statistics.quantiles(times, n=4)[0] for times in zip(*runs, strict=True))
    ratio = mine / bare
    return [
        row(
            "stream, against iterating and copying what changes",
            ratio,
            "x",
            ratio <= STREAM_RATIO,
            f"<= {STREAM_RATIO} x",
            "iterating and copying",
            1.0,
            1.0 / ratio,
        ),
    ]


def main() -> int:
    load = round(os.getloadavg()[0], 2)
    with tempfile.TemporaryDirectory(prefix="oddrank-bench-") as folder:
        scratch = Path(folder)
        rows = plan_rows(scratch)
        release = describe_release("qwen3_5_moe", "nvfp4-mixed", layers=8, experts=48, vocab=32768)
        write_checkpoint(release, scratch / "model")
        rows += pad_rows(scratch, scratch / "model")
        rows += stream_rows(scratch / "model")
    print(json.dumps({"load": load, "rows": rows}, indent=2))
    return 0 if all(r["passed"] is not False for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
