"""The streaming writer: its files load in the safetensors library, and wrong bytes are refused."""

import errno
import fcntl
import hashlib
import os
import random
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_files import library_file
from safetensors import deserialize
from safetensors.numpy import load_file

from oddrank.checkpoint import hashedfile
from oddrank.checkpoint.hashedfile import HashedFile
from oddrank.checkpoint.writer import Entry, SafetensorsWriter, by_alignment
from oddrank.errors import OddrankError

ENTRIES: list[Entry] = [
    ("b", "F32", (3, 5)),
    ("a", "BF16", (7,)),
    ("e", "I64", (0, 4)),
    ("s", "F8_E4M3", ()),
    ("z", "U8", (3,)),
]


def content(entries: list[Entry], seed: int = 0) -> dict[str, bytes]:
    width = {"F32": 4, "BF16": 2, "I64": 8, "F8_E4M3": 1, "U8": 1}
    rng = np.random.default_rng(seed)
    return {n: rng.integers(0, 256, int(np.prod(s)) * width[d], np.uint8).tobytes() for n, d, s in entries}


def test_the_library_reads_what_is_written(tmp_path: Path) -> None:
    data = content(ENTRIES)
    file = tmp_path / "m.safetensors"
    with SafetensorsWriter(file, ENTRIES, {"format": "pt"}, "sub/m.safetensors") as writer:
        for name, _, _ in ENTRIES:
            writer.write(name, data[name])
        record = writer.finish()
    raw = file.read_bytes()
    assert {n: (t["dtype"], tuple(t["shape"]), bytes(t["data"])) for n, t in deserialize(raw)} == {
        name: (dtype, shape, data[name]) for name, dtype, shape in ENTRIES
    }
    assert (record.name, record.size, record.sha256) == (
        "sub/m.safetensors",
        len(raw),
        hashlib.sha256(raw).hexdigest(),
    )
    assert writer.size == len(raw)
    assert int.from_bytes(raw[:8], "little") % 8 == 0


def test_a_file_of_the_library_is_written_again_bit_for_bit(tmp_path: Path) -> None:
    """Same order, same metadata: the library's own bytes, its padding included."""
    for names in (["a"], ["ab", "b"], ["x" * n for n in range(1, 9)]):
        tensors = {n: ("float32", [2, 3], bytes(range(24))) for n in names}
        library_file(tmp_path / "theirs", tensors, format="pt")
        with SafetensorsWriter(tmp_path / "ours", [(n, "F32", (2, 3)) for n in names], {"format": "pt"}) as writer:
            for name in names:
                writer.write(name, bytes(range(24)))
            writer.finish()
        assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()


def test_pieces_of_any_kind(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.uint16).reshape(4, 6)
    entries: list[Entry] = [("a", "U16", (4, 6)), ("b", "U16", (4, 6)), ("c", "U32", ()), ("d", "U8", (0,))]
    with SafetensorsWriter(tmp_path / "m", entries) as writer:
        buffer = np.empty(6, np.uint16)
        for row in values:
            buffer[:] = row
            writer.write("a", buffer)  # The buffer is used again for the next row.
        writer.write("b", memoryview(values[:2]))
        writer.write("b", values[:0])
        writer.write("b", bytearray(values[2:].tobytes()))
        writer.write("c", np.array(7, np.uint32))
        writer.finish()
    loaded = load_file(tmp_path / "m")
    assert np.array_equal(loaded["a"], values) and np.array_equal(loaded["b"], values)
    assert loaded["c"] == 7 and loaded["d"].shape == (0,)


