"""Starting the rank processes and watching over them. Imports no torch: only the ranks pay for that."""

import contextlib
import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any, ParamSpec, Self, TypeVar

from oddrank.errors import CheckFailedError, OddrankError
from oddrank.runtime.parallel.child import ERROR, MESSAGE, RESULT, Failure, Start
from oddrank.runtime.parallel.rendezvous import local_rendezvous
from oddrank.runtime.topology import Placement, place, read_topology
from oddrank.runtime.topology.limits import quota

P = ParamSpec("P")
R = TypeVar("R")

# A terminal sends Ctrl-C, and supervisors send SIGTERM, to every process of a command; when ranks end is the launcher's
# to say. The signals are blocked from their first instruction on.
_LAUNCHERS = frozenset((signal.SIGINT, signal.SIGTERM))

# The child's first message is its module path, so that it finds what this process finds.
_BOOT = """
import signal, sys
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
signal.pthread_sigmask(signal.SIG_UNBLOCK, (signal.SIGINT, signal.SIGTERM))
from multiprocessing.connection import Connection
link = Connection(int(sys.argv[2]))
sys.path[:] = __import__("pickle").loads(link.recv_bytes())
from oddrank.runtime.parallel.child import main
main(link, int(sys.argv[3]))
"""
_GRACE = 10.0  # s for a rank that has given its result to leave
_CAUSE = 1.0  # s to wait for the cause where a rank only reports that it lost a peer


def run_ranks(
    size: int, target: Callable[..., R], *args: Any, device: str = "cpu", threads: int | None = None
) -> list[R]:
    """Run `target(group, link, *args)` in `size` processes; their results in rank order. See `Ranks`."""
    with Ranks(size, target, *args, device=device, threads=threads) as ranks:
        return ranks.join()


