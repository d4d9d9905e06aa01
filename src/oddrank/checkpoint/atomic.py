"""An output directory that appears under its name only when it is complete, and that an interrupted run resumes.

The work happens beside it, in `.NAME.partial/`: `files/` grows into the result, `journal` has a line for every finished
file, `lock` keeps a second run out. `finish` renames `files/` to NAME, so no state in between can be mistaken for it.
"""

import errno
import fcntl
import os
import shutil
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import TracebackType

import msgspec

from oddrank.checkpoint.hashedfile import Buffer, FileRecord, HashedFile, write_error
from oddrank.checkpoint.header import show, why
from oddrank.checkpoint.writer import Entry, SafetensorsWriter
from oddrank.errors import OddrankError

COPY_CHUNK = 4 << 20
"""Bytes of a carried file read at a time."""


class _Head(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    journal: int
    fingerprint: str


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    name: str
    size: int
    sha256: str
    mtime_ns: int


class AtomicDirectory:
    """The directory `final`, being written.

    Use as a context manager: leaving it without `finish` keeps the partial work.

    fingerprint: what the result is made from (plan, source). Work of another fingerprint is never continued: it is
    refused, or thrown away with `restart`.
    OddrankError where `final` exists and is not an empty directory, where another process is writing it, and for
    everything the file system refuses.
    """

    def __init__(self, final: str | os.PathLike[str], fingerprint: str, restart: bool = False) -> None:
        try:
            self.final = Path(os.path.realpath(final))
            self._refuse_existing()
            self.partial = self.final.parent / f".{self.final.name}.partial"
            self.files = self.partial / "files"
            self._journal_path = self.partial / "journal"
            self.finished: dict[str, FileRecord] = {}
            self._claimed: set[str] = set()
            self._journal = -1
            self._lock = _lock(self.partial, self.final)
        except (OSError, ValueError) as error:
            reason = why(error) if isinstance(error, OSError) else str(error)
            raise OddrankError(f"{show(str(final))} cannot be written: {reason}.") from None
        try:
            self._resume(fingerprint, restart)
        except OSError as error:
            self.close()
            raise write_error(self.partial, error) from None
        except BaseException:
            self.close()
            raise

    def done(self, name: str) -> FileRecord | None:
        """The record of a file that an earlier run finished, None where it has to be written."""
        record = self.finished.get(name)
        if record is not None:
            self._claimed.add(name)
        return record

    def require_space(self, size: int) -> None:
        """OddrankError unless `size` more bytes fit on the disk, as far as it can be told in advance."""
        try:
            status = os.statvfs(self.partial)
        except OSError:
            return
        free = status.f_bavail * status.f_frsize
        if size > free:
            raise OddrankError(
                f"The disk of {self.final} has {free} bytes free, and {size} are needed. Free {size - free} bytes, or "
                f"choose another output directory."
            )

    @contextmanager
    def safetensors(
        self, name: str, entries: Iterable[Entry], metadata: Mapping[str, str] | None = None
    ) -> Iterator[SafetensorsWriter]:
        """Write the safetensors file `name`; it is finished and recorded when the block ends normally."""
        with SafetensorsWriter(self._place(name), entries, metadata, name) as writer:
            yield writer
            self._record(writer.finish())

    def write_bytes(self, name: str, data: Buffer) -> FileRecord:
        """Write a small file at once."""
        with HashedFile(self._place(name), name) as file:
            file.write(data)
            return self._record(file.finish())

    def copy(self, name: str, source: str | os.PathLike[str]) -> FileRecord:
        """Write a copy of the file `source`."""
        fd = -1
        try:
            # O_NONBLOCK: a named pipe must not hang here; it has no effect on a regular file.
            fd = os.open(source, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
            if not stat.S_ISREG(os.fstat(fd).st_mode):
                raise OddrankError(f"{source} cannot be copied: it is not a regular file.")
            with HashedFile(self._place(name), name) as file:
                buffer = memoryview(bytearray(COPY_CHUNK))
                while count := os.readv(fd, [buffer]):
                    file.write(buffer[:count])
                return self._record(file.finish())
        except OSError as error:
            raise OddrankError(f"{source} cannot be read: {why(error)}.") from None
        finally:
            if fd >= 0:
                os.close(fd)

    def finish(self) -> Path:
        """Give the directory its name, with exactly the files of this run and those it found `done`."""
        try:
            self._keep_only(self._claimed)
            self._refuse_existing()
            os.rename(self.files, self.final)
            _sync_directory(self.final.parent)
        except OSError as error:
            if error.errno in (errno.ENOTEMPTY, errno.EEXIST, errno.ENOTDIR):
                self._refuse_existing()
            raise write_error(self.final, error) from None
        # The result is in place: what is left over can do no harm but stay.
        with suppress(OSError):
            shutil.rmtree(self.partial)
        self.close()
        return self.final

    def close(self) -> None:
        """Let another run continue. Finished files stay in the partial directory."""
        for fd in (self._journal, self._lock):
            if fd >= 0:
                os.close(fd)
        self._journal = self._lock = -1

    def __enter__(self) -> "AtomicDirectory":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _refuse_existing(self) -> None:
        try:
            if not os.listdir(self.final):
                return
        except FileNotFoundError:
            return
        except NotADirectoryError:
            what = self.final if os.path.lexists(self.final) else self.final.parent
            raise OddrankError(f"{what} exists and is not a directory. Choose another name.") from None
        raise OddrankError(
            f"{self.final} exists and is not empty; nothing in it is touched. Remove it, or choose another name."
        )

    def _resume(self, fingerprint: str, restart: bool) -> None:
        head, lines = _read_journal(self._journal_path)
        if head is not None and head.fingerprint != fingerprint and not restart:
            raise OddrankError(
                f"{self.partial} holds an unfinished run with {len(lines)} finished files, made from another plan or "
                f"another checkpoint, so it cannot be continued. Ask for a restart (--restart), or remove that "
                "directory."
            )
        if head is None or restart:
            lines = []
        self.files.mkdir(exist_ok=True)
        keep = []
        for line in lines:
            path = self.files / line.name
            with suppress(OSError):
                status = path.lstat()
                if (status.st_size, status.st_mtime_ns) == (line.size, line.mtime_ns) and path.is_file():
                    keep.append(line)
        self.finished = {line.name: FileRecord(line.name, line.size, line.sha256) for line in keep}
        self._keep_only(set(self.finished))
        # Written anew, so that a torn last line is gone before anything is added.
        raw = b"".join(msgspec.json.encode(part) + b"\n" for part in (_Head(1, fingerprint), *keep))
        fresh = self.partial / "journal.new"
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC, 0o666)
        self._journal = fd
        _write_all(fd, raw)
        os.fsync(fd)
        os.rename(fresh, self._journal_path)
        _sync_directory(self.partial)

    def _keep_only(self, names: set[str]) -> None:
        """Remove every other file, and folders that this leaves empty; put the folders on the disk."""
        for folder, _, files in os.walk(self.files, topdown=False):
            path = Path(folder)
            for file in files:
                if str((path / file).relative_to(self.files)) not in names:
                    (path / file).unlink()
            if path != self.files and not any(path.iterdir()):
                path.rmdir()
            else:
                _sync_directory(path)

    def _place(self, name: str) -> Path:
        """Where the file goes; its folders are made."""
        if self._journal < 0:
            raise OddrankError(f"{self.final} is already finished or closed; {show(name)} cannot be added.")
        if not _is_relative(name):
            raise OddrankError(f"{show(name)} is not a relative file name, so it cannot be written in {self.final}.")
        path = self.files / name
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise write_error(path, error) from None
        return path

    def _record(self, record: FileRecord) -> FileRecord:
        path = self.files / record.name
        try:
            line = _Line(record.name, record.size, record.sha256, path.stat().st_mtime_ns)
            # The file's name must be on the disk before the journal says so.
            _sync_directory(path.parent)
            _write_all(self._journal, msgspec.json.encode(line) + b"\n")
            os.fsync(self._journal)
        except OSError as error:
            raise write_error(path, error) from None
        self.finished[record.name] = record
        self._claimed.add(record.name)
        return record


def _lock(partial: Path, final: Path) -> int:
    """Make the partial directory and take its lock: the open lock file's descriptor."""
    while True:
        partial.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            partial.mkdir()
        if partial.is_symlink() or not partial.is_dir():
            raise OddrankError(f"{partial} is in the way: it is not a directory. Remove it.")
        path = partial / "lock"
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
        except FileNotFoundError:
            continue  # The run that held it finished just now.
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(fd)
            raise OddrankError(
                f"Another process is writing {final} (it holds {path}). Wait for it, or choose another output "
                f"directory."
            ) from None
        except OSError as error:
            # Some cluster file systems have no locks; the run is as safe there as it can be.
            if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
                os.close(fd)
                raise
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(fd), os.stat(path)):
                return fd
        os.close(fd)


def _read_journal(path: Path) -> tuple[_Head | None, list[_Line]]:
    """The head and the whole lines; a run that was killed may have left half a line at the end."""
    try:
        raw = path.read_bytes()
    except FileNotFoundError:
        return None, []
    whole = raw.split(b"\n")[:-1]
    lines: list[_Line] = []
    head = None
    with suppress(msgspec.MsgspecError, ValueError, RecursionError):
        for number, part in enumerate(whole):
            if number == 0:
                head = msgspec.json.decode(part, type=_Head)
            elif _is_relative((line := msgspec.json.decode(part, type=_Line)).name):
                lines.append(line)
    return head, lines


def _is_relative(name: str) -> bool:
    """Whether the name stays inside the directory it is joined to."""
    parts = name.split("/")
    return all(parts) and "." not in parts and ".." not in parts and "\0" not in name


def _write_all(fd: int, raw: bytes) -> None:
    while raw:
        raw = raw[os.write(fd, raw) :]


def _sync_directory(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
