"""The output directory: nothing under its name before it is complete, resumed after a kill, one writer at a time."""

import errno
import hashlib
import json
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from oddrank.checkpoint import AtomicDirectory, FileRecord
from oddrank.errors import OddrankError


def tree(path: Path) -> dict[str, bytes]:
    return {str(f.relative_to(path)): f.read_bytes() for f in sorted(path.rglob("*")) if f.is_file()}


def write_all(out: AtomicDirectory) -> None:
    for name in ("a.txt", "sub/deep/b.txt"):
        if out.done(name) is None:
            out.write_bytes(name, name.encode())
    if out.done("m.safetensors") is None:
        with out.safetensors("m.safetensors", [("t", "U8", (4,))], {"format": "pt"}) as writer:
            writer.write("t", b"1234")


def test_everything_appears_at_once(tmp_path: Path) -> None:
    final = tmp_path / "made" / "here" / "out"
    with AtomicDirectory(final, "f") as out:
        write_all(out)
        assert not final.exists()
        records = dict(out.finished)
        assert out.finish() == final
    assert set(tree(final)) == {"a.txt", "sub/deep/b.txt", "m.safetensors"}
    assert bytes(load_file(final / "m.safetensors")["t"]) == b"1234"
    for name, raw in tree(final).items():
        assert records[name] == FileRecord(name, len(raw), hashlib.sha256(raw).hexdigest())
    assert os.listdir(final.parent) == ["out"]


def test_an_existing_directory_is_not_touched(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "x").write_text("x")
    with pytest.raises(OddrankError, match="exists and is not empty"):
        AtomicDirectory(tmp_path / "out", "f")
    with pytest.raises(OddrankError, match="exists and is not a directory"):
        AtomicDirectory(tmp_path / "out" / "x", "f")
    with pytest.raises(OddrankError, match="out/x exists and is not a directory"):
        AtomicDirectory(tmp_path / "out" / "x" / "y", "f")
    with pytest.raises(OddrankError, match="cannot be written"):
        AtomicDirectory("a\0b", "f")
    assert tree(tmp_path) == {"out/x": b"x"} and os.listdir(tmp_path) == ["out"]


def test_an_empty_directory_may_be_filled(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "link").symlink_to("out")
    with AtomicDirectory(tmp_path / "link", "f") as out:
        write_all(out)
        out.finish()
    assert "a.txt" in tree(tmp_path / "out") and (tmp_path / "link").is_symlink()


def test_something_else_takes_the_name_meanwhile(tmp_path: Path) -> None:
    with AtomicDirectory(tmp_path / "out", "f") as out:
        write_all(out)
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "x").write_text("x")
        with pytest.raises(OddrankError, match="exists and is not empty"):
            out.finish()
    assert tree(tmp_path / "out") == {"x": b"x"}


def interrupted(tmp_path: Path, fingerprint: str = "f") -> Path:
    """A run that finished a.txt and stopped within b.bin."""
    with pytest.raises(KeyboardInterrupt), AtomicDirectory(tmp_path / "out", fingerprint) as out:
        out.write_bytes("a.txt", b"a")
        with out.safetensors("b.bin", [("t", "U8", (9,))]) as writer:
            writer.write("t", b"123")
            raise KeyboardInterrupt
    return tmp_path / ".out.partial"


def test_an_interrupted_run_resumes(tmp_path: Path) -> None:
    partial = interrupted(tmp_path)
    assert not (tmp_path / "out").exists()
    before = (partial / "files" / "a.txt").stat()
    with AtomicDirectory(tmp_path / "out", "f") as out:
        record = out.done("a.txt")
        assert record == FileRecord("a.txt", 1, hashlib.sha256(b"a").hexdigest())
        assert out.done("b.bin") is None and not (out.files / "b.bin").exists()
        out.write_bytes("b.bin", b"b")
        out.finish()
    assert tree(tmp_path / "out") == {"a.txt": b"a", "b.bin": b"b"}
    after = (tmp_path / "out" / "a.txt").stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_another_plan_is_refused_or_restarted(tmp_path: Path) -> None:
    interrupted(tmp_path)
    with pytest.raises(OddrankError, match="unfinished run with 1 finished files"):
        AtomicDirectory(tmp_path / "out", "other")
    with AtomicDirectory(tmp_path / "out", "f") as out:
        assert out.done("a.txt") is not None
    with AtomicDirectory(tmp_path / "out", "other", restart=True) as out:
        assert out.done("a.txt") is None and tree(out.files) == {}