class Ranks:
    """`size` processes that each run `target(group, link, *args)`, and a line to each of them.

    `target` is a function of an importable module, and it, `args`, messages and results can be pickled.
    `group` is what `connect` gives; `link` is the rank's end of the line (`child.Link`). With `device`
    "cuda", rank r is on cuda:r. Every rank is kept on a slice of the cores of its own (`placements`, see
    `topology.place`) and computes with `threads` threads there, by default one a core. What ranks print goes to
    standard error, and so do their logs (`log_json`: each line an object): each says where it computes.

    A rank that raises or dies ends all the others at once, and whatever this process then does with the
    `Ranks` raises one `OddrankError` that names the rank and says what happened to it. Leaving the `with`
    block ends ranks that still run; so does the death, of whatever kind, of this process.
    """

    def __init__(
        self,
        size: int,
        target: Callable[..., Any],
        *args: Any,
        device: str = "cpu",
        threads: int | None = None,
        log_json: bool = False,
    ) -> None:
        if size < 1:
            raise OddrankError(f"At least one rank is needed, and {size} were asked for.")
        self.size = size
        self.placements: tuple[Placement, ...] = place(read_topology(), size, threads, quota())
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lines: list[Connection] = []
        self._results: dict[int, bytes] = {}
        self._inbox: queue.SimpleQueue[tuple[int, bytes] | None] = queue.SimpleQueue()
        self._failure: OddrankError | None = None
        self._closing = False
        self._lifeline, self._lifeline_end = os.pipe()
        call = _pickled_call(target, args)
        rendezvous = local_rendezvous()
        try:
            for rank in range(size):
                where = f"cuda:{rank}" if device == "cuda" else device
                self._start(Start(rank, size, rendezvous, where, self.placements[rank], call, log_json))
        except BaseException:
            self._kill()
            raise
        finally:
            os.close(self._lifeline)
        self._watcher = threading.Thread(target=self._watch, name="rank watcher", daemon=True)
        self._watcher.start()

    def _start(self, start: Start) -> None:
        ours, theirs = _pair()
        count = str(len(start.placement.threads))
        threads = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), count)
        title = f"oddrank rank {start.rank} of {self.size}"
        fds = (theirs.fileno(), self._lifeline)
        before = signal.pthread_sigmask(signal.SIG_BLOCK, _LAUNCHERS)
        try:
            process = subprocess.Popen(
                [sys.executable, "-c", _BOOT, title, *map(str, fds)],
                pass_fds=fds,
                stdin=subprocess.DEVNULL,
                stdout=2,  # a command's own output, JSON perhaps, stays apart
                env=os.environ | threads,
            )
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            theirs.close()
        self._processes.append(process)
        self._lines.append(ours)
        with contextlib.suppress(OSError):  # one that dies at once: the watcher will say how
            ours.send_bytes(pickle.dumps(sys.path))
            ours.send_bytes(pickle.dumps(start))

    # For the caller -----------------------------------------------------------------------------------------

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    def send(self, message: Any, rank: int | None = None) -> None:
        """Send `message` to `rank`, or to every rank."""
        self._raise_failure()
        data = pickle.dumps(message)
        for line in self._lines if rank is None else [self._lines[rank]]:
            try:
                line.send_bytes(data)
            except OSError:  # the rank is gone; the watcher knows why, or is about to
                self._watcher.join(_GRACE)
                self._raise_failure()
                raise OddrankError("A rank that has returned was sent a message.") from None

    def receive(self, timeout: float | None = None) -> tuple[int, Any]:
        """The next message of any rank, with that rank; `TimeoutError` if none comes within `timeout` s."""
        try:
            item = self._inbox.get(timeout=timeout)
        except queue.Empty:
            self._raise_failure()
            raise TimeoutError(f"no rank sent a message in {timeout} s") from None
        if item is None:
            self._inbox.put(None)
            self._raise_failure()
            raise OddrankError("Every rank has returned, so no more messages will come.")
        return item[0], pickle.loads(item[1])

    def join(self) -> list[Any]:
        """Wait until every rank has returned; their results in rank order."""
        self._watcher.join()
        self._raise_failure()
        return [pickle.loads(self._results[rank]) for rank in range(self.size)]

    def close(self) -> None:
        """End the ranks that still run, and wait for them."""
        self._closing = True
        self._kill()
        self._watcher.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # The watcher --------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        running = {line: rank for rank, line in enumerate(self._lines)}
        secondary: OddrankError | None = None
        deadline: float | None = None
        while running:
            patience = None if deadline is None else max(0.0, deadline - time.monotonic())
            ready = wait(list(running), patience)
            if not ready:  # no cause has come forward
                break
            for line in ready:
                assert isinstance(line, Connection)
                rank = running[line]
                failure = self._read(rank, line, running)
                if failure is None:
                    continue
                error, consequence = failure
                if not consequence:
                    self._fail(error)
                    return
                secondary = secondary or error
                deadline = deadline or time.monotonic() + _CAUSE
        self._fail(secondary)

    def _read(self, rank: int, line: Connection, running: dict[Connection, int]) -> tuple[OddrankError, bool] | None:
        """Take what `rank` sent. A failure, and whether it is only the consequence of another rank's."""
        try:
            data = line.recv_bytes()
        except (EOFError, OSError):
            del running[line]
            if rank in self._results:
                return None
            return OddrankError(f"Rank {rank} of {self.size} {self._fate(rank)}."), False
        kind, body = data[:1], data[1:]
        if kind == MESSAGE:
            self._inbox.put((rank, body))
        elif kind == RESULT:
            self._results[rank] = body
        elif kind == ERROR:
            del running[line]
            failure: Failure = pickle.loads(body)
            refused = CheckFailedError if failure.check_failed else OddrankError
            error = refused(f"Rank {rank} of {self.size} failed: {failure.reason}")
            error.add_note(failure.traceback)
            return error, failure.consequence
        return None

    def _fate(self, rank: int) -> str:
        process = self._processes[rank]
        try:
            code = process.wait(_GRACE)
        except subprocess.TimeoutExpired:
            return f"(pid {process.pid}) closed its line to the launcher"
        if code >= 0:
            return f"(pid {process.pid}) exited with code {code} before it returned"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hint = ", as the kernel does when memory runs out" if -code == signal.SIGKILL else ""
        return f"(pid {process.pid}) was killed by {name}{hint}"

    def _fail(self, error: OddrankError | None) -> None:
        """The end of the watch: with an error, the ranks' too; without one they are left to leave."""
        if error is not None:
            if not self._closing:
                self._failure = error
            self._kill()
        end = time.monotonic() + _GRACE
        for process in self._processes:
            try:
                process.wait(max(0.0, end - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._inbox.put(None)
        os.close(self._lifeline_end)
        for line in self._lines:
            line.close()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()  # nothing a rank holds needs saving; does nothing to one that has been waited for

    def _raise_failure(self) -> None:
        if self._failure is not None:
            raise self._failure


def _pickled_call(target: Callable[..., Any], args: tuple[Any, ...]) -> bytes:
    if target.__module__ == "__main__":
        raise OddrankError(f"A rank process cannot import {target.__qualname__} from a script; it must be in a module.")
    return pickle.dumps((target, args))


def _pair() -> tuple[Connection, Connection]:
    import socket

    ours, theirs = socket.socketpair()
    return Connection(ours.detach()), Connection(theirs.detach())
