"""`oddrank pad` killed, interrupted, run twice at once, and on a full disk."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from pad_models import command, tree, write_model

KILLED = Path(__file__).with_name("pad_killed.py")
OPTIONS = ("--tp", "3", "--layout", "pad")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In five shards, with a tokenizer."""
    path = write_model(
        tmp_path_factory.mktemp("killed") / "model",
        "qwen3",
        q=8,
        kv=4,
        mlp=45,
        dtype=torch.bfloat16,
        max_shard_size="24KB",
    )
    assert len(list(path.glob("*.safetensors"))) == 5
    (path / "tokenizer.json").write_text("{}")
    return path


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The result of a run that nothing disturbed."""
    out = tmp_path_factory.mktemp("whole") / "out"
    said = command("pad", model, out, *OPTIONS)
    assert said.returncode == 0, said.stderr
    return tree(out)


def killed(moment: str, count: int, *arguments: str | Path) -> None:
    done = subprocess.run(
        [sys.executable, str(KILLED), moment, str(count), *map(str, arguments)], capture_output=True, text=True
    )
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize(
    ("moment", "count", "finished"),
    [
        ("writing", 1, 0),  # the first header
        ("writing", 3, 0),  # between tensors of the first shard
        ("synced", 1, 0),  # the first shard is on the disk and not in the journal
        ("recorded", 1, 1),
        ("writing", 20, 3),
        ("recorded", 5, 5),  # every shard, none of the small files
        ("recorded", 7, 5),  # config and index
        ("finishing", 1, 5),  # every file
    ],
)
def test_killed_and_resumed(
    model: Path, whole: dict[str, bytes], tmp_path: Path, moment: str, count: int, finished: int
) -> None:
    out = tmp_path / "out"
    killed(moment, count, "pad", model, out, *OPTIONS)
    assert not out.exists() and os.listdir(tmp_path) == [".out.partial"]
    said = command("pad", model, out, *OPTIONS, "--json")
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout)["resumed"] == finished
    assert tree(out) == whole
    assert os.listdir(tmp_path) == ["out"]


def test_killed_again_and_again(model: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    for count in (8, 9, 3):
        killed("writing", count, "pad", model, tmp_path / "out", *OPTIONS)
        assert not (tmp_path / "out").exists()
    assert command("pad", model, tmp_path / "out", *OPTIONS).returncode == 0
    assert tree(tmp_path / "out") == whole


def test_killed_when_it_has_its_name(model: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    """It is complete then, and a second run touches nothing in it."""
    killed("named", 1, "pad", model, tmp_path / "out", *OPTIONS)
    assert tree(tmp_path / "out") == whole
    said = command("pad", model, tmp_path / "out", *OPTIONS)
    assert said.returncode == 2 and "exists" in said.stderr
    assert tree(tmp_path / "out") == whole


def test_another_plan_does_not_continue(model: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    killed("recorded", 3, "pad", model, out, "--tp", "5", "--layout", "pad")
    kept = tree(tmp_path)
    said = command("pad", model, out, *OPTIONS)
    assert said.returncode == 2
    one_line(said.stderr, "another plan", "restart")
    assert not out.exists() and tree(tmp_path) == kept
    said = command("pad", model, out, *OPTIONS, "--restart", "--json")
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout)["resumed"] == 0
    assert tree(out) == whole and os.listdir(tmp_path) == ["out"]


def test_another_source_does_not_continue(model: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    """The model was written anew in between: what is finished may hold other weights."""
    copy = shutil.copytree(model, tmp_path / "model")
    killed("recorded", 3, "pad", copy, tmp_path / "out", *OPTIONS)
    os.utime(copy / "model-00004-of-00005.safetensors")
    said = command("pad", copy, tmp_path / "out", *OPTIONS)
    assert said.returncode == 2
    one_line(said.stderr, "another checkpoint")
    assert command("pad", copy, tmp_path / "out", *OPTIONS, "--restart").returncode == 0
    assert tree(tmp_path / "out") == whole


@contextlib.contextmanager
def holding(*arguments: str | Path) -> Iterator[subprocess.Popen[str]]:
    """A run that stands still between two writes."""
    with subprocess.Popen(
        [sys.executable, str(KILLED), "hold", "10", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "holding\n"
            yield process
        finally:
            process.kill()


def test_a_second_run_at_once_is_refused(model: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    out = tmp_path / "out"
    with holding("pad", model, out, *OPTIONS):
        kept = tree(tmp_path)
        for more in ((), ("--restart",)):
            said = command("pad", model, out, *OPTIONS, *more)
            assert said.returncode == 2
            one_line(said.stderr, "Another process is writing")
            assert tree(tmp_path) == kept
    assert not out.exists()
    assert command("pad", model, out, *OPTIONS).returncode == 0
    assert tree(out) == whole


def test_control_c(model: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    with holding("pad", model, tmp_path / "out", *OPTIONS) as process:
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        assert process.stderr is not None
        one_line(process.stderr.read().lstrip("\n"), "interrupted")
    assert os.listdir(tmp_path) == [".out.partial"]
    assert command("pad", model, tmp_path / "out", *OPTIONS).returncode == 0
    assert tree(tmp_path / "out") == whole


def test_a_limit_on_file_sizes(model: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    """The kernel refuses the write itself, in the middle of a shard."""
    limit = 8_000

    def limited() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    done = subprocess.run(
        [sys.executable, "-m", "oddrank", "pad", str(model), str(tmp_path / "out"), *OPTIONS],
        capture_output=True,
        text=True,
        preexec_fn=limited,
    )
    assert done.returncode == 2
    one_line(done.stderr, "cannot be written", "File too large")
    assert os.listdir(tmp_path) == [".out.partial"]
    assert command("pad", model, tmp_path / "out", *OPTIONS).returncode == 0
    assert tree(tmp_path / "out") == whole


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB; skipped where none may be mounted."""
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)], capture_output=True)
    if made.returncode:
        pytest.skip("may not mount")
    try:
        yield mount
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_a_disk_that_is_too_small_is_known_at_once(model: Path, small_disk: Path) -> None:
    (small_disk / "other").write_bytes(bytes(220 << 10))
    said = command("pad", model, small_disk / "out", *OPTIONS)
    assert said.returncode == 2
    one_line(said.stderr, "bytes free", "needed")
    assert not (small_disk / "out").exists()


