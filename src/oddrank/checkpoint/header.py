"""The header of one safetensors file: an 8-byte little-endian length, that many bytes of JSON, then the
tensors.

The JSON is read strictly. A file is accepted only where every tensor has its dtype, shape and offsets, its
size is what they imply, and the tensors fill the rest of the file with no overlap, hole or trailing byte.
That is what the safetensors library accepts, less what it lets pass and the format forbids (a name used
twice, unknown fields).
"""

import json
import os
import stat
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, NoReturn

import msgspec

from oddrank.checkpoint.dtypes import BITS
from oddrank.errors import OddrankError

MAX_HEADER = 100_000_000
"""Bytes; the safetensors library refuses longer headers too."""

MAX_RANK = 32
"""Dimensions of one tensor; numpy 1.x holds no more."""

MAX_BYTES = 2**63 - 1
"""Bytes of one tensor, with dimensions of zero left out: more could not be addressed."""

_Natural = Annotated[int, msgspec.Meta(ge=0, le=MAX_BYTES)]


class TensorInfo(msgspec.Struct, frozen=True, gc=False):
    """Where one stored tensor lies. `start` and `end` are byte offsets from the beginning of `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    start: int
    end: int

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return self.end - self.start


class Header(msgspec.Struct, frozen=True):
    """One file's header: its tensors in the order they lie in the file, its metadata and its length in
    bytes."""

    tensors: tuple[TensorInfo, ...]
    metadata: dict[str, str]
    size: int


class _Entry(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    dtype: str
    shape: tuple[_Natural, ...]
    data_offsets: tuple[_Natural, _Natural]


_decode_header = msgspec.json.Decoder(dict[str, msgspec.Raw]).decode
_decode_entry = msgspec.json.Decoder(_Entry).decode
_decode_metadata = msgspec.json.Decoder(dict[str, str] | None).decode
_DECODE_ERRORS = (msgspec.MsgspecError, ValueError, RecursionError)


def show(name: str) -> str:
    """A name from a file as it may be printed: quoted, escaped, and cut after 120 characters."""
    return ascii(name if len(name) <= 120 else name[:117] + "...")


def why(error: OSError) -> str:
    """The operating system's reason, without the path it repeats."""
    return error.strerror or type(error).__name__


def read_header(path: Path, file: str | None = None) -> Header:
    """Read and check the header of the safetensors file at `path`, and none of its weights.

    `file` is the name the tensors carry (a path relative to their checkpoint); the file's own name if None.
    OddrankError for a file that cannot be read or is not a well-formed safetensors file.
    """
    try:
        # O_NONBLOCK: a named pipe must not hang here; it has no effect on a regular file.
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError) as error:
        reason = why(error) if isinstance(error, OSError) else str(error)
        raise OddrankError(f"{path} cannot be read: {reason}. Check that it exists and may be read.") from None
    try:
        status = os.fstat(fd)
        if not stat.S_ISREG(status.st_mode):
            raise OddrankError(f"{path} is not a regular file, so it cannot be a safetensors file.")
        size = status.st_size
        length = header_length(_read(fd, 8, 0), size, path)
        raw = _read(fd, length, 8)
    except OSError as error:
        raise OddrankError(f"{path} cannot be read: {why(error)}.") from None
    finally:
        os.close(fd)
    return parse_header(whole_header(raw, length, path), size, path, file if file is not None else path.name)


def _read(fd: int, count: int, offset: int) -> bytes:
    """`count` bytes from `offset`, fewer only at the end of the file."""
    parts = []
    while count:
        part = os.pread(fd, count, offset)
        if not part:
            break
        parts.append(part)
        offset += len(part)
        count -= len(part)
    return b"".join(parts)


def header_length(prefix: bytes, size: int, path: Path) -> int:
    """Bytes of JSON that the first 8 bytes of a file of `size` bytes announce. OddrankError for what cannot be.

    `path` is only named in errors.
    """
    if size < 8 or len(prefix) < 8:
        _refuse(path, f"it has {min(size, len(prefix))} bytes, and the length of the header alone takes 8")
    length = int.from_bytes(prefix[:8], "little")
    if length > MAX_HEADER:
        _refuse(path, f"its header claims {length} bytes, above the format's limit of {MAX_HEADER}")
    if length > size - 8:
        _refuse(path, f"its header claims {length} bytes, but only {size - 8} bytes follow in the file")
    return length


def whole_header(raw: bytes, length: int, path: Path) -> bytes:
    """`raw`, or OddrankError where fewer bytes came than the header has. `path` is only named in errors."""
    if len(raw) != length:
        _refuse(path, f"its header is {length} bytes long and reading stopped after {len(raw)}")
    return raw


