"""Who computes: ranks in processes of their own, spoken to from the server's event loop."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

from oddrank.errors import OddrankError
from oddrank.runtime.request import Sampling
from oddrank.runtime.serving.messages import Cancel, Chosen, Ready, Scored, Stats, Stop, Submit, Update

Event = Chosen | Scored


class RequestFailedError(OddrankError):
    """The ranks refused this request; others go on."""


class RanksLostError(OddrankError):
    """A rank died: nothing will be answered any more."""


class Line(Protocol):
    """Processes that compute: `oddrank.runtime.parallel.Ranks`, or what answers as it does."""

    size: int

    def send(self, message: Any, rank: int | None = None) -> None: ...
    def receive(self, timeout: float | None = None) -> tuple[int, Any]: ...
    def close(self) -> None: ...


class Backend:
    """One model on its ranks. `start` is called on the event loop; everything else after it, on the same.

    on_stats: called with the state of the ranks after each of their steps.
    """

    def __init__(self, line: Line, on_stats: Callable[[Stats], object] | None = None) -> None:
        self._line, self._on_stats = line, on_stats
        self._numbers = itertools.count(1)
        self._queues: dict[int, asyncio.Queue[Event | OddrankError]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None
        self._ready: list[Ready] = []
        self.loaded = asyncio.Event()
        """Set when every rank is loaded, or when one has failed."""
        self.lost = asyncio.Event()
        """Set when a rank has died; `failure` says how."""
        self.failure: OddrankError | None = None

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._thread = threading.Thread(target=self._listen, name="ranks", daemon=True)
        self._thread.start()

    @property
    def ready(self) -> list[Ready] | None:
        """What the ranks hold, once all are loaded."""
        return self._ready if len(self._ready) == self._line.size and self.failure is None else None

    @property
    def pending(self) -> int:
        """Requests that wait for something."""
        return len(self._queues)

    async def generate(
        self, tokens: list[int], sampling: Sampling, top: int | None = None, prompt_top: int | None = None
    ) -> AsyncIterator[Event]:
        """What becomes of a prompt, as it comes, to its end. Whoever stops asking cancels it.

        RequestFailedError where the ranks refuse it, RanksLostError where they die meanwhile.
        """
        if self.failure is not None:
            raise self.failure
        number = next(self._numbers)
        queue: asyncio.Queue[Event | OddrankError] = asyncio.Queue()
        self._queues[number] = queue
        finished = False
        try:
            self._send(Submit(number, tokens, sampling, top, prompt_top))
            while not finished:
                event = await queue.get()
                if isinstance(event, OddrankError):
                    finished = True
                    raise event
                finished = bool(event.finish)
                yield event
        finally:
            del self._queues[number]
            if not finished and self.failure is None:
                self._send(Cancel(number))

    def close(self) -> None:
        """End the ranks."""
        if self.failure is None:
            with contextlib.suppress(OddrankError):
                self._line.send(Stop(), 0)
        self._line.close()
        if self._thread is not None:
            self._thread.join(5)

    # The ranks' side ----------------------------------------------------------------------------------------

    def _send(self, message: Any) -> None:
        try:
            self._line.send(message, 0)
        except OddrankError as error:
            self._lose(error)
            assert self.failure is not None
            raise self.failure from None

    def _listen(self) -> None:
        assert self._loop is not None
        try:
            while True:
                _, message = self._line.receive()
                self._loop.call_soon_threadsafe(self._take, message)
        except OddrankError as error:
            with contextlib.suppress(RuntimeError):  # the loop has ended: nobody is left to tell
                self._loop.call_soon_threadsafe(self._lose, error)

    def _take(self, message: Any) -> None:
        if isinstance(message, Ready):
            self._ready.append(message)
            if len(self._ready) == self._line.size:
                self.loaded.set()
            return
        assert isinstance(message, Update)
        for failed in message.failed:
            self._give(failed.id, RequestFailedError(failed.message))
        for scored in message.scored:
            self._give(scored.id, scored)
        for chosen in message.chosen:
            self._give(chosen.id, chosen)
        if self._on_stats is not None:
            self._on_stats(message.stats)

    def _give(self, number: int, event: Event | OddrankError) -> None:
        queue = self._queues.get(number)
        if queue is not None:  # cancelled ones are not told any more
            queue.put_nowait(event)

    def _lose(self, error: OddrankError) -> None:
        if self.failure is not None:
            return
        self.failure = RanksLostError(str(error))
        for queue in self._queues.values():
            queue.put_nowait(self.failure)
        self.loaded.set()
        self.lost.set()
