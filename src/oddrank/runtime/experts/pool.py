"""Threads that compute experts: pinned to a core each, each computing by itself.

A pool that lost a thread says so: whoever waits for it gets an error and never waits for ever.
"""

import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures.thread import BrokenThreadPool
from typing import Generic, TypeVar

import torch

from oddrank.errors import OddrankError
from oddrank.runtime.topology import PinnedPool

T = TypeVar("T")

_LOOK = 0.5
"""Seconds between looks at whether the threads still live, while waiting for one."""


class Job(Generic[T]):
    """Something a pool does."""

    def __init__(self, pool: "ExpertPool", future: "Future[T]") -> None:
        self._pool, self._future = pool, future

    def result(self) -> T:
        """Waits for it: what the work returned, or raises what it raised. OddrankError where the pool is dead."""
        while True:
            try:
                return self._future.result(_LOOK)
            except TimeoutError:
                if not self._future.done():
                    self._pool.check()
                elif isinstance(self._future.exception(), TimeoutError):  # the work's own
                    raise
            except BrokenThreadPool as error:
                raise self._pool.dead(str(error)) from error


class ExpertPool:
    """A thread on each of `cpus` (logical CPU numbers).

    Work is taken in the order in which it was given; each piece runs on one thread, in the same way whatever the number
    of threads, so results do not depend on it.
    """

    def __init__(self, cpus: Sequence[int]) -> None:
        if not cpus:
            raise OddrankError("Experts on the CPU need at least one thread.")
        self.size = len(cpus)
        threads: list[threading.Thread] = []

        def begin() -> None:  # knows nothing of the pool, so that its threads end when the pool is forgotten
            threads.append(threading.current_thread())
            _compute_alone()

        self._threads = threads
        self._executor = PinnedPool(cpus, begin)

    def start(self, work: Callable[[], T]) -> Job[T]:
        """Have `work` done by the next free thread, in this thread's inference mode."""
        self.check()
        inference = torch.is_inference_mode_enabled()

        def run() -> T:
            with torch.inference_mode(inference):
                return work()

        try:
            return Job(self, self._executor.submit(run))
        except RuntimeError as error:
            raise self.dead(str(error)) from error

    def map(self, work: Iterable[Callable[[], T]]) -> list[T]:
        """All of it, in order."""
        return [job.result() for job in [self.start(one) for one in work]]

    def check(self) -> None:
        """OddrankError where a thread has ended."""
        ended = [thread.name for thread in self._threads if not thread.is_alive()]
        if ended:
            raise self.dead(f"ended: {', '.join(ended)}")

    def dead(self, why: str) -> OddrankError:
        return OddrankError(
            f"The {self.size} threads that compute this rank's experts cannot go on ({why}). What they were computing "
            "is lost; start the ranks again."
        )

    def close(self) -> None:
        """End the threads. Safe to call twice."""
        self._executor.shutdown(wait=False, cancel_futures=True)


_counts = threading.Lock()


def _compute_alone() -> None:
    """Let torch use one thread for what this thread asks of it.

    A thread takes torch's common count when it first asks for it, and setting its own sets the common one too: so this
    one asks first, and the common one is put back, from a thread that nobody computes with.
    """
    with _counts:
        common = torch.get_num_threads()
        torch.set_num_threads(1)
        if common != 1:
            _apart(lambda: torch.set_num_threads(common))


def _apart(work: Callable[[], object]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