def parse_header(raw: bytes, size: int, path: Path, file: str) -> Header:
    """Check the JSON of a header. `size`: bytes of the whole file; `path` is only named in errors."""
    try:
        entries = _decode_header(raw)
    except _DECODE_ERRORS as error:
        _refuse(path, f"its header is not a JSON object of tensors ({_reason(error)})")
    stored_metadata = entries.pop("__metadata__", None)
    inner = None if stored_metadata is None else bytes(stored_metadata)
    try:
        metadata = _decode_metadata(inner or b"null") or {}
    except _DECODE_ERRORS as error:
        _refuse(path, f"its __metadata__ is not an object of strings ({_reason(error)})")
    _refuse_duplicates(raw, inner, len(entries), path)

    base = 8 + len(raw)
    room = size - base
    bits_of = BITS.get
    tensors: list[TensorInfo] = []
    at = 0
    touching = True
    for name, stored in entries.items():
        try:
            entry = _decode_entry(stored)
        except _DECODE_ERRORS as error:
            _refuse(path, f"the entry of tensor {show(name)} is malformed ({_reason(error)})")
        dtype = entry.dtype
        shape = entry.shape
        start, end = entry.data_offsets
        bits = bits_of(dtype)
        if bits is None:
            _refuse(
                path,
                f"tensor {show(name)} has the unknown dtype {show(dtype)}; known are {', '.join(BITS)}",
                "A newer oddrank may know it.",
            )
        if len(shape) > MAX_RANK:
            _refuse(path, f"tensor {show(name)} has {len(shape)} dimensions, and {MAX_RANK} are the most possible")
        total = bits
        for n in shape:
            total *= n
        if not 0 < total <= MAX_BYTES or total != (end - start) * 8:
            _check_size(path, name, entry, bits)
        if start != at:
            touching = False
        at = end
        if end > room:
            _refuse(
                path,
                f"tensor {show(name)} ends at byte {end} of the data, but the file holds only {room} "
                f"bytes after its header: it is cut short by {end - room} bytes or more",
                "Download it again.",
            )
        tensors.append(TensorInfo(name, dtype, shape, file, base + start, base + end))

    if not touching or at != room:
        tensors.sort(key=attrgetter("start", "end"))
        _check_cover(path, tensors, base, size)
    return Header(tuple(tensors), metadata, base)


def _check_size(path: Path, name: str, entry: _Entry, bits: int) -> None:
    """Say what is wrong with a size, if anything is: empty tensors come here too."""
    shape, (start, end) = list(entry.shape), entry.data_offsets
    what = f"tensor {show(name)} ({entry.dtype}"
    extent = bits
    for n in shape:
        extent *= max(n, 1)
        if extent > MAX_BYTES * 8:
            _refuse(path, f"{what}) has a shape too large to exist: {show(str(shape))}")
    if end < start:
        _refuse(path, f"{what}, shape {shape}) ends at byte {end}, before its start at byte {start}")
    total = 0 if 0 in shape else extent
    if total % 8:
        _refuse(path, f"{what}, shape {shape}) is {total} bits, which is not a whole number of bytes")
    if total // 8 != end - start:
        _refuse(
            path,
            f"{what}, shape {shape}) takes {total // 8} bytes, but its offsets [{start}, {end}] span {end - start}",
        )


def _check_cover(path: Path, tensors: list[TensorInfo], base: int, size: int) -> None:
    """Tensors in order must touch, from the first byte after the header to the last of the file."""
    at = base
    last: TensorInfo | None = None
    for info in tensors:
        if info.start != at:
            before = f"tensor {show(last.name)}" if last else "the header"
            here = f"tensor {show(info.name)} at bytes [{info.start - base}, {info.end - base}] of the data"
            if info.start < at:
                _refuse(path, f"{here} overlaps {before}, which ends at {at - base}")
            _refuse(path, f"{here} leaves a hole of {info.start - at} bytes after {before}")
        if info.end != at:
            last = info
            at = info.end
    if at != size:
        before = f"tensor {show(last.name)}" if last else "the header"
        _refuse(path, f"{size - at} bytes follow {before} at the end of the file and belong to no tensor")


def _refuse_duplicates(raw: bytes, metadata: bytes | None, tensors: int, path: Path) -> None:
    """Refuse a key used twice, which decoding to a dict hides.

    A well-formed entry has five strings (the name, three fields, the dtype). Where nothing is escaped every
    string has two quotes, so any key too many shows in their number; only then is the header decoded again,
    slowly, to find it. `metadata` is the raw value of __metadata__, None if there is none.
    """
    inner = metadata or b""
    quotes = 10 * tensors + (0 if metadata is None else 2)
    suspect = raw.count(b'"') - inner.count(b'"') != quotes or raw.count(b"\\") != inner.count(b"\\")
    twice: list[str] = []

    def pairs(items: list[tuple[str, Any]]) -> None:
        seen: set[str] = set()
        for key, _ in items:
            if key in seen:
                twice.append(key)
            seen.add(key)

    try:
        json.loads(raw if suspect else inner or b"null", object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        _refuse(path, f"its header is not valid JSON ({_reason(error)})")
    if twice:
        _refuse(path, f"its header uses the key {show(twice[0])} twice, so one of the two would be lost")


def _reason(error: Exception) -> str:
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    return str(error).replace("\n", " ")


def _refuse(path: Path, what: str, remedy: str = "Download or write it again.") -> NoReturn:
    raise OddrankError(f"{path} is not a valid safetensors file: {what}. {remedy}") from None
