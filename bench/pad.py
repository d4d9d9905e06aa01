"""`oddrank pad` against `cp --reflink=never` and fsync of what it wrote, in pairs. Prints JSON.

Both begin with their source in the page cache and end with the result on the disk; pad's time is the whole command's,
from the start of its process. The checkpoint has 24 query and 4 KV heads and is padded for TP=3, with every kind of
change in it: rows, columns, and tensors that stay.
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
from synthetic import ODD, write

PAIRS = 5
TARGET_RATIO = 0.8
TARGET_ANONYMOUS = 300e6  # bytes


def run_pad(model: Path, out: Path) -> tuple[float, int, dict[str, Any]]:
    """(seconds, peak RssAnon, the command's JSON)."""
    command = [sys.executable, "-m", "oddrank", "pad", str(model), str(out), "--tp", "3", "--layout", "pad", "--json"]
    start = time.perf_counter()
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process, AnonymousPeak(process.pid) as memory:
        said = process.communicate()[0]
        seconds = time.perf_counter() - start
    if process.returncode:
        raise SystemExit(f"oddrank pad ended with {process.returncode}")
    return seconds, memory.peak, json.loads(said)


def run_copy(source: Path, out: Path) -> float:
    start = time.perf_counter()
    subprocess.run(["cp", "-r", "--reflink=never", str(source), str(out)], check=True)
    sync_files([*out.rglob("*"), out, out.parent])
    return time.perf_counter() - start


def main() -> int:
    load = round(os.getloadavg()[0], 2)
    pads, copies, peaks = [], [], []
    with tempfile.TemporaryDirectory(prefix="oddrank-bench-") as scratch:
        at = Path(scratch)
        write(ODD, at / "model")
        for pair in range(PAIRS + 1):
            shutil.rmtree(at / "padded", ignore_errors=True)
            os.sync()
            seconds, peak, said = run_pad(at / "model", at / "padded")
            copied = run_copy(at / "padded", at / "copy")
            size = sum(f.stat().st_size for f in (at / "padded").rglob("*") if f.is_file())
            shutil.rmtree(at / "copy")
            if pair:  # the first warms up
                pads.append(seconds)
                copies.append(copied)
                peaks.append(peak)
    ratio = statistics.median(c / p for c, p in zip(copies, pads, strict=True))
    ours, theirs = size / statistics.median(pads) / 1e9, size / statistics.median(copies) / 1e9
    anonymous = max(peaks)
    rows = [
        row(
            "pad: bytes per second against cp + fsync",
            ratio,
            "x",
            ratio >= TARGET_RATIO,
            f">= {TARGET_RATIO} x",
            "cp + fsync of the same output",
            1.0,
        ),
        row("pad: bytes per second", ours, "GB/s", None, None, "cp + fsync", theirs),
        row(
            "pad: peak anonymous memory",
            anonymous / 1e6,
            "MB",
            anonymous <= TARGET_ANONYMOUS,
            f"<= {TARGET_ANONYMOUS / 1e6:.0f} MB",
        ),
    ]
    report = {
        "load": load,
        "bytes": size,
        "tensors": said["tensors"],
        "changed": said["changed"],
        "pad_s": [round(s, 3) for s in pads],
        "cp_s": [round(s, 3) for s in copies],
        "rows": rows,
    }
    print(json.dumps(report, indent=2))
    return 0 if all(r["passed"] is not False for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
