"""`oddrank pad` stopped wherever it happens to be: see pad_anywhere.py, which forks its runs."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from oddrank.checkpoint.hashedfile import PIECE
from oddrank.synth import describe_release, write_checkpoint

ANYWHERE = Path(__file__).with_name("pad_anywhere.py")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six shards, two of them larger than a piece that is written at once, and a file to carry over."""
    release = describe_release("llama", size="tiny")
    release = msgspec.structs.replace(release, size=msgspec.structs.replace(release.size, vocab=24_000))
    path = write_checkpoint(release, tmp_path_factory.mktemp("anywhere") / "model", shards=6)
    assert sum(f.stat().st_size > 2 * PIECE for f in path.glob("*.safetensors")) == 2
    (path / "notes.txt").write_text("carried\n" * 1000)
    return path


def stopped(model: Path, scratch: Path, how: str, seed: int, count: int) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, str(ANYWHERE), str(model), str(scratch), how, str(seed), str(count)],
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    seen: dict[str, float] = json.loads(done.stdout)
    print(how, seen)
    return seen


def test_killed_at_a_few_moments(model: Path, tmp_path: Path) -> None:
    seen = stopped(model, tmp_path, "kill", 0, 8)
    assert seen.get("nothing", 0) + seen.get("no file", 0) + seen.get("some files", 0) > 0


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3, 4])
def test_killed_at_two_hundred_moments(model: Path, tmp_path: Path, seed: int) -> None:
    seen = stopped(model, tmp_path, "kill", seed, 50)
    assert seen["some files"] > 0 and seen["no file"] > 0


def test_a_disk_that_fails_at_a_few_calls(model: Path, tmp_path: Path) -> None:
    seen = stopped(model, tmp_path, "full", 0, 8)
    assert any(": some files" in name for name in seen) and any(": no file" in name for name in seen), seen


@pytest.mark.long
def test_a_disk_that_fails_at_any_call(model: Path, tmp_path: Path) -> None:
    seen = stopped(model, tmp_path, "full", 1, 10_000)
    for call in ("open", "write", "pwrite", "fsync", "mkdir", "rename"):
        assert any(name.startswith(f"{call}: ") for name in seen), seen