@pytest.mark.parametrize("change", ["grown", "touched", "gone"])
def test_a_changed_file_is_written_again(tmp_path: Path, change: str) -> None:
    file = interrupted(tmp_path) / "files" / "a.txt"
    if change == "grown":
        file.write_bytes(b"aa")
    elif change == "touched":
        file.write_bytes(b"b")
    else:
        file.unlink()
    with AtomicDirectory(tmp_path / "out", "f") as out:
        assert out.done("a.txt") is None and tree(out.files) == {}


def test_a_torn_or_wrong_journal(tmp_path: Path) -> None:
    journal = interrupted(tmp_path) / "journal"
    whole = journal.read_bytes()
    for cut in (0, 1, 20, whole.index(b"\n"), whole.index(b"\n") + 1, len(whole) - 20, len(whole) - 1, len(whole)):
        journal.write_bytes(whole[:cut])
        with AtomicDirectory(tmp_path / "out", "f") as out:
            kept = out.done("a.txt") is not None
            assert kept == (cut == len(whole))
            out.write_bytes("a.txt", b"a") if not kept else None
        whole = journal.read_bytes()
    for raw in (b"\xff\n", b"{}\n", b"[" * 100_000 + b"\n", b"\n\n"):
        journal.write_bytes(raw)
        with AtomicDirectory(tmp_path / "out", "f") as out:
            assert out.finished == {}


def test_a_journal_cannot_reach_outside(tmp_path: Path) -> None:
    journal = interrupted(tmp_path) / "journal"
    outside = tmp_path / "x"
    outside.write_text("x")
    line = {"name": "../../x", "size": 1, "sha256": "", "mtime_ns": outside.stat().st_mtime_ns}
    journal.write_text(journal.read_text() + json.dumps(line) + "\n")
    with AtomicDirectory(tmp_path / "out", "f") as out:
        assert set(out.finished) == {"a.txt"}
        out.finish()
    assert outside.exists()


def test_files_that_are_no_longer_wanted_are_dropped(tmp_path: Path) -> None:
    with AtomicDirectory(tmp_path / "out", "f") as out:
        out.write_bytes("old/x", b"x")
    with AtomicDirectory(tmp_path / "out", "f") as out:
        out.write_bytes("new", b"n")
        out.finish()
    assert tree(tmp_path / "out") == {"new": b"n"} and os.listdir(tmp_path / "out") == ["new"]


def test_one_writer_at_a_time(tmp_path: Path) -> None:
    with AtomicDirectory(tmp_path / "out", "f"):
        code = "import sys; from oddrank.checkpoint import AtomicDirectory as A; A(sys.argv[1], 'f')"
        result = subprocess.run([sys.executable, "-c", code, str(tmp_path / "out")], capture_output=True, text=True)
        assert "Another process is writing" in result.stderr.splitlines()[-1]
        with pytest.raises(OddrankError, match="Another process is writing"):
            AtomicDirectory(tmp_path / "out", "f", restart=True)
    AtomicDirectory(tmp_path / "out", "f").close()


KILLED = """
    import sys
    from oddrank.checkpoint import AtomicDirectory
    with AtomicDirectory(sys.argv[1], "f") as out:
        for i in range(3):
            name = f"{i}.safetensors"
            if out.done(name):
                continue
            with out.safetensors(name, [("t", "U8", (10_000_000,))]) as writer:
                for j in range(1000):
                    writer.write("t", bytes([i]) * 10_000)
                    if i == 1 and j == 900 and sys.argv[2] == "wait":
                        print("ready", flush=True)
                        sys.stdin.read()
        out.finish()
"""


