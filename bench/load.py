"""Loading by all ranks together against reading the weight files once, both from the disk. Prints JSON.

Before every measurement the files' pages are dropped from the page cache. Loading is timed from when every rank has its
interpreter, torch and its line to the others, until the last has its model as it computes with it. Memory is what
loading adds to each rank's anonymous resident memory, against the bytes of its slice.
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
from synthetic import ODD, write

from oddrank.checkpoint import Checkpoint
from oddrank.layout.plan import Plan
from oddrank.planner import make_plan
from oddrank.runtime.parallel import Group, Link, run_ranks

TP = 3
PAIRS = 3
TARGET_KEPT = 1.02
TARGET_TIME = 1.3


def load(group: Group, link: Link, model: str, plan: bytes) -> dict[str, Any]:
    """The target of a rank: build and load its model once."""
    import gc

    import torch

    from oddrank.runtime.precision import Precision
    from oddrank.runtime.worker import load_rank

    # what the first use of torch's kernels allocates is not the model's
    torch.nn.functional.linear(torch.ones(8, 8), torch.ones(8, 8))
    precision = Precision.of("bf16", group.device)
    gc.collect()
    before = anonymous(os.getpid())
    group.barrier()
    start = time.perf_counter()
    with Checkpoint.open(model) as checkpoint:
        made, loaded = load_rank(Plan.from_json(plan), checkpoint, group, precision)
    mine = time.perf_counter() - start
    group.barrier()
    seconds = time.perf_counter() - start
    gc.collect()
    grown = anonymous(os.getpid()) - before
    assert made is not None
    return {"seconds": seconds, "mine": mine, "read": loaded.seconds, "prepare": loaded.prepare_seconds,
            "stored": loaded.stored_bytes, "held": loaded.kept_bytes, "grown": grown}


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
    reads, loads, ranks = [], [], []
    with tempfile.TemporaryDirectory(prefix="oddrank-bench-") as scratch:
        model = Path(scratch) / "model"
        size = write(ODD, model)
        files = sorted(model.glob("*.safetensors"))
        plan = make_plan(model, TP).plan
        for _ in range(PAIRS):
            drop_cached(files)
            reads.append(read_once(files))
            drop_cached(files)
            ranks = run_ranks(TP, module.load, str(model), plan.to_json())
            loads.append(max(r["seconds"] for r in ranks))
    ratio = statistics.median(a / b for a, b in zip(loads, reads, strict=True))
    kept = max(r["grown"] / r["stored"] for r in ranks)
    held = max(r["held"] / r["stored"] for r in ranks)
    rows = [
        row(f"load at TP={TP}: time of all ranks, against reading the files once, cold", ratio, "x",
            ratio <= TARGET_TIME, f"<= {TARGET_TIME} x", "reading the files", 1.0, 1 / ratio),
        row(f"load at TP={TP}", size / statistics.median(loads) / 1e9, "GB/s", None, None, "reading the files",
            size / statistics.median(reads) / 1e9),
        row("load: memory a rank keeps, against its slice", kept, "x", kept <= TARGET_KEPT, f"<= {TARGET_KEPT} x"),
        row("load: parameters a rank holds, against its slice", held, "x", held <= TARGET_KEPT, f"<= {TARGET_KEPT} x"),
    ]
    report = {
        "load": average,
        "tp": TP,
        "bytes": size,
        "load_s": [round(s, 3) for s in loads],
        "read_s": [round(s, 3) for s in reads],
        "ranks": ranks,
        "rows": rows,
    }
    print(json.dumps(report, indent=2))
    return 0 if all(r["passed"] is not False for r in rows) else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
