"""The command line as a user of the hub meets it, and models to put there."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from oddrank.cli import main
from oddrank.synth import describe_release, write_checkpoint, write_headers


def run(capsys: pytest.CaptureFixture[str], *args: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `oddrank ARGS`."""
    old = sys.argv
    sys.argv = ["oddrank", *map(str, args)]
    try:
        main()
        code = 0
    except SystemExit as stop:
        code = int(stop.code or 0)
    finally:
        sys.argv = old
    out, err = capsys.readouterr()
    return code, out, err


def refusal(capsys: pytest.CaptureFixture[str], *args: object) -> str:
    """What a command that must refuse says: one paragraph on stderr, exit code 2."""
    code, out, err = run(capsys, *args)
    assert (code, out) == (2, ""), (code, out, err)
    assert err.startswith("oddrank: ") and err.count("\n") == 1, err
    return err


def headers(path: Path, shards: int) -> Path:
    """Qwen3-32B's headers in so many files, no weights."""
    return write_headers(describe_release("qwen3", size="32B", layers=None, vocab=None), path, shards=shards)


def small(path: Path, shards: int | None = 3) -> Path:
    """A tiny qwen3 with weights, what else a repository has, and weights that nobody wants."""
    write_checkpoint(describe_release("qwen3", size="tiny"), path, shards=shards)
    (path / "README.md").write_text("# tiny")
    (path / "original").mkdir()
    for other in ("pytorch_model.bin", "original/consolidated.00.pth"):
        (path / other).write_bytes(b"x" * 100)
    return path


def one_file(path: Path) -> Path:
    """A tiny llama in one file, without an index."""
    return write_checkpoint(describe_release("llama", size="tiny"), path, shards=1)


def rewrite_header(file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the JSON of a file's header; its data stays."""
    stored = file.read_bytes()
    size = int.from_bytes(stored[:8], "little")
    header = json.loads(stored[8 : 8 + size])
    change(header)
    raw = json.dumps(header).encode()
    file.write_bytes(len(raw).to_bytes(8, "little") + raw + stored[8 + size :])
