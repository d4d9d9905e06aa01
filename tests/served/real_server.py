"""`oddrank serve` as a process, and copies of a checkpoint with something changed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Weights = dict[str, torch.Tensor]

LIMIT = 240.0
"""Seconds to start on a machine that does other things too; alone it takes 5."""


@contextmanager
def serving(model: Path, tp: int, log: Path) -> Iterator[str]:
    """Its URL, in fp32; ended by SIGTERM."""
    line = [sys.executable, "-m", "oddrank", "serve", model, "--tp", tp, "--port", 0, "--kv-memory", 0.05,
            "--max-model-len", 512, "--threads", 1, "--dtype", "fp32"]  # fmt: skip
    with log.open("w") as out:
        process = subprocess.Popen(
            [str(part) for part in line], stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "COLUMNS": "200"}
        )
    try:
        yield _url(process, log)
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            raise


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        said = [line for line in log.read_text().splitlines() if line.startswith("serving ")]
        if said:
            return said[0].rpartition(" ")[2]
        if process.poll() is not None:
            break
        time.sleep(0.1)
    raise AssertionError(f"the server did not start (exit code {process.poll()}):\n{log.read_text()[-3000:]}")


def changed(model: Path, copy: Path, change: Callable[[Weights], None], **config: Any) -> Path:
    """A copy of a checkpoint of one file whose weights `change` has changed, and whose config has more keys."""
    copy.mkdir()
    for name in ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, copy / name)
    weights = load_file(model / "model.safetensors")
    change(weights)
    save_file(weights, copy / "model.safetensors", metadata={"format": "pt"})
    if config:
        said = json.loads((model / "config.json").read_text())
        (copy / "config.json").write_text(json.dumps(said | config))
    return copy
