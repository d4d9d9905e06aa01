"""Loading by all ranks together against reading the weight files once, both from the disk. Prints JSON.

Before every measurement the files' pages are dropped from the page cache. Loading is timed from when every rank has its
interpreter, torch and its line to the others, until the last has its slice in a model that computes, and again until
the last has an engine, whose kernels may want the weights in a form of their own. Memory is what either adds to each
rank's anonymous resident memory, against the bytes of its slice; a tiny model is loaded before, so that it holds
neither modules nor the threads' stacks.
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

from machine import anonymous, drop_cached
from report import row
from synthetic import ODD, Shape, write

from oddrank.checkpoint import Checkpoint
from oddrank.layout.plan import Plan
from oddrank.planner import make_plan
from oddrank.runtime.parallel import Group, Link, run_ranks

TP = 3
PAIRS = 3
TINY = Shape(q=3, kv=3, hidden=64, mlp=96, vocab=96, layers=1, head_dim=32)
TARGET_KEPT = 1.02
TARGET_TIME = 1.3


def load(group: Group, link: Link, tiny: tuple[str, bytes], real: tuple[str, bytes]) -> dict[str, Any]:
    """The target of a rank: build and load two models (directory, plan); what is measured of the second."""
    import gc

    from oddrank.runtime.engine import Engine
    from oddrank.runtime.precision import Precision
    from oddrank.runtime.worker import load_rank

    precision = Precision.of("bf16", group.device)
    kept = []
    for model, plan in (tiny, real):
        gc.collect()
        before = anonymous(os.getpid())
        group.barrier()
        start = time.perf_counter()
        with Checkpoint.open(model) as checkpoint:
            made, loaded = load_rank(Plan.from_json(plan), checkpoint, group, precision)
        group.barrier()
        loaded_after = time.perf_counter() - start
        gc.collect()
        loaded_grown = anonymous(os.getpid()) - before
        kept.append(Engine(made))
        group.barrier()
        ready_after = time.perf_counter() - start
        gc.collect()
        ready_grown = anonymous(os.getpid()) - before
    return {
        "loaded_s": loaded_after,
        "ready_s": ready_after,
        "slice_bytes": loaded.stored_bytes,
        "parameter_bytes": made.nbytes(),
        "loaded_grown": loaded_grown,
        "ready_grown": ready_grown,
    }


def read_once(files: list[Path]) -> float:
    """Seconds to read the files from front to back."""
    buffer = bytearray(8 << 20)
    start = time.perf_counter()
    for path in files:
        with open(path, "rb", buffering=0) as file:
            while file.readinto(buffer):
                pass
    return time.perf_counter() - start


def main() -> int:
    import load as module  # the ranks import their target by this name

    average = round(os.getloadavg()[0], 2)
    reads, loads, readies, ranks = [], [], [], []
    with tempfile.TemporaryDirectory(prefix="oddrank-bench-") as scratch:
        model = Path(scratch) / "model"
        size = write(ODD, model)
        files = sorted(model.glob("*.safetensors"))
        write(TINY, Path(scratch) / "tiny")
        tiny, real = ((str(path), make_plan(path, TP).plan.to_json()) for path in (Path(scratch) / "tiny", model))
        for _ in range(PAIRS):
            drop_cached(files)
            reads.append(read_once(files))
            drop_cached(files)
            ranks = run_ranks(TP, module.load, tiny, real)
            loads.append(max(r["loaded_s"] for r in ranks))
            readies.append(max(r["ready_s"] for r in ranks))
    ratio, ready = (statistics.median(a / b for a, b in zip(times, reads, strict=True)) for times in (loads, readies))
    grown, running = (max(r[key] / r["slice_bytes"] for r in ranks) for key in ("loaded_grown", "ready_grown"))
    held = max(r["parameter_bytes"] / r["slice_bytes"] for r in ranks)
    rate, ceiling = (size / statistics.median(times) / 1e9 for times in (loads, reads))
    rows = [
        row(
            f"load at TP={TP}: time of all ranks, against reading the files once, cold",
            ratio,
            "x",
            ratio <= TARGET_TIME,
            f"<= {TARGET_TIME} x",
            "reading the files",
            1.0,
            1 / ratio,
        ),
        row(
            f"load at TP={TP}: the same until the weights are in the kernels' form",
            ready,
            "x",
            None,
            None,
            "reading the files",
            1.0,
            1 / ready,
        ),
        row(f"load at TP={TP}", rate, "GB/s", None, None, "reading the files", ceiling),
        row("load: memory a rank keeps, against its slice", grown, "x", grown <= TARGET_KEPT, f"<= {TARGET_KEPT} x"),
        row("load: the same with its engine", running, "x", running <= TARGET_KEPT, f"<= {TARGET_KEPT} x"),
        row("load: a rank's parameters, against its slice", held, "x", held <= TARGET_KEPT, f"<= {TARGET_KEPT} x"),
    ]
    report = {
        "load": average,
        "tp": TP,
        "bytes": size,
        "load_s": [round(s, 3) for s in loads],
        "ready_s": [round(s, 3) for s in readies],
        "read_s": [round(s, 3) for s in reads],
        "ranks": ranks,
        "rows": rows,
    }
    print(json.dumps(report, indent=2))
    return 0 if all(r["passed"] is not False for r in rows) else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
