"""Write one safetensors file as a stream: the header first, then every tensor's bytes in the declared order."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType

import msgspec

from oddrank.checkpoint.dtypes import BITS, itemsize, nbytes
from oddrank.checkpoint.hashedfile import Buffer, FileRecord, HashedFile, flat
from oddrank.checkpoint.header import MAX_HEADER, MAX_RANK, show
from oddrank.errors import OddrankError

Entry = tuple[str, str, tuple[int, ...]]
"""Name, safetensors dtype, shape."""


def by_alignment(entries: Iterable[Entry]) -> list[Entry]:
    """The entries with the widest dtypes first, otherwise in the given order.

    So every tensor starts at a multiple of its element's size, as in files of the safetensors library; torch cannot
    view a tensor that does not.
    """
    return sorted(entries, key=lambda entry: -itemsize(entry[1]))


def header_bytes(entries: Iterable[Entry], metadata: Mapping[str, str] | None = None) -> bytes:
    """The file's bytes up to the first tensor. Spaces pad the header to a multiple of 8, as the library does.

    OddrankError for what no file can hold: an unknown dtype, a name used twice, an impossible shape, too long a header.
    """
    header: dict[str, object] = {}
    if metadata:
        header["__metadata__"] = dict(metadata)
    at = 0
    for name, dtype, shape in entries:
        if name in header or name == "__metadata__":
            raise OddrankError(f"A safetensors file cannot hold the name {show(name)} a second time.")
        if dtype not in BITS:
            raise OddrankError(f"Tensor {show(name)} has the dtype {show(dtype)}; known are {', '.join(BITS)}.")
        if len(shape) > MAX_RANK or any(n < 0 for n in shape):
            raise OddrankError(f"Tensor {show(name)} has the impossible shape {list(shape)}.")
        try:
            end = at + nbytes(dtype, shape)
        except ValueError as error:
            raise OddrankError(f"Tensor {show(name)} cannot be stored: {error}.") from None
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [at, end]}
        at = end
    raw = msgspec.json.encode(header)
    raw += b" " * (-len(raw) % 8)
    if len(raw) > MAX_HEADER:
        raise OddrankError(
            f"The header of {len(header)} tensors takes {len(raw)} bytes, above the format's limit of {MAX_HEADER}. "
            f"Spread the tensors over more files."
        )
    return len(raw).to_bytes(8, "little") + raw


class SafetensorsWriter:
    """Stream tensors into the file `path`; `name` is what its FileRecord calls it.

    `size` is the finished file's bytes. Leaving the context without `finish`, or by an exception, leaves a cut file.
    """

    def __init__(
        self, path: Path, entries: Iterable[Entry], metadata: Mapping[str, str] | None = None, name: str | None = None
    ) -> None:
        entries = list(entries)
        header = header_bytes(entries, metadata)
        self._todo = [(tensor, nbytes(dtype, shape)) for tensor, dtype, shape in entries]
        self.size = len(header) + sum(size for _, size in self._todo)
        self._next = 0
        self._left = 0
        self._current: str | None = None
        self._file = HashedFile(path, name)
        try:
            self._file.write(header)
        except BaseException:
            self._file.close()
            raise

    def write(self, name: str, data: Buffer) -> None:
        """Append bytes of tensor `name`: all of it or a piece, of any dtype, C-contiguous.

        The buffer may be reused as soon as this returns. Tensors come in the declared order, each complete before the
        next; those of no bytes may be left out. OddrankError for bytes that were not declared.
        """
        view = flat(data)
        size = len(view)
        if name != self._current:
            self._start(name)
        if size > self._left:
            raise OddrankError(
                f"Tensor {show(name)} of {self._file.path} gets {size - self._left} bytes more than its header "
                f"declares."
            )
        self._file.write(view)
        self._left -= size

    def finish(self) -> FileRecord:
        """Put the file on the disk and return its record. OddrankError where declared bytes are missing."""
        self._start(None)
        return self._file.finish()

    def close(self) -> None:
        """Close the file as it is. Nothing happens after `finish`."""
        self._file.close()

    def __enter__(self) -> "SafetensorsWriter":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, name: str | None) -> None:
        """Make `name` the current tensor (None: the end), where everything before it is complete."""
        where = self._file.path
        if self._left:
            raise OddrankError(
                f"Tensor {show(self._current or '')} of {where} lacks {self._left} bytes of those its header declares."
            )
        while self._next < len(self._todo):
            expected, size = self._todo[self._next]
            if expected == name:
                self._next += 1
                self._current, self._left = expected, size
                return
            if size:
                got = "the file's end" if name is None else f"tensor {show(name)}"
                raise OddrankError(f"{where}: tensor {show(expected)} ({size} bytes) comes next, not {got}.")
            self._next += 1
        if name is not None:
            raise OddrankError(f"{where}: tensor {show(name)} is not declared, or was already written.")
