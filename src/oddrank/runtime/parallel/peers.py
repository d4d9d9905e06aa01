"""Which processes are on this machine, and whether they still live. Imports no torch."""

import os
import select
from pathlib import Path


def machine() -> str:
    """The same string for two processes exactly if they can open each other's /proc entries."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {os.getuid()}"
    except OSError:
        return f"no machine id, pid {os.getpid()}"


class Peer:
    """Another process of this machine, by pid. A dead one that nobody has waited for counts as dead."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self._poll: select.poll | None = None
        self._fd = -1
        try:
            self._fd = os.pidfd_open(pid)
            self._poll = select.poll()
            self._poll.register(self._fd, select.POLLIN)
        except OSError:  # a kernel or a sandbox without pidfd, or a process that is already gone
            self._poll = None

    @property
    def descriptor(self) -> int:
        """A pidfd, readable once the process is dead; -1 where there is none."""
        return self._fd

    def alive(self) -> bool:
        if self._poll is not None:
            return not self._poll.poll(0)
        try:
            stat = Path(f"/proc/{self.pid}/stat").read_text()
        except OSError:
            return False
        return stat.rpartition(")")[2].split()[0] not in "ZX"

    def close(self) -> None:
        if self._fd >= 0:
            self._poll = None
            os.close(self._fd)
            self._fd = -1
