"""Padded checkpoints in plain transformers: the logits of the original, from a directory that just loads."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pad_models import config, difference, logits, weights, write_model
from safetensors.torch import load_file, save_file

from oddrank.checkpoint import Checkpoint
from oddrank.layout.plan import Plan
from oddrank.planner import make_plan
from oddrank.transform.pad import pad

TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-5}
"""Of the largest logit. transformers computes norms in float32 whatever the model's dtype."""

MODELS = {
    "llama": {"q": 9, "kv": 3, "mlp": 40, "tied": True, "dtype": torch.bfloat16, "max_shard_size": "20KB"},
    "llama one file": {"q": 8, "kv": 2, "mlp": 44, "tied": False},
    "llama biases": {"q": 9, "kv": 3, "mlp": 40, "attention_bias": True, "mlp_bias": True},
    "mistral": {"q": 8, "kv": 4, "hidden": 44, "mlp": 50, "sliding_window": 4},
    "mistral sharded": {"q": 15, "kv": 5, "mlp": 48, "sliding_window": None, "tied": True, "max_shard_size": "30KB"},
    "qwen2": {"q": 10, "kv": 2, "mlp": 36, "max_shard_size": "30KB"},
    "qwen2 one file": {"q": 14, "kv": 2, "mlp": 36, "tied": True, "dtype": torch.bfloat16},
    "qwen3": {"q": 12, "kv": 2, "hidden": 40, "mlp": 44, "tied": True, "dtype": torch.bfloat16},
    "qwen3 sharded": {"q": 12, "kv": 4, "mlp": 45, "head_dim": 16, "max_shard_size": "50KB"},
}
SIZES = {"llama": (2, 3, 5), "mistral": (3, 8), "qwen2": (4, 7), "qwen3": (3, 5)}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, torch.Tensor]]:
    """Name -> (directory, its logits in float64)."""
    root = tmp_path_factory.mktemp("models")
    made = {}
    for name, shape in MODELS.items():
        path = write_model(root / name.replace(" ", "-"), name.split()[0], **shape)
        made[name] = path, logits(path)
        assert bool(torch.isfinite(made[name][1]).all()) and float(made[name][1].std()) > 0.1
    return made


def write_padded(path: Path, out: Path, tp: int, layout: str) -> Plan:
    plan = make_plan(path, tp, executor="vllm", layout=layout).plan
    pad(plan, Checkpoint.open(path), out)
    return plan


@pytest.mark.parametrize("layout", ["pad", "replicate"])
@pytest.mark.parametrize(("name", "tp"), [(name, tp) for name in MODELS for tp in SIZES.get(name, (7,))])
def test_same_logits(
    models: dict[str, tuple[Path, torch.Tensor]], tmp_path: Path, name: str, tp: int, layout: str
) -> None:
    path, expected = models[name]
    write_padded(path, tmp_path / "out", tp, layout)
    new = config(tmp_path / "out")
    assert new["num_attention_heads"] % tp == 0 and new["intermediate_size"] % tp == 0
    # equal ranks: each has its own KV heads, or several share one that the engine copies
    assert new["num_key_value_heads"] % tp == 0 or tp % new["num_key_value_heads"] == 0
    assert new["num_attention_heads"] % new["num_key_value_heads"] == 0
    assert difference(expected, logits(tmp_path / "out")) < TOLERANCE[torch.float64]


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3"])
def test_same_logits_in_float32(models: dict[str, tuple[Path, torch.Tensor]], tmp_path: Path, name: str) -> None:
    path, _ = models[name]
    for layout in ("pad", "replicate"):
        write_padded(path, tmp_path / layout, 7, layout)
        found = logits(tmp_path / layout, torch.float32)
        assert difference(logits(path, torch.float32), found) < TOLERANCE[torch.float32]


