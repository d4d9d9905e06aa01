"""Keeping a process in its slice of the cores, and threads on one core each."""

import contextlib
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from oddrank.runtime.topology.limits import SYSFS, affinity, quota
from oddrank.runtime.topology.placement import Placement, place
from oddrank.runtime.topology.sysfs import read_topology


def cores_of(rank: int, ranks: int, threads: int | None = None, root: Path = SYSFS) -> list[int]:
    """The logical CPU of each thread of `rank`, one of `ranks` that share what this thread may use. See `place`."""
    return list(place(read_topology(root), ranks, threads, quota(root))[rank].threads)


def own_cores(threads: int | None = None) -> list[int]:
    """The logical CPU of each of `threads` threads (by default one a core) of this process alone. A rank process was
    clamped to its slice when it started, so these are the rank's own."""
    return cores_of(0, 1, threads)


def clamp(placement: Placement) -> bool:
    """Keep every thread of this process, and those that they start from now on, on the placement's CPUs. False where
    the system does not let a process choose."""
    with contextlib.suppress(OSError):
        for thread in map(int, os.listdir("/proc/self/task")):
            _set_affinity(placement.cpus, thread)
    return _set_affinity(placement.cpus)


class PinnedPool(ThreadPoolExecutor):
    """One thread for each of `cpus`, pinned to it. The i-th of the threads runs on the i-th CPU.

    ready: called in every thread once it is pinned, before its first work.
    """

    def __init__(self, cpus: Sequence[int], ready: Callable[[], object] | None = None) -> None:
        order, lock, given = itertools.count(), threading.Lock(), tuple(cpus)
        self.cpus = given

        def start() -> None:  # knows nothing of the pool: threads that did would keep it, and themselves, for ever
            with lock:
                cpu = given[next(order) % len(given)]
            _set_affinity((cpu,))
            if ready is not None:
                ready()

        super().__init__(len(self.cpus), thread_name_prefix="oddrank-pinned", initializer=start)


def _set_affinity(cpus: Sequence[int], thread: int = 0) -> bool:
    if not hasattr(os, "sched_setaffinity"):
        return False
    with contextlib.suppress(OSError):  # a sandbox that forbids it; CPUs that went offline; a thread that ended
        os.sched_setaffinity(thread, cpus)
        return bool(thread) or affinity() <= frozenset(cpus)
    return False
