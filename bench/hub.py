"""`oddrank plan` and `check` of a model on a hub, from the start of the process to its end. Prints JSON.

The hub is the tests', on the loopback: it redirects weight files to a second host, as the real one does. 42 shards of
Qwen3-32B's headers, no weights; then the 35B-A3B's NVFP4 release (124,135 tensors). The ceiling is the same command of
the same files on disk.
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

from report import row

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "hub"))
from hub_server import Hub, Repo

from oddrank.synth import describe_release, write_headers

RUNS = 9
SHARDS = 42
TARGET_S = 1.0


def timed(command: str, model: str, env: dict[str, str]) -> float:
    """Wall seconds of a command that must end well."""
    line = [sys.executable, "-m", "oddrank", command, model, "--tp", "3", "--json"]
    start = time.perf_counter()
    done = subprocess.run(line, capture_output=True, text=True, env=env)
    if done.returncode:
        raise SystemExit(f"{' '.join(line)} ended with {done.returncode}: {done.stderr}")
    return time.perf_counter() - start


def measure(hub: Hub, what: str, folder: Path, commands: dict[str, float | None], env: dict[str, str]) -> list[Any]:
    """Rows of these commands (and the seconds they may take), by turns on the hub and on the disk."""
    hub.repos["org/model"] = Repo(folder)
    rows = []
    for command, target in commands.items():
        there, here = [], []
        for run in range(RUNS + 1):
            hub.forget()
            seconds = timed(command, "org/model", env), timed(command, str(folder), env)
            if run:  # the first may still compile
                there.append(seconds[0])
                here.append(seconds[1])
        most = max(len(hub.of(shard.name)) for shard in folder.glob("*.safetensors"))
        measured, local = statistics.median(there), statistics.median(here)
        passed = None if target is None else measured < target and most <= 2
        goal = None if target is None else f"< {target} s, at most 2 requests a shard"
        name = f"{command} of {what} on a hub, cold start"
        rows.append(row(name, measured, "s", passed, goal, "the same files on disk", local, local / measured))
    rows.append(row(f"bytes sent for {what}", hub.sent / 1e6, "MB", None))
    return rows


def main() -> int:
    load = round(os.getloadavg()[0], 2)
    with tempfile.TemporaryDirectory(prefix="oddrank-bench-") as scratch, Hub() as hub:
        dense = write_headers(
            describe_release("qwen3", size="32B", layers=None, vocab=None), f"{scratch}/dense", shards=SHARDS
        )
        experts = write_headers(
            describe_release("qwen3_5_moe", "nvfp4-mixed", layers=None, experts=None, vocab=None),
            f"{scratch}/experts",
            shards=SHARDS,
        )
        env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
        env |= {"HF_ENDPOINT": hub.url, "HF_HOME": f"{scratch}/home"}
        rows = measure(hub, f"707 tensors in {SHARDS} shards", dense, {"plan": TARGET_S, "check": TARGET_S}, env)
        rows += measure(hub, f"124135 tensors in {SHARDS} shards", experts, {"plan": None}, env)
    print(json.dumps({"load": load, "rows": rows}, indent=2))
    return 0 if all(r["passed"] is not False for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
