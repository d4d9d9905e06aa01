"""A file is written whole, or nothing has changed."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from oddrank.checkpoint.wholefile import write_whole
from oddrank.errors import OddrankError


def test_nothing_is_left_where_it_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"earlier")

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OddrankError, match="disk is full") as caught:
        write_whole(file, b"later")
    assert "finished files" not in str(caught.value)  # there are no others
    assert file.read_bytes() == b"earlier" and os.listdir(tmp_path) == ["file"]


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("file")
    write_whole(tmp_path / "link", b"data")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_bytes() == b"data"


def test_a_pipe_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    try:
        write_whole(tmp_path / "pipe", b"data")
        assert os.read(reader, 100) == b"data"
    finally:
        os.close(reader)
    assert (tmp_path / "pipe").is_fifo() and os.listdir(tmp_path) == ["pipe"]


def test_a_device_that_takes_nothing() -> None:
    with pytest.raises(OddrankError, match=r"^/dev/full cannot be written: No space left on device\.$"):
        write_whole(Path("/dev/full"), b"data")


def test_a_path_that_names_no_file() -> None:
    with pytest.raises(OddrankError, match="names no file"):
        write_whole(Path(""), b"")
