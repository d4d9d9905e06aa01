"""`oddrank plan` of a 700-tensor model, from the start of its process to its end. Prints JSON.

The checkpoint is Qwen3-32B's, as headers and holes. The ceiling is what starting Python and importing numpy takes.
"""

from __future__ import annotations

import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from report import row
from synthetic import LARGE, write

RUNS = 11
TARGET_S = 0.5


def timed(command: list[str]) -> tuple[float, float, str]:
    """(wall seconds, processor seconds, standard output) of a process that must end well."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True)
    wall = time.perf_counter() - start
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} ended with {done.returncode}: {done.stderr}")
    return wall, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def main() -> int:
    load = round(os.getloadavg()[0], 2)
    floor_command = [sys.executable, "-c", "import numpy"]
    walls, cpus, floors = [], [], []
    with tempfile.TemporaryDirectory(prefix="oddrank-bench-") as scratch:
        model = Path(scratch) / "model"
        write(LARGE, model, sparse=True)
        arguments = ["plan", str(model), "--tp", "3", "--json"]
        command = [sys.executable, "-m", "oddrank", *arguments]
        for run in range(RUNS + 1):
            wall, cpu, said = timed(command)
            floor = timed(floor_command)[0]
            if run:  # the first may still compile
                walls.append(wall)
                cpus.append(cpu)
                floors.append(floor)
        probe = (
            "import sys; from oddrank.cli import group; "
            "group.main(sys.argv[1:], standalone_mode=False); "
            "print('torch' in sys.modules, file=sys.stderr)"
        )
        probed = subprocess.run([sys.executable, "-c", probe, *arguments], capture_output=True, text=True, check=True)
    torch = probed.stderr.strip().endswith("True")
    seconds, floor = statistics.median(walls), statistics.median(floors)
    rows = [
        row(
            "plan of 707 tensors, cold start",
            seconds,
            "s",
            seconds < TARGET_S and not torch,
            f"< {TARGET_S} s, no torch",
            "python -c 'import numpy'",
            floor,
            floor / seconds,
        ),
        row("plan: processor time of it", statistics.median(cpus), "s", None),
    ]
    report = {
        "load": load,
        "tensors": json.loads(said)["tensors"]["total"],
        "imports_torch": torch,
        "seconds": [round(s, 3) for s in walls],
        "rows": rows,
    }
    print(json.dumps(report, indent=2))
    return 0 if all(r["passed"] is not False for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
