"""`oddrank serve --engine vllm`: vLLM's server as a process of ours that we know to be ready, and how it ended."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import msgspec

from oddrank.checkpoint.hub import hub_model
from oddrank.engines.vllm.launch import find_vllm
from oddrank.errors import OddrankError

DRAIN_SECONDS = 60
"""How long answers that are being given may go on after SIGTERM."""

_START_SECONDS = 5
"""How long vLLM may take to end while it starts: it may not notice the signal before it is done with that."""

_DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
_PR_SET_PDEATHSIG = 1  # <linux/prctl.h>


class Endpoint(msgspec.Struct, frozen=True):
    """What is served, in oddrank's words. None: as vLLM does by default. kv_bytes: of KV cache on each rank. chunk:
    prompt tokens of a step beside those that generate. plan_tp: plan for this many ranks and run on `tp`."""

    model: str
    tp: int
    host: str
    port: int
    names: tuple[str, ...] = ()
    key: str | None = None
    length: int | None = None
    running: int | None = None
    chunk: int | None = None
    kv_bytes: int | None = None
    reuse: bool = True
    dtype: str | None = None
    threads: int | None = None
    layout: str = "auto"
    constraints: Mapping[str, int] = {}
    plan_tp: int | None = None

    def arguments(self) -> list[str]:
        """Of `vllm serve`. OddrankError for what vLLM does not have."""
        if self.dtype is not None and self.dtype not in _DTYPES:
            raise OddrankError(f"vLLM does not compute in {self.dtype}; --engine native does.")
        if self.layout == "ragged":
            raise OddrankError("vLLM's ranks are equal, so it has no --layout ragged; --engine native has.")
        hub = hub_model(self.model)
        given: dict[str, Any] = {
            "tensor-parallel-size": self.tp,
            "host": self.host,
            "port": self.port,
            "shutdown-timeout": DRAIN_SECONDS,
            "max-model-len": self.length,
            "max-num-seqs": self.running,
            "max-num-batched-tokens": None if self.chunk is None else self.chunk + (self.running or 0),
            "kv-cache-memory-bytes": self.kv_bytes,
            "dtype": None if self.dtype is None else _DTYPES[self.dtype],
            "revision": None if hub is None else hub.revision,
        }
        options = [part for name, value in given.items() if value is not None for part in (f"--{name}", str(value))]
        model = self.model if hub is None else hub.repo
        names = self.names or (Path(model).resolve().name,)
        reuse = [] if self.reuse else ["--no-enable-prefix-caching"]
        return [model, *options, "--served-model-name", *names, *reuse]

    def environment(self) -> dict[str, str]:
        """The variables that say the rest. The key is one: vLLM logs its arguments. So are the threads of a rank on a
        CPU: vLLM gives each rank a NUMA node of its own, and starts no more ranks than there are nodes."""
        threads = self.threads or max(1, (os.cpu_count() or 1) // self.tp)
        given = {
            "ODDRANK_LAYOUT": "" if self.layout == "auto" else self.layout,
            "ODDRANK_CONSTRAINTS": ",".join(f"{k}={v}" for k, v in self.constraints.items()),
            "ODDRANK_PLAN_TP": str(self.plan_tp or ""),
            "VLLM_API_KEY": self.key or "",
        }
        bound = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(threads)}
        if self.threads is None:
            bound |= {k: os.environ[k] for k in bound if k in os.environ}
        return {k: v for k, v in given.items() if v} | bound


def serve(endpoint: Endpoint, on_ready: Callable[[str], object]) -> int:
    """Serve until SIGTERM or SIGINT, which lets answers end first (twice: which does not). The exit code: 128 and the
    signal's number, or vLLM's own where it did not start. on_ready: called with the URL. OddrankError where vLLM is not
    there, or ends without being told to."""
    find_vllm()
    if endpoint.port == 0:
        endpoint = msgspec.structs.replace(endpoint, port=_free_port(endpoint.host))
    told: list[int] = []
    line = [sys.executable, "-m", "oddrank", "vllm", "serve", *endpoint.arguments()]
    environment = {**os.environ, **endpoint.environment()}
    process = subprocess.Popen(line, env=environment, process_group=0, preexec_fn=_end_with_parent)

    def tell(number: int, _: Any) -> None:
        told.append(number)
        if len(told) == 1:
            process.send_signal(signal.SIGTERM)
        else:
            _kill_all(process)

    old = {number: signal.signal(number, tell) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        ready = _wait_until_ready(process, endpoint, told, on_ready)
        with suppress(subprocess.TimeoutExpired):
            process.wait(None if ready else _START_SECONDS)
    finally:
        _kill_all(process)
        for number, handler in old.items():
            signal.signal(number, handler)
    code = process.wait()
    if told:
        return 128 + told[0]
    if not ready:
        return code if code > 0 else 128 - code if code else 1
    raise OddrankError(f"vLLM ended by itself, with code {code}: its engine or one of its ranks is lost; see its log.")


def _kill_all(process: subprocess.Popen[bytes]) -> None:
    """End what is left of its process group: vLLM's engine and ranks outlive a server that was killed."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _wait_until_ready(
    process: subprocess.Popen[bytes], endpoint: Endpoint, told: list[int], on_ready: Callable[[str], object]
) -> bool:
    """Whether it came to answer before it ended, or was told to."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(endpoint.host, endpoint.host)
    url = f"http://{f'[{host}]' if ':' in host else host}:{endpoint.port}"
    with httpx.Client(trust_env=False, timeout=5) as client:
        while process.poll() is None and not told:
            time.sleep(0.5)
            with suppress(httpx.HTTPError):
                if client.get(f"{url}/health").status_code == 200:
                    on_ready(url)
                    return True
    return False


def _free_port(host: str) -> int:
    try:
        with socket.create_server((host, 0), family=socket.getaddrinfo(host, 0)[0][0]) as found:
            return int(found.getsockname()[1])
    except OSError as error:
        raise OddrankError(f"Cannot listen on {host}: {error.strerror or error}. Choose another --host.") from None


def _end_with_parent() -> None:
    """In the child: where we are killed, nobody is left who could tell it to end."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
