"""Clients that leave a server of real sockets, whenever they can: nobody fails, and nothing is computed for them."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import pytest
import uvicorn
import uvloop
from server.fake_ranks import VOCAB, FakeRanks, tokenizer

from oddrank.runtime.serving.messages import Chosen, Stats, Update
from oddrank.server.app import State, make_app
from oddrank.server.backend import Backend
from oddrank.server.metrics import Metrics
from oddrank.server.served import Served

LOOPS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {
    "uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop,
}  # fmt: skip
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "whole": ("/v1/completions", {"prompt": "ab", "n": 2}),
    "stream": ("/v1/completions", {"prompt": "ab", "n": 2, "stream": True}),
    "chat": ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}], "stream": True}),
}
LARGE = 200_000
"""Bytes of a body, of which uvicorn takes no more until somebody reads them."""


class Server(NamedTuple):
    state: State
    ranks: FakeRanks
    address: tuple[str, int]

    def outcomes(self) -> dict[str, float]:
        (family,) = self.state.metrics.requests.collect()
        return {s.labels["outcome"]: s.value for s in family.samples if s.name.endswith("_total")}

    async def settled(self, requests: int) -> None:
        """Until so many are over."""

        async def over() -> None:
            while sum(self.outcomes().values()) < requests or self.state.backend.pending:
                await asyncio.sleep(0.001)

        await asyncio.wait_for(over(), 60)


@asynccontextmanager
async def server() -> AsyncIterator[Server]:
    """Its ranks tell one token and then no more."""
    ranks, metrics = FakeRanks(lambda _: [5, None]), Metrics()
    backend = Backend(ranks, metrics.stats)
    state = State(Served(("tiny",), tokenizer(), VOCAB, 1000), backend, metrics, None)
    backend.start()
    await asyncio.wait_for(backend.loaded.wait(), 60)
    served = uvicorn.Server(uvicorn.Config(make_app(state), log_config=None, lifespan="off", access_log=False))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        serving = asyncio.create_task(served._serve([listener]))
        while not served.started:
            await asyncio.sleep(0.001)
        yield Server(state, ranks, listener.getsockname())
        served.should_exit = True
        await asyncio.wait_for(serving, 60)
    backend.close()


def sent(path: str, body: dict[str, Any], size: int = 0) -> bytes:
    """A request as it goes over the line. size: of the body at least, of which the rest is white space."""
    data = json.dumps(body).encode().ljust(size)
    return f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(data)}\r\n\r\n".encode() + data


def leave(client: socket.socket, reset: bool) -> None:
    """reset: the server hears of an error rather than of the end."""
    if reset:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    client.close()


def complaints(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Of the server and of uvicorn."""
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING and r.name != "asyncio"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loop", LOOPS)
def test_before_anything_is_answered(loop: str, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    """What they sent of a request, and that they left, is there before the server looks for either, as on a machine
    with much to do."""

    async def work() -> None:
        small, large = sent(*KINDS[kind]), sent(*KINDS[kind], LARGE)
        head = small.index(b"\r\n\r\n") + 4
        cuts = (small[:head], small[:-1], small, large[:-1], large)
        async with server() as found:
            for count, (data, reset) in enumerate(((d, r) for d in cuts for r in (False, True)), 1):
                client = socket.create_connection(found.address)  # none of this lets the server run
                client.sendall(data)
                leave(client, reset)
                await found.settled(count)
                assert found.outcomes() == {"cancelled": count}, (len(data), reset, caplog.text)
            assert sorted(found.ranks.cancelled) == [s.id for s in found.ranks.submitted]

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(work())
    assert not complaints(caplog)


@pytest.mark.parametrize("reset", [False, True], ids=["ends", "resets"])
@pytest.mark.parametrize("kind", ["stream", "chat"])
@pytest.mark.parametrize("loop", LOOPS)
def test_in_the_middle_of_a_stream(loop: str, kind: str, reset: bool, caplog: pytest.LogCaptureFixture) -> None:
    """With more events to be sent at once than a closed connection takes."""

    async def work() -> None:
        async with server() as found:
            client = socket.create_connection(found.address)
            client.setblocking(False)
            await asyncio.get_running_loop().sock_sendall(client, sent(*KINDS[kind]))
            got = b""
            while got.count(b"logprobs") < 2:  # of chat the first tells the role
                got += await asyncio.get_running_loop().sock_recv(client, 1 << 16)
            leave(client, reset)
            for token in range(50):
                more = [Chosen(s.id, 5 + token) for s in found.ranks.submitted]
                found.ranks.inbox.put(Update(more, [], [], Stats(0, 1, 10, 3)))
            time.sleep(0.05)  # without the loop: all of it waits there together
            await found.settled(1)
            assert found.outcomes() == {"cancelled": 1}, caplog.text
            assert sorted(found.ranks.cancelled) == [s.id for s in found.ranks.submitted]

    with asyncio.Runner(loop_factory=LOOPS[loop]) as runner:
        runner.run(work())
    assert not complaints(caplog)
