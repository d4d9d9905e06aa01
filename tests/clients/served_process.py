"""`oddrank serve` as a process of its own, as a client and an operator see it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Self

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

KEY = "sk-of-the-tests"
PATIENCE = 300.0
"""Seconds until what should come has not: far more than it takes, as the machine may be busy."""


class Serving:
    """A server that listens on a free port. options: of `oddrank serve`. Its `pid` is the server's, `ranks` are those
    of the rank processes, in rank order."""

    def __init__(self, model: Path, log: Path, *options: object) -> None:
        self.log, self.url = log, ""
        command = [sys.executable, "-m", "oddrank", "serve", str(model), "--port", "0", *map(str, options)]
        with log.open("wb") as errors:
            self.process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        self.pid = self.process.pid

    def wait_ready(self) -> Self:
        """Until it says that it serves."""
        assert self.process.stdout is not None
        timer = threading.Timer(PATIENCE, self.process.kill)
        timer.start()
        line = self.process.stdout.readline()
        timer.cancel()
        assert line.startswith("serving "), f"{line}\n{self.log.read_text()}"
        self.url = line.split()[-1]
        self.ranks = _children(self.pid)
        return self

    def client(self, key: str = KEY) -> openai.OpenAI:
        return openai.OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=PATIENCE)

    def health(self) -> tuple[int, dict[str, Any]]:
        found = httpx.get(f"{self.url}/health", timeout=PATIENCE)
        return found.status_code, found.json()

    def metrics(self) -> dict[str, float]:
        """Every sample without labels, by name; those with labels as name{value}."""
        text = httpx.get(f"{self.url}/metrics", timeout=PATIENCE).text
        samples = (s for family in text_string_to_metric_families(text) for s in family.samples)
        return {s.name + "".join(f"{{{v}}}" for v in s.labels.values()): s.value for s in samples}

    def signal(self, number: int) -> None:
        self.process.send_signal(number)

    def wait(self) -> int:
        """Its exit code; a rank that outlives it is an error."""
        code = self.process.wait(PATIENCE)
        until(lambda: not any(map(alive, self.ranks)), f"ranks {self.ranks} are gone")
        return code


def ended(servings: Iterable[Serving]) -> None:
    """All of them, however they are doing."""
    found = list(servings)
    for serving in found:
        serving.process.terminate()
    for serving in found:
        try:
            serving.process.wait(PATIENCE)
        finally:
            serving.process.kill()
            serving.process.wait()
            assert serving.process.stdout is not None
            serving.process.stdout.close()


def started(servings: Iterable[Serving]) -> list[Serving]:
    """Ready, all of them; started at the same time by whoever made them."""
    found = list(servings)
    try:
        return [serving.wait_ready() for serving in found]
    except BaseException:
        ended(found)
        raise


def until(holds: Callable[[], bool], what: str) -> None:
    """Wait for something that comes by itself."""
    end = time.monotonic() + PATIENCE
    while not holds():
        assert time.monotonic() < end, f"waited {PATIENCE} s in vain until {what}"
        time.sleep(0.02)


def alive(pid: int) -> bool:
    """Whether a process runs: neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def anonymous_bytes(pid: int) -> int:
    """Of a process's memory, what is no file's."""
    status = Path(f"/proc/{pid}/status").read_text()
    return 1024 * int(next(line.split()[1] for line in status.splitlines() if line.startswith("RssAnon")))


def named_memory(pids: Iterable[int]) -> set[str]:
    """Paths of shared memory with a name that the processes have open or mapped."""
    found: list[str] = []
    for pid in pids:
        found += [line[line.find("/") :] for line in Path(f"/proc/{pid}/maps").read_text().splitlines() if "/" in line]
        for link in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):  # closed meanwhile
                found.append(os.readlink(link))
    return {path for path in found if path.startswith("/dev/shm/")}


def _children(pid: int) -> list[int]:
    """In the order in which they were started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # gone meanwhile
            if stat.read_text().rpartition(")")[2].split()[1] == str(pid):
                found.append(int(stat.parent.name))
    return sorted(found)
