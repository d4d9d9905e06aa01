"""The command: its defaults cut the model, --headers-only does not, mistakes are one paragraph."""

import os
import subprocess
import sys
from pathlib import Path

from oddrank.checkpoint import Checkpoint


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "oddrank", "synth", *arguments], capture_output=True, text=True)


def test_values(tmp_path: Path) -> None:
    done = run("qwen3_5_moe", str(tmp_path / "m"), "--size", "tiny", "--format", "mxfp4", "--experts", "4", "--vision")
    assert done.returncode == 0, done.stderr
    model = Checkpoint.open(tmp_path / "m")
    assert f"{len(model.tensors)} tensors in 1 file," in done.stdout
    text = model.config["text_config"]
    assert (text["num_experts"], text["num_experts_per_tok"], text["vocab_size"]) == (4, 1, 512)


def test_headers_only_is_full_size_unless_told(tmp_path: Path) -> None:
    assert run("qwen3_5", str(tmp_path / "full"), "--format", "mxfp4", "--headers-only").returncode == 0
    full = Checkpoint.open(tmp_path / "full").config
    assert (full["num_hidden_layers"], full["vocab_size"], full["hidden_size"]) == (64, 248320, 5120)
    assert run("qwen3_5", str(tmp_path / "cut"), "--headers-only", "--layers", "8").returncode == 0
    assert Checkpoint.open(tmp_path / "cut").config["num_hidden_layers"] == 8


def test_mistakes(tmp_path: Path) -> None:
    for arguments, said in (
        (("gemma9",), "no family"),
        (("llama", "--format", "mxfp4"), "known in bf16"),
        (("llama", "--full-vocab", "--vocab", "9"), "contradict"),
    ):
        done = run(*arguments[:1], str(tmp_path / "no"), *arguments[1:])
        assert done.returncode == 2 and said in done.stderr and "Traceback" not in done.stderr
    assert os.listdir(tmp_path) == []