def test_torch_loads_every_order_by_alignment(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    from safetensors.torch import load_file as load_torch

    entries = by_alignment(
        [("u", "U8", (3,)), ("f", "F32", (2,)), ("b", "BF16", (1,)), ("i", "I64", (1,)), ("g", "F32", (1,))]
    )
    assert [name for name, _, _ in entries] == ["i", "f", "g", "b", "u"]
    with SafetensorsWriter(tmp_path / "m", entries) as writer:
        for name, data in content(entries).items():
            writer.write(name, data)
        writer.finish()
    loaded = load_torch(tmp_path / "m")
    assert loaded["b"].dtype == torch.bfloat16 and len(loaded) == 5


@pytest.mark.parametrize(
    ("steps", "part"),
    [
        ([("a", 4)], "'a' of .* lacks 4 bytes"),
        ([("a", 8)], r"'b' \(2 bytes\) comes next, not the file's end"),
        ([("a", 9)], "'a' of .* gets 1 bytes more"),
        ([("a", 8), ("a", 1)], "'a' of .* gets 1 bytes more"),
        ([("a", 8), ("b", 2), ("a", 1)], "'a' is not declared, or was already written"),
        ([("a", 8), ("b", 2), ("x", 1)], "'x' is not declared"),
        ([("b", 2)], r"'a' \(8 bytes\) comes next, not tensor 'b'"),
        ([("a", 4), ("b", 2)], "'a' of .* lacks 4 bytes"),
    ],
)
def test_bytes_that_do_not_match_the_header(tmp_path: Path, steps: list[tuple[str, int]], part: str) -> None:
    entries: list[Entry] = [("a", "F32", (2,)), ("b", "U8", (2,)), ("e", "U8", (0,))]
    with pytest.raises(OddrankError, match=part), SafetensorsWriter(tmp_path / "m", entries) as writer:
        for name, size in steps:
            writer.write(name, bytes(size))
        writer.finish()


@pytest.mark.parametrize(
    ("entries", "part"),
    [
        ([("a", "F31", (1,))], "dtype 'F31'"),
        ([("a", "U8", (1,)), ("a", "U8", (1,))], "'a' a second time"),
        ([("__metadata__", "U8", (1,))], "'__metadata__' a second time"),
        ([("a", "U8", (-1,))], "impossible shape"),
        ([("a", "F4", (3,))], "12 bits"),
    ],
)
def test_impossible_headers(tmp_path: Path, entries: list[Entry], part: str) -> None:
    with pytest.raises(OddrankError, match=part):
        SafetensorsWriter(tmp_path / "m", entries)
    assert not (tmp_path / "m").exists()


@pytest.mark.parametrize("direct", ["direct", "no O_DIRECT", "refused at the first write"])
def test_large_files_hash_right_whatever_the_pieces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: str
) -> None:
    """Small pieces, so that the writer waits for the hash and the disk; file systems with and without direct writes."""
    monkeypatch.setattr(hashedfile, "PIECE", 4096)
    monkeypatch.setattr(hashedfile, "FLUSH_STEP", 20_000)
    if direct == "no O_DIRECT":
        monkeypatch.delattr(os, "O_DIRECT")
    elif direct != "direct":
        real = os.pwrite

        def pwrite(fd: int, data: Any, at: int) -> int:
            if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
                raise OSError(errno.EINVAL, "made up")
            return real(fd, data, at)

        monkeypatch.setattr(os, "pwrite", pwrite)
    rng = random.Random(1)
    for size in [0, 1, 4095, 4096, 4097, 8192, *(rng.randrange(200_000) for _ in range(20))]:
        data = rng.randbytes(size)
        with HashedFile(tmp_path / "f") as file:
            at = 0
            while at < len(data):
                step = rng.choice([1, 7, 999, 4096, 4097, 50_000])
                buffer = bytearray(data[at : at + step])
                file.write(buffer)
                buffer[:] = bytes(len(buffer))  # the caller's again
                at += step
            record = file.finish()
        assert (tmp_path / "f").read_bytes() == data
        assert (record.size, record.sha256) == (len(data), hashlib.sha256(data).hexdigest())
    assert not [t for t in threading.enumerate() if t.name.startswith("oddrank")]


def test_a_direct_write_that_is_cut_short_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hashedfile, "PIECE", 8192)
    real = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda fd, data, at: real(fd, data[: max(1, len(data) // 3)], at))
    data = random.Random(2).randbytes(50_000)
    with HashedFile(tmp_path / "f") as file:
        file.write(data)
        record = file.finish()
    assert (tmp_path / "f").read_bytes() == data
    assert record.sha256 == hashlib.sha256(data).hexdigest()


def test_leaving_by_an_exception_stops_the_threads(tmp_path: Path) -> None:
    for _ in range(5):
        with pytest.raises(KeyError), HashedFile(tmp_path / "f") as file:
            file.write(bytes(20 << 20))
            raise KeyError
    assert not [t for t in threading.enumerate() if t.name.startswith("oddrank")]


@pytest.mark.parametrize("size", [100, 30 << 20])
@pytest.mark.parametrize(("call", "code"), [("pwrite", errno.ENOSPC), ("pwrite", errno.EIO), ("fsync", errno.ENOSPC)])
def test_failures_of_the_disk_are_errors(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, code: int, size: int
) -> None:
    """In a file of one piece (at its end), in a large one at the third piece, and in what puts it on the disk."""
    real = getattr(os, call)

    def fail(fd: int, *rest: Any) -> Any:
        if call == "pwrite" and size > 100 and rest[1] < 10 << 20:
            return real(fd, *rest)
        raise OSError(code, "made up")

    monkeypatch.setattr(os, call, fail)
    part = "disk is full" if code == errno.ENOSPC else "made up"
    with pytest.raises(OddrankError, match=part), HashedFile(tmp_path / "f") as file:
        for _ in range(0, size, 8 << 20):
            file.write(bytes(min(size, 8 << 20)))
        file.finish()
    assert not [t for t in threading.enumerate() if t.name.startswith("oddrank")]


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(OddrankError, match="cannot be written"):
        HashedFile(tmp_path / "missing" / "f")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OddrankError, match="cannot be written"):
        HashedFile(tmp_path / "link")
    assert not (tmp_path / "elsewhere").exists()
