"""The oracle's own decoding of integers, int8 and MXFP8; transformers on padded checkpoints of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from cli.test_cli import run
from formats.integers import PACKINGS, Packed
from formats.packed_models import decoded, matrices, parts_of, write
from formats.test_gpt_oss_experts import AT, experts_of, tensors
from formats.test_integer_plans import reader
from safetensors.torch import save_file

from oddrank.planner import make_plan, quantization_of
from oddrank.synth import describe_release, write_checkpoint
from oddrank.verify.decode import plain_state
from oddrank.verify.oracle import transformers_logits
from oddrank.verify.verify import verify_padded


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Models this small take longer on several threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("name", PACKINGS)
def test_the_oracle_reads_every_packing(name: str, tmp_path: Path) -> None:
    packing: Packed = PACKINGS[name]
    source = write(tmp_path, packing, q=2, kv=2, mlp=256)
    said = quantization_of(source)
    assert said is not None
    state = plain_state(tmp_path, said, torch.float64)
    found = matrices(list(source.tensors))
    assert state.keys() == found.keys()
    for dense, suffixes in found.items():
        assert np.array_equal(state[dense].numpy(), decoded(packing, parts_of(reader(source), dense, suffixes))), dense


def test_the_oracle_reads_stacked_blocks(tmp_path: Path) -> None:
    """As transformers keeps them: inputs before outputs."""
    source = tensors(96)
    experts = {n: torch.from_numpy(r.words) for n, r in source.items() if n.endswith(("_blocks", "_scales"))}
    save_file(experts, tmp_path / "model.safetensors")
    state = plain_state(tmp_path, {"quant_method": "mxfp4"}, torch.float32)
    assert state.keys() == {f"{AT}.gate_up_proj", f"{AT}.down_proj"}
    for name in ("gate_up_proj", "down_proj"):
        assert np.array_equal(state[f"{AT}.{name}"].numpy(), experts_of(source, name).transpose(0, 2, 1))


@pytest.mark.parametrize(
    ("family", "fmt", "tp"),
    [
        ("llama", "int8", 3), ("llama", "int4-ct-asym", 3), ("llama", "int8-ct", 5), ("mistral", "awq", 3),
        ("qwen2", "gptq", 3), ("qwen3", "mxfp8", 5), ("qwen3", "auto-round", 3), ("qwen3_5", "gptq", 3),
        ("qwen3_5_moe", "int4-ct", 5),
    ],
)  # fmt: skip
def test_a_padded_release_has_the_logits_of_its_original(family: str, fmt: str, tp: int, tmp_path: Path) -> None:
    source = write_checkpoint(describe_release(family, fmt, size="tiny", experts=4), tmp_path / "m")
    plan = make_plan(source, tp, executor="vllm").plan
    assert not plan.is_identity()
    prompts = [[3, 141, 59, 26, 5, 35, 89, 79], [2, 71, 82]]
    verdict = verify_padded(source, plan, prompts, transformers_logits(source, prompts, "fp64"), "fp64", str(tmp_path))
    assert verdict.ok and verdict.comparison.max_rel < 2e-6 and verdict.comparison.greedy_agreement == 1


def test_the_command_verifies_the_padded_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_checkpoint(describe_release("qwen2", "gptq", size="tiny"), tmp_path / "m")
    code, out, _ = run(capsys, "verify", source, "--tp", 3, "--only", "padded", "--dtype", "fp64")
    assert code == 0 and "same" in out and "padded checkpoint TP=3" in out
