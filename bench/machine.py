"""What the benchmarks say about the machine, and what they ask of it."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import Any

FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512_bf16", "amx_bf16", "sha_ni", "asimd", "sve", "sha2")
"""CPU features that decide how fast the work here can be."""


def describe() -> dict[str, Any]:
    """Cores, CPU features, memory in GiB, and the load before anything of ours ran."""
    flags: set[str] = set()
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            flags = set(value.split())
            break
    memory = next(
        int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal")
    )
    return {
        "architecture": os.uname().machine,
        "cores": len(os.sched_getaffinity(0)),
        "cpu_flags": [flag for flag in FLAGS if flag in flags],
        "memory_gib": round(memory / 2**20, 1),
        "load": round(os.getloadavg()[0], 2),
    }


def drop_cached(paths: Iterable[Path]) -> None:
    """Drop these files' clean pages from the page cache: the next read comes from the disk."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)


def sync_files(paths: Iterable[Path]) -> None:
    """Put these files (or directories) on the disk."""
    for path in paths:
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def anonymous(pid: int) -> int:
    """RssAnon of a process in bytes; 0 when it has ended."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("RssAnon"):
                return int(line.split()[1]) << 10
    except (FileNotFoundError, ProcessLookupError):
        pass
    return 0


class AnonymousPeak:
    """The highest RssAnon of a process, sampled every 20 ms while the `with` block runs."""

    def __init__(self, pid: int) -> None:
        self.pid, self.peak = pid, 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def _run(self) -> None:
        while not self._stop.is_set():
            self.peak = max(self.peak, anonymous(self.pid))
            self._stop.wait(0.02)

    def __enter__(self) -> AnonymousPeak:
        self._thread.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        self._stop.set()
        self._thread.join()