def test_a_disk_that_fills_up(model: Path, whole: dict[str, bytes], small_disk: Path, tmp_path: Path) -> None:
    """By a file that is carried over, after the weights; with room, the same command goes on from there."""
    copy = shutil.copytree(model, tmp_path / "model")
    (copy / "vocabulary.txt").write_bytes(bytes(120 << 10))
    (small_disk / "other").write_bytes(bytes(32 << 10))
    said = command("pad", copy, small_disk / "out", *OPTIONS)
    assert said.returncode == 2
    one_line(said.stderr, "The disk is full", "run the same command again")
    assert not (small_disk / "out").exists()
    (small_disk / "other").unlink()
    subprocess.run(["mount", "-o", "remount,size=512k", str(small_disk)], check=True)
    said = command("pad", copy, small_disk / "out", *OPTIONS, "--json")
    assert said.returncode == 0, said.stderr
    assert json.loads(said.stdout)["resumed"] == 5
    found = tree(small_disk / "out")
    assert len(found.pop("vocabulary.txt")) == 120 << 10
    assert {n: d for n, d in found.items() if n != "oddrank.json"} == {
        n: d for n, d in whole.items() if n != "oddrank.json"
    }


def one_line(error: str, *parts: str) -> None:
    assert error.startswith("oddrank: ") and error.count("\n") == 1 and "Traceback" not in error, error
    for part in parts:
        assert part in error
