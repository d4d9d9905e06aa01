"""Write a file front to back while its SHA-256 is computed and its pages go to disk, each on a thread of its own.

The hash reads back what was written, from the page cache, so the writer's buffers are free as soon as `write` returns
and no copy of the data is held. Hashing, writing and the disk overlap: the time of the slowest, not the sum.
"""

import errno
import hashlib
import os
import threading
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from oddrank.checkpoint.header import why
from oddrank.errors import OddrankError

Buffer = bytes | bytearray | memoryview | np.ndarray[Any, Any]

WRITE_CHUNK = 8 << 20
"""Bytes handed to one write call, so that the hash can start on them."""

HASH_CHUNK = 256 << 10
"""Bytes hashed at a time: small enough to stay in a core's cache between the read and the hash."""

FLUSH_STEP = 256 << 20
"""Bytes written before the disk is asked to start on them."""

MAX_LAG = 1 << 30
"""Bytes the hash may be behind the writes; beyond it they might leave the page cache and be read from the disk."""


class FileRecord(msgspec.Struct, frozen=True):
    """A finished file: its name (relative to its directory), its bytes, and their SHA-256 in hexadecimal."""

    name: str
    size: int
    sha256: str


def write_error(path: Path, error: OSError) -> OddrankError:
    """The error for a write that failed; a full disk is named as such."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        try:
            status = os.statvfs(path.parent)
            left = f"{status.f_bavail * status.f_frsize} bytes are free"
        except OSError:
            left = "no space is left"
        return OddrankError(
            f"The disk is full: {path} could not be written ({why(error)}; {left}). Free some space, or choose another "
            f"output directory, and run the same command again: finished files are kept."
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
        self._hashed = 0
        self._ended = False
        self._failure: OSError | None = None
        self._change = threading.Condition()
        self._flushed = 0
        self._threads: list[threading.Thread] = []

    def write(self, data: Buffer) -> None:
        """Append the bytes of a C-contiguous buffer, which may be changed as soon as this returns."""
        view = flat(data)
        for start in range(0, len(view), WRITE_CHUNK):
            part = view[start : start + WRITE_CHUNK]
            while part:
                try:
                    count = os.write(self._fd, part)
                except OSError as error:
                    raise write_error(self.path, error) from None
                part = part[count:]
                self._advance(count)

    def finish(self) -> FileRecord:
        """Put everything on the disk and return the file's record. The file is closed."""
        try:
            os.fsync(self._fd)
            self._end()
            if self._failure is not None:
                raise self._failure
            self._hash_to(self.written, bytearray(HASH_CHUNK))
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
            with self._change:
                self._failure = self._failure or OSError(errno.ECANCELED, "closed before it was finished")
        self._end()
        os.close(self._fd)
        self._fd = -1

    def __enter__(self) -> "HashedFile":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _advance(self, count: int) -> None:
        with self._change:
            self.written += count
            self._change.notify_all()
            # Small files are hashed at the end, by the caller.
            if not self._threads and self.written >= WRITE_CHUNK:
                for target in (self._run_hash, self._run_flush):
                    thread = threading.Thread(target=target, name=f"oddrank-{target.__name__}", daemon=True)
                    self._threads.append(thread)
                    thread.start()
            while self._threads and self.written - self._hashed > MAX_LAG and self._failure is None:
                self._change.wait()

    def _end(self) -> None:
        with self._change:
            self._ended = True
            self._change.notify_all()
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _run_hash(self) -> None:
        buffer = bytearray(HASH_CHUNK)
        while True:
            with self._change:
                self._change.wait_for(lambda: self._ended or self._failure or self.written > self._hashed)
                target = self.written
                if self._failure or target == self._hashed:
                    return
            try:
                self._hash_to(target, buffer)
            except OSError as error:
                self._fail(error)
                return

    def _hash_to(self, target: int, buffer: bytearray) -> None:
        view = memoryview(buffer)
        while self._hashed < target and self._failure is None:
            part = view[: min(len(view), target - self._hashed)]
            count = os.preadv(self._fd, [part], self._hashed)
            if not count:
                raise OSError(errno.EIO, "the file became shorter while it was written")
            self._hash.update(part[:count])
            with self._change:
                waiting = self.written - self._hashed > MAX_LAG
                self._hashed += count
                if waiting:
                    self._change.notify_all()

    def _run_flush(self) -> None:
        while True:
            with self._change:
                self._change.wait_for(
                    lambda: self._ended or self._failure or self.written - self._flushed >= FLUSH_STEP
                )
                if self._ended or self._failure:
                    return
                target = self.written
            try:
                os.fdatasync(self._fd)
            except OSError as error:
                self._fail(error)
                return
            self._flushed = target

    def _fail(self, error: OSError) -> None:
        with self._change:
            self._failure = error
            self._change.notify_all()
