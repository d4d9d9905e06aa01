"""Loading quantized checkpoints into the runtime: memory of a rank, and bytes read from the disk. Prints JSON.

Every rank imports what it needs and meets the others; then the files' pages are dropped from the page cache and all
load together. Memory is the highest anonymous resident memory of a rank from there until its model is loaded, less what
it had, less its slice. Bytes read are those that the kernel fetched from the disk for the ranks (read_bytes of
/proc/PID/io), all together, against the bytes of the tensors that the model is made of (an MTP layer is not run, and
not read).
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from machine import AnonymousPeak, anonymous, drop_cached
from report import row

from oddrank.checkpoint import Checkpoint
from oddrank.planner import make_plan
from oddrank.runtime.parallel import Group, Link, Ranks
from oddrank.synth import describe_release, write_checkpoint
from oddrank.transform.slice import RankSlice

TP = 3
BEYOND_MB, TIMES_READ = 150.0, 1.1
RELEASES: dict[str, tuple[str, dict[str, Any]]] = {
    "nvfp4-mixed": ("qwen3_5_moe", {"layers": 4, "experts": 64, "vocab": 32768}),
    "fp8-block": ("qwen3_5_moe", {"layers": 4, "experts": 64, "vocab": 32768}),
    "mxfp4": ("qwen3_5", {"layers": 4, "vocab": 32768}),
    "bf16": ("qwen3_5", {"layers": 4, "vocab": 16384}),
}


def disk_bytes() -> int:
    """Bytes that the kernel has read from the disk for this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("read_bytes"))


def load(group: Group, link: Link, model: str, plan: bytes) -> dict[str, Any]:
    """The target of a rank. Sends its anonymous memory once it has its imports; loads when told, and sends it; brings
    the weights into the kernels' form when told, and sends it; ends when told."""
    import gc

    from oddrank.layout.plan import Plan
    from oddrank.runtime.engine import Engine
    from oddrank.runtime.precision import Precision
    from oddrank.runtime.worker import load_rank

    gc.collect()
    link.send(anonymous(os.getpid()))
    link.receive()
    before = disk_bytes()
    with Checkpoint.open(model) as checkpoint:
        made, loaded = load_rank(Plan.from_json(plan), checkpoint, group, Precision.of("bf16", group.device))
    read = disk_bytes() - before
    group.barrier()
    link.send(anonymous(os.getpid()))
    link.receive()
    engine = Engine(made)
    link.send(anonymous(os.getpid()))
    link.receive()
    return {
        "slice_bytes": loaded.stored_bytes,
        "kept_bytes": made.nbytes(),
        "read_bytes": read,
        "seconds": loaded.seconds,
        "prepare_seconds": engine.prepare_seconds,
        "experts": loaded.experts,
    }


def measure(model: Path, plan: bytes) -> list[dict[str, Any]]:
    """Of every rank: what `load` returns, and its memory."""
    import load_quantized as module  # the ranks import their target by this name

    with Ranks(TP, module.load, str(model), plan) as ranks:
        before = dict(ranks.receive() for _ in range(TP))
        drop_cached(sorted(model.glob("*.safetensors")))
        stages = {}
        for stage in ("load", "ready"):
            with contextlib.ExitStack() as looking:
                peaks = [looking.enter_context(AnonymousPeak(pid)) for pid in ranks.pids]
                ranks.send(stage)
                after = dict(ranks.receive() for _ in range(TP))
            stages[f"{stage}_peak_grown"] = [peak.peak - before[r] for r, peak in enumerate(peaks)]
            stages[f"{stage}_grown"] = [after[r] - before[r] for r in range(TP)]
        ranks.send("end")
        told = ranks.join()
    return [{**t, "before": before[r], **{k: v[r] for k, v in stages.items()}} for r, t in enumerate(told)]


def rows_of(scheme: str, family: str, size: int, ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    beyond, ready = (max(r[k] - r["slice_bytes"] for r in ranks) / 1e6 for k in ("load_peak_grown", "ready_peak_grown"))
    times = sum(r["read_bytes"] for r in ranks) / size
    what = f"load of {family} {scheme} at TP={TP}"
    return [
        row(f"{what}: peak memory of a rank beyond its slice of {max(r['slice_bytes'] for r in ranks) / 1e6:.0f} MB",
            beyond, "MB", beyond <= BEYOND_MB, f"<= {BEYOND_MB:.0f} MB"),
        row(f"{what}: the same until its engine is ready", ready, "MB", None),
        row(f"{what}: bytes read from the disk, against the tensors'", times, "x", times <= TIMES_READ,
            f"<= {TIMES_READ} x"),
    ]  # fmt: skip


def bytes_to_read(model: Path) -> int:
    """Stored bytes of the tensors that the runtime runs, each once."""
    with Checkpoint.open(model) as checkpoint:
        part = RankSlice(make_plan(model, 1).plan, checkpoint, 0)
        used = [checkpoint.tensors[name] for name in part.names() if part.part_of(name) is None]
    return sum(info.end - info.start for info in used)


def main(schemes: list[str]) -> int:
    average, rows, reports = round(os.getloadavg()[0], 2), [], {}
    for scheme in schemes or RELEASES:
        family, cut = RELEASES[scheme]
        with tempfile.TemporaryDirectory(prefix="oddrank-bench-") as scratch:
            model = Path(scratch) / "model"
            write_checkpoint(describe_release(family, scheme, **cut), model)
            size = bytes_to_read(model)
            ranks = measure(model, make_plan(model, TP).plan.to_json())
        rows += rows_of(scheme, family, size, ranks)
        reports[scheme] = {"bytes": size, "ranks": ranks}
    print(json.dumps({"load": average, "tp": TP, "releases": reports, "rows": rows}, indent=2))
    return 0 if all(r["passed"] is not False for r in rows) else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main(sys.argv[1:]))
