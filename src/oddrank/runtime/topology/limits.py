"""What a process may use of the machine: its affinity, the control group's cpuset and quota."""

import os
from pathlib import Path

SYSFS = Path("/sys")


def affinity() -> frozenset[int]:
    """The CPU numbers that the scheduler may put this thread on."""
    if hasattr(os, "sched_getaffinity"):
        return frozenset(os.sched_getaffinity(0))
    return frozenset(range(os.cpu_count() or 1))


def cpu_list(text: str) -> frozenset[int]:
    """The CPUs of a kernel list such as "0-3,8,10-11"; what is no number or range of them is left out.

    Format: kernel documentation, admin-guide/cputopology (the "list" form of a cpumask).
    """
    found: set[int] = set()
    for part in text.replace("\n", ",").split(","):
        first, dash, last = part.strip().partition("-")
        if first.isdecimal() and (last.isdecimal() or not dash):
            found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def cpuset(root: Path = SYSFS) -> frozenset[int] | None:
    """CPUs that the control group at `root` grants; None where it says nothing.

    cpuset.cpus.effective: kernel documentation, cgroup-v2; cpuset/cpuset.effective_cpus: cgroup-v1.
    """
    for name in ("cpuset.cpus.effective", "cpuset/cpuset.effective_cpus"):
        try:
            cpus = cpu_list((root / "fs/cgroup" / name).read_text())
        except OSError:
            continue
        if cpus:
            return cpus
    return None


def quota(root: Path = SYSFS) -> float:
    """The cores' worth of CPU time that the control group (a container's limit) grants; infinite without one.

    Format of cpu.max: "MICROSECONDS PERIOD" or "max PERIOD" (kernel documentation, cgroup-v2).
    """
    top = root / "fs/cgroup"
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
        below = [top / line[3:].lstrip("/") for line in lines if line.startswith("0::")]
    except OSError:
        below = []
    for folder in (*below, top):
        try:
            granted, period = (folder / "cpu.max").read_text().split()
            return float("inf") if granted == "max" else int(granted) / int(period)
        except (OSError, ValueError, ZeroDivisionError):
            continue
    return float("inf")


def cores_available() -> int:
    """Whole logical CPUs this process can keep busy, at least 1."""
    return max(1, int(min(len(affinity()), quota())))
