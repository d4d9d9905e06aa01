"""A padded checkpoint whose config has another architecture's name is one that every command reads."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch
import transformers
from click.testing import CliRunner
from pad_models import TOKENS, config, difference, logits, write_model

from oddrank.planner import make_plan
from oddrank.runtime.generate import forward_logits

NEW = 12
BIASES = {"qwen2": {}, "llama": {"attention_bias": True, "mlp_bias": True}}


def said(name: str, *arguments: str | Path) -> dict[str, object]:
    """What `oddrank NAME ... --json` prints."""
    command = importlib.import_module(f"oddrank.cli.{name}").command
    done = CliRunner().invoke(command, [*map(str, arguments), "--json"])
    assert done.exit_code == 0, done.output
    report: dict[str, object] = json.loads(done.stdout)
    return report


@pytest.fixture(scope="module", params=BIASES)
def padded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A model and its padded directory. 10 query heads of 5 KV heads are 12 at three ranks, which do not divide 80:
    from these, neither class gets its head_dim of 8."""
    folder = tmp_path_factory.mktemp("padded")
    source = write_model(folder / "source", request.param, q=10, kv=5, mlp=44, vocab=192, **BIASES[request.param])
    said("pad", source, folder / "out", "--tp", "3")
    return source, folder / "out"


def test_planned_checked_and_computed(padded: tuple[Path, Path]) -> None:
    source, out = padded
    assert config(out)["model_type"] == "seed_oss" and config(out)["num_attention_heads"] == 12
    assert said("plan", out, "--tp", "3", "--executor", "vllm")["layout"] == "identity"
    tensors = said("check", out, "--tp", "3")["tensors"]
    assert isinstance(tensors, dict) and tensors["total"] == tensors["with_role"] and not tensors["changed"]
    for tp in (1, 3, 5):
        found = forward_logits(out, make_plan(out, tp).plan, TOKENS, "fp64")
        assert difference(logits(source), found) < 1e-6, tp  # transformers' norms are in float32


def test_the_same_text(padded: tuple[Path, Path]) -> None:
    """Against transformers' own greedy text of the source, in float32."""
    source, out = padded
    model = transformers.AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    prompt = torch.tensor([TOKENS])
    told = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=NEW, do_sample=False)
    ids = ",".join(map(str, TOKENS))
    run = said("generate", out, "--tp", "3", "--prompt-ids", ids, "--max-tokens", str(NEW), "--dtype", "fp32")
    (text,) = run["outputs"]  # type: ignore[misc]
    assert text["token_ids"] == told[0, len(TOKENS) :].tolist()