def test_a_killed_process_resumes(tmp_path: Path) -> None:
    final = tmp_path / "out"
    command = [sys.executable, "-c", textwrap.dedent(KILLED), str(final)]
    process = subprocess.Popen([*command, "wait"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None and process.stdin is not None
    assert process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    process.stdin.close()
    assert not final.exists()
    first = tmp_path / ".out.partial" / "files" / "0.safetensors"
    kept = first.stat().st_ino
    subprocess.run([*command, "go"], check=True)
    assert sorted(os.listdir(final)) == ["0.safetensors", "1.safetensors", "2.safetensors"]
    assert (final / "0.safetensors").stat().st_ino == kept
    for i in range(3):
        assert set(load_file(final / f"{i}.safetensors")["t"].tolist()) == {i}
    assert os.listdir(tmp_path) == ["out"]


def test_a_full_disk_leaves_nothing_under_the_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pwrite

    def full(fd: int, data: Any, at: int) -> int:
        if at + len(data) > 5000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(fd, data, at)

    with AtomicDirectory(tmp_path / "out", "f") as out:
        out.write_bytes("a.txt", b"a")
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwrite", full)
            with (
                pytest.raises(OddrankError, match="The disk is full"),
                out.safetensors("m", [("t", "U8", (9999,))]) as writer,
            ):
                writer.write("t", bytes(9999))
    assert not (tmp_path / "out").exists()
    with AtomicDirectory(tmp_path / "out", "f") as out:
        assert out.done("a.txt") and not out.done("m")


def test_a_really_full_file_system(tmp_path: Path) -> None:
    """On a small file system of its own, where one may be mounted."""
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(mount)], capture_output=True)
    if made.returncode:
        pytest.skip("may not mount")
    try:
        with AtomicDirectory(mount / "out", "f") as out:
            with pytest.raises(OddrankError, match="bytes free, and 9000000 are needed"):
                out.require_space(9_000_000)
            out.require_space(1_000_000)
            out.write_bytes("a.txt", b"a")
            with pytest.raises(OddrankError, match=r"The disk is full.*bytes are free"):
                out.write_bytes("b.bin", bytes(9_000_000))
        assert not (mount / "out").exists()
        with AtomicDirectory(mount / "out", "f") as out:
            assert out.done("a.txt")
            out.write_bytes("b.bin", bytes(1_000_000))
            out.finish()
        assert set(tree(mount / "out")) == {"a.txt", "b.bin"}
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_copies(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(os.urandom(9_000_000))
    with AtomicDirectory(tmp_path / "out", "f") as out:
        record = out.copy("x/y", source)
        assert record.sha256 == hashlib.sha256(source.read_bytes()).hexdigest()
        with pytest.raises(OddrankError, match="cannot be read"):
            out.copy("z", tmp_path / "missing")
        with pytest.raises(OddrankError, match="not a regular file"):
            out.copy("z", tmp_path)
        with pytest.raises(KeyError), out.safetensors("cut", [("t", "U8", (9,))]) as writer:
            writer.write("t", b"123")
            raise KeyError
        out.finish()
    # Neither what could not be copied nor the cut file is in the result.
    assert tree(tmp_path / "out") == {"x/y": source.read_bytes()}


@pytest.mark.parametrize("name", ["", "/etc/x", "../x", "a/../../x", "a//b", ".", "a\0b"])
def test_names_that_leave_the_directory(tmp_path: Path, name: str) -> None:
    with AtomicDirectory(tmp_path / "out", "f") as out, pytest.raises(OddrankError, match="not a relative file name"):
        out.write_bytes(name, b"x")


def test_nothing_is_added_after_the_end(tmp_path: Path) -> None:
    with AtomicDirectory(tmp_path / "out", "f") as out:
        out.write_bytes("a", b"a")
        out.finish()
        with pytest.raises(OddrankError, match="already finished"):
            out.write_bytes("b", b"b")


def test_a_file_in_the_way(tmp_path: Path) -> None:
    (tmp_path / ".out.partial").symlink_to(tmp_path)
    with pytest.raises(OddrankError, match="in the way"):
        AtomicDirectory(tmp_path / "out", "f")


def anonymous() -> int:
    """Bytes of anonymous memory of this process now."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1]) * 1024
    raise AssertionError


def test_memory_does_not_grow_with_the_file(tmp_path: Path) -> None:
    before, most = anonymous(), 0
    piece = bytes(8 << 20)
    with AtomicDirectory(tmp_path / "out", "f") as out:
        with out.safetensors("m", [("t", "U8", (25 * len(piece),))]) as writer:
            for _ in range(25):
                writer.write("t", piece)
                most = max(most, anonymous())
        out.finish()
    assert most - before < 40 << 20