def test_a_head_beside_the_wrong_kv_head_would_show(
    models: dict[str, tuple[Path, torch.Tensor]], tmp_path: Path
) -> None:
    """That the comparison above can fail: two KV heads of one layer exchanged."""
    path, expected = models["qwen3 sharded"]
    write_padded(path, tmp_path / "out", 3, "pad")
    name = "model.layers.1.self_attn.k_proj.weight"
    for file in (tmp_path / "out").glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            w = tensors[name].reshape(-1, 16, tensors[name].shape[-1])
            tensors[name] = w[[1, 0, *range(2, len(w))]].reshape(tensors[name].shape).contiguous()
            save_file(tensors, file, {"format": "pt"})
    assert difference(expected, logits(tmp_path / "out")) > 1e-3


def test_the_plan_is_what_was_written(models: dict[str, tuple[Path, torch.Tensor]], tmp_path: Path) -> None:
    """By hand, for one matrix: 9 query heads on 3 KV heads at TP=2 become 12 on 4, dummies last."""
    path, _ = models["llama biases"]
    plan = write_padded(path, tmp_path / "out", 2, "pad")
    assert plan.kind == "pad"
    before, after = weights(path), weights(tmp_path / "out")
    at = "model.layers.0.self_attn"
    q, o = after[f"{at}.q_proj.weight"], after[f"{at}.o_proj.weight"]
    assert q.shape == (96, 72) and o.shape == (72, 96) and after[f"{at}.k_proj.weight"].shape == (32, 72)
    assert torch.equal(q[:72], before[f"{at}.q_proj.weight"]) and not q[72:].any()
    assert torch.equal(o[:, :72], before[f"{at}.o_proj.weight"]) and not o[:, 72:].any()
    assert torch.equal(after[f"{at}.q_proj.bias"][:72], before[f"{at}.q_proj.bias"])
    assert not after[f"{at}.q_proj.bias"][72:].any()
    assert torch.equal(after[f"{at}.o_proj.bias"], before[f"{at}.o_proj.bias"])
    assert torch.equal(after["lm_head.weight"], before["lm_head.weight"])


@pytest.mark.parametrize(
    ("name", "tp", "layout", "model_type", "architecture"),
    [
        # 72 wide: 12 heads divide it and 15 do not; LlamaConfig refuses the second
        ("llama", 4, "pad", "llama", "LlamaForCausalLM"),
        ("llama", 5, "pad", "mistral", "MistralForCausalLM"),
        ("llama biases", 5, "pad", "seed_oss", "SeedOssForCausalLM"),
        # vLLM's qwen2 does not read head_dim
        ("qwen2", 3, "pad", "seed_oss", "SeedOssForCausalLM"),
        ("qwen2 one file", 3, "replicate", "seed_oss", "SeedOssForCausalLM"),
        ("mistral", 3, "pad", "mistral", "MistralForCausalLM"),
        ("qwen3", 3, "pad", "qwen3", "Qwen3ForCausalLM"),
    ],
)
def test_a_config_that_loads(
    models: dict[str, tuple[Path, torch.Tensor]],
    tmp_path: Path,
    name: str,
    tp: int,
    layout: str,
    model_type: str,
    architecture: str,
) -> None:
    path, expected = models[name]
    write_padded(path, tmp_path / "out", tp, layout)
    old, new = config(path), config(tmp_path / "out")
    assert (new["model_type"], new["architectures"]) == (model_type, [architecture])
    head_dim = old.get("head_dim") or old["hidden_size"] // old["num_attention_heads"]
    assert new["head_dim"] == head_dim and new["hidden_size"] == old["hidden_size"]
    if model_type == "mistral" and old["model_type"] == "llama":
        assert new["sliding_window"] is None
    assert difference(expected, logits(tmp_path / "out")) < TOLERANCE[torch.float64]


def test_llama_itself_refuses_such_a_config(models: dict[str, tuple[Path, torch.Tensor]], tmp_path: Path) -> None:
    """Why it is respelled at all: should transformers begin to accept it, this says so."""
    import transformers

    path, _ = models["llama"]
    write_padded(path, tmp_path / "out", 5, "pad")
    new = config(tmp_path / "out") | {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    with pytest.raises(Exception, match="not a multiple of the number of attention heads"):
        transformers.LlamaConfig(**{k: v for k, v in new.items() if k != "transformers_version"})
