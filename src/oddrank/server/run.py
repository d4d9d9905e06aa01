"""From a model directory to an endpoint, and down again."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import uvicorn

from oddrank.checkpoint import Checkpoint
from oddrank.checkpoint.config import ConfigView
from oddrank.checkpoint.jsonfile import read_object
from oddrank.errors import OddrankError
from oddrank.layout.plan import Plan
from oddrank.runtime.expert_options import ExpertOptions
from oddrank.runtime.generate import default_dtype, end_tokens, load_tokenizer
from oddrank.runtime.parallel.launch import Ranks
from oddrank.runtime.serving.options import ServingOptions
from oddrank.server.app import State, make_app
from oddrank.server.backend import Backend
from oddrank.server.logs import lines, log
from oddrank.server.metrics import Metrics
from oddrank.server.served import Defaults, Served
from oddrank.words import counted

DRAIN_SECONDS = 60
"""How long answers that are being given may go on after SIGTERM."""

_LAST_BYTES = 5
"""Seconds that connections get at the end, once nothing is computed for them any more."""

_LAST_WORDS = 1.0
"""Seconds between the loss of a rank and the end: whoever asks how it is gets the reason."""


class ServeOptions(msgspec.Struct, frozen=True):
    """Of the endpoint. names: that the model is served by; none: its directory's."""

    host: str = "127.0.0.1"
    port: int = 8000
    names: tuple[str, ...] = ()
    key: str | None = None
    log_json: bool = False


def serve(
    model: str | os.PathLike[str],
    plan: Plan,
    options: ServeOptions,
    serving: ServingOptions,
    *,
    dtype: str | None = None,
    device: str = "cpu",
    threads: int | None = None,
    experts: ExpertOptions = ExpertOptions(),  # noqa: B008 (immutable)
    on_ready: Callable[[str], object] | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT, which lets answers end first. A second one does not: SystemExit.

    on_ready: called with the URL once every rank is loaded. OddrankError for what keeps it from starting, and when a
    rank dies.
    """
    from oddrank.runtime.serving.worker import ServeJob, serve_rank

    experts.check(plan.model)
    serving.check()
    checkpoint = Checkpoint.open(model)
    served = describe(checkpoint, options.names, serving.length)
    listener = _listen(options.host, options.port)  # before the weights are read: a port in use is said at once
    job = ServeJob(
        str(checkpoint.path), plan.to_json(), dtype or default_dtype(checkpoint), end_tokens(checkpoint), experts,
        msgspec.structs.replace(serving, length=served.max_length),
    )  # fmt: skip
    metrics = Metrics()
    with listener, lines(options.log_json):
        ranks = Ranks(plan.tp, serve_rank, job, device=device, threads=threads, log_json=options.log_json)
        backend = Backend(ranks, metrics.stats)
        try:
            run_until_ended(State(served, backend, metrics, options.key), listener, on_ready)
        finally:
            backend.close()
        if backend.failure is not None and options.log_json:  # the command's own last word is no object
            log.error("%s", backend.failure)
    if backend.failure is not None:
        raise backend.failure


def describe(checkpoint: Checkpoint, names: tuple[str, ...], length: int | None) -> Served:
    """What is served. OddrankError where it has no tokenizer, or is asked for more tokens than the model takes."""
    view = ConfigView(checkpoint.config).text()
    trained = view.get_int("max_position_embeddings", 2048)
    if length is not None and length > trained:
        raise OddrankError(
            f"--max-model-len is {length} and the model is meant for {trained} tokens (max_position_embeddings). "
            "Give that many at most."
        )
    path = checkpoint.path / "generation_config.json"
    defaults = Defaults.of(read_object(path)) if path.is_file() else Defaults()
    vocab = view.require_int("vocab_size")
    return Served(
        names or (checkpoint.name,), load_tokenizer(Path(checkpoint.path)), vocab,
        length or trained, defaults,
    )  # fmt: skip


def run_until_ended(state: State, listener: socket.socket, on_ready: Callable[[str], object] | None) -> None:
    """The server on the listening socket, until a signal or the loss of a rank."""
    host, port = listener.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    config = uvicorn.Config(
        make_app(state), log_config=None, access_log=False, timeout_graceful_shutdown=_LAST_BYTES,
        timeout_keep_alive=30, lifespan="off",
    )  # fmt: skip
    server = _Server(config, state, lambda: on_ready and on_ready(url))
    server.run(sockets=[listener])
    if server.force_exit:
        sys.exit(128 + server.signals[-1])


class _Server(uvicorn.Server):
    """A first signal drains: new requests are refused, and the end comes when those there are have their answers. A
    second one is the end. uvicorn's own first signal would close the listening socket, so that nobody could ask how it
    is, and a second SIGTERM would do nothing."""

    def __init__(self, config: uvicorn.Config, state: State, on_ready: Callable[[], object]) -> None:
        super().__init__(config)
        self._state, self._on_ready, self._deadline = state, on_ready, 0.0
        self._tasks: list[asyncio.Task[None]] = []
        self.signals: list[int] = []

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        self._state.backend.start()
        self._tasks = [asyncio.create_task(self._tell_ready()), asyncio.create_task(self._end_when_lost())]
        await super().startup(sockets)

    async def _tell_ready(self) -> None:
        await self._state.backend.loaded.wait()
        if self._state.backend.failure is None:
            self._on_ready()

    async def _end_when_lost(self) -> None:
        await self._state.backend.lost.wait()
        await asyncio.sleep(_LAST_WORDS)
        self.should_exit = True

    def handle_exit(self, sig: int, frame: Any) -> None:
        self.signals.append(sig)
        if self._state.draining:
            self.should_exit = self.force_exit = True
            return
        log.info("ending; still being answered: %s", counted(self._state.backend.pending, "sequence"))
        self._state.draining, self._deadline = True, time.monotonic() + DRAIN_SECONDS

    async def on_tick(self, counter: int) -> bool:
        """Every tenth of a second; whether to end."""
        ended = await super().on_tick(counter)
        if not self._state.draining:
            return ended
        left = self._deadline - time.monotonic()
        # answers that are computed may still be on their way
        self.config.timeout_graceful_shutdown = max(_LAST_BYTES, int(left))
        return ended or left <= 0 or not self._state.backend.pending


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise OddrankError(
            f"Cannot listen on {host}:{port}: {error.strerror or error}. Choose another with --host and --port "
            "(--port 0 takes a free one)."
        ) from None
