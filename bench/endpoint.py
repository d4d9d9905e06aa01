"""Servers as processes of their own, and requests to them over HTTP, for the benchmarks of serving."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from machine import anonymous

STOP_S = 20
TICK = os.sysconf("SC_CLK_TCK")


class Answered(NamedTuple):
    """A streamed answer. Seconds from the request's first byte."""

    first: float
    """To its first token."""
    last: float
    """To its end."""
    tokens: int
    """Generated."""
    cached: int
    """Tokens of the prompt that were not computed again, as far as the server says."""


class Endpoint:
    """An OpenAI-compatible server, started as a process; ready when the constructor returns. SystemExit with the end of
    its log where it does not start within `limit` s."""

    def __init__(self, name: str, command: Sequence[str], log: Path, env: Mapping[str, str] | None = None,
                 limit: float = 300) -> None:  # fmt: skip
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = int(probe.getsockname()[1])
        self.name, self.log, started = name, log, time.perf_counter()
        with open(log, "wb") as out:
            self.process = subprocess.Popen(
                [*command, "--port", str(self.port)], stdout=out, stderr=out, stdin=subprocess.DEVNULL,
                env={**os.environ, **(env or {})}, start_new_session=True,
            )  # fmt: skip
        while not self._healthy():
            if self.process.poll() is not None or time.perf_counter() - started > limit:
                self.close()
                raise SystemExit(f"{name} did not start:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.2)
        self.start_seconds = time.perf_counter() - started

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except OSError:
            return False

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=30) as answer:
            return str(answer.read().decode())

    def metric(self, name: str) -> float:
        """Of /metrics: a counter, a gauge, or a histogram's sum or count."""
        return next(float(line.split()[1]) for line in self.get("/metrics").splitlines() if line.startswith(name + " "))

    def processes(self) -> list[int]:
        """The server's process, and those that it has started."""
        found, children = [self.process.pid], _children()
        for pid in found:
            found += children.get(pid, [])
        return found

    def anonymous(self) -> int:
        """RssAnon of all its processes together, in bytes."""
        return sum(map(anonymous, self.processes()))

    def close(self) -> None:
        """End all its processes."""
        with contextlib.suppress(ProcessLookupError):
            self.resume()
            self.process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(STOP_S)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def stop(self) -> None:
        """Have its processes compute nothing until `resume`."""
        os.killpg(self.process.pid, signal.SIGSTOP)

    def resume(self) -> None:
        os.killpg(self.process.pid, signal.SIGCONT)

    def __enter__(self) -> Endpoint:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    # Requests -----------------------------------------------------------------------------------------------

    async def complete(self, prompt: Sequence[int], tokens: int, leave: bool = False, **more: Any) -> Answered:
        """A greedy answer of exactly so many tokens (a choice), streamed. leave: do not wait for more than its first.
        A client as light as can be: it shares the cores."""
        asked = {
            "prompt": list(prompt), "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "stream": True,
            "stream_options": {"include_usage": True}, **more,
        }  # fmt: skip
        body = json.dumps(asked).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nContent-Type: application/json\r\n"
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        begun, first, parts = time.perf_counter(), 0.0, []
        writer.write(f"{head}Connection: close\r\nContent-Length: {len(body)}\r\n\r\n".encode() + body)
        while part := await reader.read(1 << 16):
            parts.append(part)
            if not first and b"data: " in part:
                first = time.perf_counter() - begun
                if leave:
                    break
        last = time.perf_counter() - begun
        writer.close()
        if leave:
            return Answered(first, last, 1, 0)
        said = b"".join(parts)
        if not said.startswith(b"HTTP/1.1 200") or b"data: [DONE]" not in said:
            raise SystemExit(f"{self.name} answered: {said[:2000].decode(errors='replace')}")
        usage = json.loads(said[said.rindex(b"data: {") :].split(b"\n", 1)[0].removeprefix(b"data: "))["usage"]
        if usage["completion_tokens"] != tokens * more.get("n", 1) or usage["prompt_tokens"] != len(prompt):
            raise SystemExit(f"{self.name} counts {usage} and {len(prompt)} + {tokens} were asked for")
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        return Answered(first, last, tokens, cached)

    async def crowd(
        self, prompts: Sequence[Sequence[int]], tokens: Sequence[int], at_once: int, **more: Any
    ) -> list[Answered]:
        """An answer of so many tokens to each prompt, so many answers at a time."""
        left, found = list(range(len(prompts)))[::-1], {}

        async def one() -> None:
            while left:
                index = left.pop()
                found[index] = await self.complete(prompts[index], tokens[index], **more)

        await asyncio.gather(*(one() for _ in range(at_once)))
        return [found[index] for index in range(len(prompts))]


def _children() -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            with contextlib.suppress(OSError):
                stat = Path(f"/proc/{entry}/stat").read_text()
                found.setdefault(int(stat.rpartition(")")[2].split()[1]), []).append(int(entry))
    return found


def processor_seconds(pid: int) -> float:
    """That a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICK


def oddrank(model: Path, log: Path, tp: int, threads: int, *options: str) -> Endpoint:
    command = [sys.executable, "-m", "oddrank", "serve", str(model), "--tp", str(tp), "--threads", str(threads)]
    return Endpoint(f"oddrank at TP={tp}", [*command, *options], log)
