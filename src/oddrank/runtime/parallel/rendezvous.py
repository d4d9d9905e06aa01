"""How ranks that only know a word in common find each other. Imports no torch unless it must.

"local:NAME" is an abstract Unix socket of this machine, which leaves nothing behind. "tcp://HOST:PORT" is a
torch.distributed TCPStore that rank 0 serves.
"""

import contextlib
import json
import os
import platform
import secrets
import socket
import struct
import time
from abc import ABC, abstractmethod
from typing import Any, Self

from oddrank.errors import OddrankError

TIMEOUT = 300.0  # s; importing torch on a loaded machine takes a while
_ABSTRACT_SOCKETS = platform.system() == "Linux"


def local_rendezvous() -> str:
    """A rendezvous that nobody else uses, for ranks of this machine."""
    if _ABSTRACT_SOCKETS:
        return f"local:oddrank-{os.getpid()}-{secrets.token_hex(8)}"
    with socket.socket() as probe:  # without abstract sockets: a port that was free a moment ago
        probe.bind(("127.0.0.1", 0))
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


class Meeting(ABC):
    """`size` ranks that tell each other JSON values, any number of rounds."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size

    @abstractmethod
    def exchange(self, value: Any) -> list[Any]:
        """Every rank's `value`, in rank order."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def meet(rank: int, size: int, rendezvous: str, timeout: float = TIMEOUT) -> Meeting:
    """Join the other ranks at `rendezvous`; raises `OddrankError` if they do not come within `timeout` s."""
    kind, _, where = rendezvous.partition(":")
    if kind == "local" and where and _ABSTRACT_SOCKETS:
        return SocketMeeting(rank, size, where, timeout)
    host, _, port = where.removeprefix("//").rpartition(":")
    if kind == "tcp" and where.startswith("//") and host and port.isdigit():
        return StoreMeeting(rank, size, host, int(port), timeout)
    raise OddrankError(
        f"Ranks cannot meet at {rendezvous!r}: a rendezvous is tcp://HOST:PORT, HOST being rank 0's machine, "
        "or, on Linux, local:NAME for ranks of one machine."
    )


class SocketMeeting(Meeting):
    """Rank 0 listens, every other rank connects; only processes of the same user are let in."""

    def __init__(self, rank: int, size: int, name: str, timeout: float) -> None:
        super().__init__(rank, size)
        self._name = name
        self._deadline = time.monotonic() + timeout
        self._links: dict[int, _Link] = {}
        try:
            self._listen() if rank == 0 else self._connect()
        except BaseException:
            self.close()
            raise

    def _listen(self) -> None:
        with socket.socket(socket.AF_UNIX) as listener:
            try:
                listener.bind(f"\0{self._name}")
            except OSError as error:
                raise OddrankError(f"Rank 0 cannot listen at local:{self._name}: {error}.") from None
            listener.listen(self.size)
            while len(self._links) < self.size - 1:
                listener.settimeout(max(0.01, self._deadline - time.monotonic()))
                try:
                    link = _Link(listener.accept()[0], self._deadline)
                except TimeoutError:
                    missing = sorted(set(range(1, self.size)) - set(self._links))
                    raise OddrankError(
                        f"Ranks {missing} of {self.size} did not come to local:{self._name} in time."
                    ) from None
                if not link.same_user():
                    link.close()
                    continue
                self._links[link.receive()] = link

    def _connect(self) -> None:
        while True:
            connection = socket.socket(socket.AF_UNIX)
            try:
                connection.connect(f"\0{self._name}")
                break
            except OSError as error:  # rank 0 is not there yet
                connection.close()
                if time.monotonic() > self._deadline:
                    message = f"Rank {self.rank} found no rank 0 at local:{self._name} in time: {error}."
                    raise OddrankError(message) from None
                time.sleep(0.005)
        link = self._links[0] = _Link(connection, self._deadline)
        if not link.same_user():
            raise OddrankError(f"The process at local:{self._name} belongs to another user.")
        link.send(self.rank)

    def exchange(self, value: Any) -> list[Any]:
        try:
            if self.rank:
                self._links[0].send(value)
                everyone: list[Any] = self._links[0].receive()
                return everyone
            everyone = [value] + [self._links[rank].receive() for rank in range(1, self.size)]
            for link in self._links.values():
                link.send(everyone)
            return everyone
        except (OSError, EOFError) as error:
            raise OddrankError(f"Rank {self.rank} lost its peers at local:{self._name}: {error or 'closed'}.") from None

    def close(self) -> None:
        for link in self._links.values():
            link.close()


class _Link:
    """One connection, a line of JSON a message."""

    def __init__(self, connection: socket.socket, deadline: float) -> None:
        connection.settimeout(max(0.01, deadline - time.monotonic()))
        self._connection = connection
        self._lines = connection.makefile("rb")

    def same_user(self) -> bool:
        layout = struct.Struct("3i")  # struct ucred: pid, uid, gid
        peer = self._connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, layout.size)
        uid: int = layout.unpack(peer)[1]
        return uid == os.getuid()

    def send(self, value: Any) -> None:
        self._connection.sendall(json.dumps(value).encode() + b"\n")

    def receive(self) -> Any:
        line = self._lines.readline()
        if not line:
            raise EOFError("the connection was closed")
        return json.loads(line)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._lines.close()
            self._connection.close()


class StoreMeeting(Meeting):
    """Through a TCPStore, for ranks that may be on several machines."""

    def __init__(self, rank: int, size: int, host: str, port: int, timeout: float) -> None:
        super().__init__(rank, size)
        try:
            self.store = tcp_store(host, port, size, rank == 0, timeout)
        except RuntimeError as error:
            raise OddrankError(
                f"Rank {rank} of {size} cannot meet the others at tcp://{host}:{port}: {str(error).splitlines()[0]}"
            ) from None
        self._round = 0

    def exchange(self, value: Any) -> list[Any]:
        self._round += 1
        keys = [f"oddrank/{self._round}/{rank}" for rank in range(self.size)]
        self.store.set(keys[self.rank], json.dumps(value))
        try:
            return [json.loads(self.store.get(key)) for key in keys]
        except RuntimeError as error:
            message = f"Rank {self.rank} waited in vain for its peers: {str(error).splitlines()[0]}"
            raise OddrankError(message) from None

    def close(self) -> None:
        """The store goes when nothing refers to it any more: ranks may still be reading from rank 0's."""


def tcp_store(host: str, port: int, size: int, serve: bool, timeout: float = TIMEOUT) -> Any:
    """A torch.distributed TCPStore for `size` processes; port 0 takes a free one (its `port` says which)."""
    from datetime import timedelta

    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    return TCPStore(host, port, size, serve, timedelta(seconds=timeout), wait_for_workers=False)
