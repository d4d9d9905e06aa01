"""The rank's side of a launched process, and what both sides say to each other."""

import logging
import os
import pickle
import select
import threading
import traceback
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from oddrank.errors import CheckFailedError, OddrankError
from oddrank.runtime.logs import JsonFormatter
from oddrank.runtime.topology import Placement, clamp

MESSAGE, RESULT, ERROR = b"m", b"r", b"e"  # the first byte of what a rank sends

log = logging.getLogger(__name__)


class Start(msgspec.Struct, frozen=True):
    """What a rank process is to do."""

    rank: int
    size: int
    rendezvous: str
    device: str
    placement: Placement
    call: bytes  # the pickled target and its arguments
    log_json: bool = False


class Failure(msgspec.Struct, frozen=True):
    """Why a rank's target raised."""

    reason: str  # one line
    traceback: str
    consequence: bool  # another rank was lost: that one's failure is the cause
    check_failed: bool


class Link:
    """A rank's line to its launcher.

    Values are pickled plainly: a `Connection` of its own accord would send tensors as handles of shared
    memory, which go when the rank does.
    """

    def __init__(self, line: Connection) -> None:
        self._line = line

    def send(self, message: Any) -> None:
        """Send `message`, which `Ranks.receive` returns."""
        self._line.send_bytes(MESSAGE + pickle.dumps(message))

    def receive(self, timeout: float | None = None) -> Any:
        """The launcher's next message; `TimeoutError` if none comes within `timeout` s."""
        if not self._line.poll(timeout):
            raise TimeoutError(f"the launcher sent no message in {timeout} s")
        return pickle.loads(self._line.recv_bytes())

    def waiting(self) -> bool:
        """Whether `receive` would return at once."""
        return self._line.poll(0)


def main(line: Connection, lifeline: int) -> None:
    """Run one rank: called in the new process by the launcher's start-up code."""
    os.set_inheritable(lifeline, False)
    os.set_inheritable(line.fileno(), False)
    threading.Thread(target=_die_with_launcher, args=(lifeline, os.getppid()), daemon=True).start()
    start: Start = pickle.loads(line.recv_bytes())
    group = None
    _log_to_stderr(start.rank, start.size, start.log_json)
    kept = clamp(start.placement)  # before torch starts threads: they inherit it
    log.info("%s%s", start.placement.describe(), "" if kept else "; not pinned, which this system does not allow")
    try:
        import torch

        from oddrank.runtime.parallel.dist import connect

        torch.set_num_threads(len(start.placement.threads))
        target, args = pickle.loads(start.call)
        group = connect(start.rank, start.size, start.rendezvous, start.device)
        result = target(group, Link(line), *args)
        report = RESULT + pickle.dumps(result)
    except BaseException as error:
        report = ERROR + pickle.dumps(_failure(error))
    # The cause reaches the launcher before the other ranks learn from the group that this one is gone.
    line.send_bytes(report)
    if group is not None:
        group.close()
    line.close()


def _log_to_stderr(rank: int, size: int, as_json: bool) -> None:
    """oddrank's log records, each with its rank; ODDRANK_LOG names the least level that is shown (default: info)."""
    level = os.environ.get("ODDRANK_LOG", "").upper()
    handler = logging.StreamHandler()
    plain = logging.Formatter(f"rank {rank} of {size}: %(message)s")
    handler.setFormatter(JsonFormatter(rank=rank, ranks=size) if as_json else plain)
    ours = logging.getLogger("oddrank")
    ours.addHandler(handler)
    ours.setLevel(level if level in logging.getLevelNamesMapping() else logging.INFO)


def _failure(error: BaseException) -> Failure:
    from oddrank.runtime.parallel.group import PeerLostError

    known = isinstance(error, OddrankError)
    reason = str(error) if known else traceback.format_exception_only(error)[-1].strip()
    return Failure(
        reason=reason,
        traceback="".join(traceback.format_exception(error)).rstrip(),
        consequence=isinstance(error, PeerLostError),
        check_failed=isinstance(error, CheckFailedError),
    )


def _die_with_launcher(lifeline: int, launcher: int) -> None:
    """End this process when the launcher's end of the pipe closes, which its death does.

    A copy of that end in some other process of the launcher's would keep it open, hence the second look. (The
    kernel's parent-death signal is no help: it goes by the thread that started the child.)
    """
    poll = select.poll()
    poll.register(lifeline, select.POLLIN)
    while not poll.poll(2000):
        if os.getppid() != launcher:
            break
    os._exit(1)
