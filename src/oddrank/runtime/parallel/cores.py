"""How many CPU cores this process may use. Imports no torch."""

import os
from pathlib import Path


def affinity() -> frozenset[int]:
    """The CPU numbers that the scheduler may put this process on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def quota() -> float:
    """The cores' worth of CPU time that the control group (a container's limit) grants; infinite without one.

    Format of cpu.max: "MICROSECONDS PERIOD" or "max PERIOD" (kernel documentation, cgroup-v2).
    """
    root = Path("/sys/fs/cgroup")
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        below = [root / line[3:].lstrip("/") for line in lines if line.startswith("0::")]
    except OSError:
        below = []
    for folder in (*below, root):
        try:
            granted, period = (folder / "cpu.max").read_text().split()
        except (OSError, ValueError):
            continue
        return float("inf") if granted == "max" else int(granted) / int(period)
    return float("inf")


def cores_available() -> int:
    """Whole cores this process can keep busy, at least 1."""
    return max(1, int(min(len(affinity()), quota())))
