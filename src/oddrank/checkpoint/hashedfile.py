"""Write a file front to back while its SHA-256 is computed.

What is written is gathered in pieces. Each piece is hashed by one thread and put on the disk by another while the
caller fills the next, so the time is the slowest of the three and not their sum. The disk gets the pieces directly
(O_DIRECT) where the file system can: copying a checkpoint through the page cache costs more processor time than
anything else here but the hash, and drives out of memory what others read.
"""

import errno
import fcntl
import hashlib
import mmap
import os
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from oddrank.checkpoint.header import why
from oddrank.errors import OddrankError

Buffer = bytes | bytearray | memoryview | np.ndarray[Any, Any]

PIECE = 4 << 20
"""Bytes of a piece; a multiple of every file system's block. Smaller files are written by the caller, at once."""

PIECES = 4
"""Pieces in memory: one being filled, the others waiting for the hash or the disk."""

FLUSH_STEP = 256 << 20
"""Bytes in the page cache, where they have to go through it, before the disk is asked to start on them."""


class FileRecord(msgspec.Struct, frozen=True):
    """A finished file: its name (relative to its directory), its bytes, and their SHA-256 in hexadecimal."""

    name: str
    size: int
    sha256: str


def write_error(path: Path, error: OSError, *, alone: bool = False) -> OddrankError:
    """The error for a write that failed; a full disk is named as such. alone: the file is not one of several that a
    second run continues."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        try:
            status = os.statvfs(path.parent)
            left = f"{status.f_bavail * status.f_frsize} bytes are free"
        except OSError:
            left = "no space is left"
        return OddrankError(
            f"The disk is full: {path} could not be written ({why(error)}; {left}). Free some space, or choose another "
            + ("place." if alone else "output directory, and run the same command again: finished files are kept.")
        )
    return OddrankError(f"{path} cannot be written: {why(error)}.")


def flat(data: Buffer) -> memoryview:
    """The bytes of a C-contiguous buffer of any dtype and shape."""
    view = data.data if isinstance(data, np.ndarray) else memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")


class HashedFile:
    """A new file at `path`, written once from front to back. Not safe for use by two threads.

    Use as a context manager: leaving it normally without `finish`, or by an exception, closes the file unfinished.
    OddrankError for everything that the file system refuses.
    """

    def __init__(self, path: Path, name: str | None = None) -> None:
        self.path = path
        self.name = path.name if name is None else name
        self.written = 0
        flags = os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            self._fd = os.open(path, flags, 0o666)
        except OSError as error:
            raise write_error(path, error) from None
        self._hash = hashlib.sha256()
        self._direct = False
        self._small = bytearray()  # what is not yet a whole piece, until there is one
        self._pieces: list[mmap.mmap] = []
        self._filled = 0  # bytes in the piece being filled
        # Pieces handed over, hashed, stored: their numbers from the beginning of the file.
        self._handed = self._hashed = self._stored = 0
        self._ended = False
        self._failure: OSError | None = None
        self._change = threading.Condition()
        self._threads: list[threading.Thread] = []

    def write(self, data: Buffer) -> None:
        """Append the bytes of a C-contiguous buffer, which may be changed as soon as this returns."""
        view = flat(data)
        self.written += len(view)
        if not self._pieces and self.written <= PIECE:
            self._small += view
            return
        if not self._pieces:
            self._start()
            small, self._small = self._small, bytearray()
            self._fill(memoryview(small))
        self._fill(view)

    def finish(self) -> FileRecord:
        """Put everything on the disk and return the file's record. The file is closed."""
        try:
            self._end()
            if self._failure is not None:
                raise self._failure
            rest = memoryview(self._piece())[: self._filled] if self._pieces else memoryview(self._small)
            self._hash.update(rest)
            self._set_direct(False)
            self._store(rest, self.written - len(rest))
            os.fsync(self._fd)
        except OSError as error:
            raise write_error(self.path, error) from None
        finally:
            self.close()
        return FileRecord(self.name, self.written, self._hash.hexdigest())

    def close(self) -> None:
        """Close the file as it is. Nothing happens after `finish`."""
        if self._fd < 0:
            return
        if not self._ended:
            self._fail(OSError(errno.ECANCELED, "closed before it was finished"))
        self._end()
        os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> "HashedFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self) -> None:
        """The file is large: pieces, and a thread each for the hash and the disk."""
        self._pieces = [mmap.mmap(-1, PIECE) for _ in range(PIECES)]  # page-aligned, as O_DIRECT needs it
        self._set_direct(True)
        for target in (self._run_hash, self._run_store):
            thread = threading.Thread(target=target, name=f"oddrank-{target.__name__}", daemon=True)
            self._threads.append(thread)
            thread.start()

    def _fill(self, view: memoryview) -> None:
        while view:
            count = min(len(view), PIECE - self._filled)
            # numpy copies without holding the other threads up
            target = np.frombuffer(self._piece(), np.uint8, count, self._filled)
            target[:] = np.frombuffer(view, np.uint8, count)
            self._filled += count
            view = view[count:]
            if self._filled == PIECE:
                self._hand_over()

    def _piece(self) -> mmap.mmap:
        return self._pieces[self._handed % PIECES]

    def _hand_over(self) -> None:
        """Give the full piece to the threads, and wait until the next one is free."""
        with self._change:
            self._handed += 1
            self._filled = 0
            self._change.notify_all()
            self._change.wait_for(lambda: self._failure or self._handed - min(self._hashed, self._stored) < PIECES)
            if self._failure is not None:
                raise write_error(self.path, self._failure)

    def _end(self) -> None:
        with self._change:
            self._ended = True
            self._change.notify_all()
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _run_hash(self) -> None:
        while self._wait(lambda: self._hashed):
            self._hash.update(self._pieces[self._hashed % PIECES])
            with self._change:
                self._hashed += 1
                self._change.notify_all()

    def _run_store(self) -> None:
        flushed = 0
        while self._wait(lambda: self._stored):
            at = self._stored * PIECE
            try:
                self._store(memoryview(self._pieces[self._stored % PIECES]), at)
            except OSError as error:
                self._fail(error)
                return
            if not self._direct and at + PIECE - flushed >= FLUSH_STEP:
                # makes the disk start on dirty pages, and does not wait for it
                os.posix_fadvise(self._fd, flushed, at + PIECE - flushed, os.POSIX_FADV_DONTNEED)
                flushed = at + PIECE
            with self._change:
                self._stored += 1
                self._change.notify_all()

    def _wait(self, done: Callable[[], int]) -> bool:
        """Wait for a piece beyond those `done`; False when there will be none."""
        with self._change:
            self._change.wait_for(lambda: self._failure or self._ended or self._handed > done())
            return self._failure is None and self._handed > done()

    def _store(self, view: memoryview, at: int) -> None:
        while view:
            try:
                count = os.pwrite(self._fd, view, at)
            except OSError as error:
                if error.errno != errno.EINVAL or not self._direct:
                    raise
                count = 0
            if count < len(view):
                # The file system takes no direct writes after all, or the rest of this one is not whole blocks.
                self._set_direct(False)
            view, at = view[count:], at + count

    def _set_direct(self, on: bool) -> None:
        """Write around the page cache from now on, where the file system can, or through it."""
        direct = getattr(os, "O_DIRECT", 0)
        if on == self._direct or not direct:
            return
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL) & ~direct
        try:
            fcntl.fcntl(self._fd, fcntl.F_SETFL, flags | direct if on else flags)
        except OSError:
            return
        self._direct = on

    def _fail(self, error: OSError) -> None:
        with self._change:
            self._failure = self._failure or error
            self._change.notify_all()
