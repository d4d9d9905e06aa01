"""From a model directory to an endpoint, and down again."""

from __future__ import annotations

import asyncio
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
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
from oddrank.server.logs import log, set_up
from oddrank.server.metrics import Metrics
from oddrank.server.served import Defaults, Served

DRAIN_SECONDS = 60
"""How long answers that are being given may go on after SIGTERM."""

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
    """Serve until SIGTERM or SIGINT, which lets answers end first (twice: which does not).

    on_ready: called with the URL once every rank is loaded. OddrankError for what keeps it from starting, and when a
    rank dies.
    """
    from oddrank.runtime.serving.worker import ServeJob, serve_rank

    experts.check(plan.model)
    serving.check()
    set_up(options.log_json)
    checkpoint = Checkpoint.open(model)
    served = describe(checkpoint, options.names, serving.length)
    listener = _listen(options.host, options.port)  # before the weights are read: a port in use is said at once
    job = ServeJob(
        str(checkpoint.path), plan.to_json(), dtype or default_dtype(checkpoint), end_tokens(checkpoint), experts,
        msgspec.structs.replace(serving, length=served.max_length),
    )  # fmt: skip
    metrics = Metrics()
    with listener:
        backend = Backend(Ranks(plan.tp, serve_rank, job, device=device, threads=threads), metrics.stats)
        try:
            run_until_ended(State(served, backend, metrics, options.key), listener, on_ready)
        finally:
            backend.close()
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

    @asynccontextmanager
    async def lifespan(_: Any) -> AsyncIterator[None]:
        state.backend.start()
        tasks = [asyncio.create_task(_tell_ready()), asyncio.create_task(_end_when_lost())]
        yield
        for task in tasks:
            task.cancel()

    async def _tell_ready() -> None:
        await state.backend.loaded.wait()
        if state.backend.failure is None and on_ready is not None:
            on_ready(url)

    async def _end_when_lost() -> None:
        await state.backend.lost.wait()
        log.error("%s", state.backend.failure)
        await asyncio.sleep(_LAST_WORDS)
        server.should_exit = True

    app = make_app(state, lifespan)
    config = uvicorn.Config(
        app, log_config=None, access_log=False, timeout_graceful_shutdown=DRAIN_SECONDS, timeout_keep_alive=30,
        lifespan="on",
    )  # fmt: skip
    server = _Server(config, state)
    server.run(sockets=[listener])


class _Server(uvicorn.Server):
    """A first signal drains: no new requests, and the end when those there are have their answers."""

    def __init__(self, config: uvicorn.Config, state: State) -> None:
        super().__init__(config)
        self._state = state

    def handle_exit(self, sig: int, frame: Any) -> None:
        if not self._state.draining:
            log.info("ending: %d sequences are still being answered", self._state.backend.pending)
        self._state.draining = True
        super().handle_exit(sig, frame)


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=1024)
    except OSError as error:
        raise OddrankError(
            f"Cannot listen on {host}:{port}: {error.strerror or error}. Choose another with --host and --port "
            "(--port 0 takes a free one)."
        ) from None
