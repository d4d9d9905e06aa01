"""Tiny random models that transformers itself writes, and its logits for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file

TOKENS = [3, 17, 41, 5, 5, 60, 22, 9, 33, 1]
CLASSES = {
    "llama": (transformers.LlamaConfig, transformers.LlamaForCausalLM),
    "mistral": (transformers.MistralConfig, transformers.MistralForCausalLM),
    "qwen2": (transformers.Qwen2Config, transformers.Qwen2ForCausalLM),
    "qwen3": (transformers.Qwen3Config, transformers.Qwen3ForCausalLM),
}


def write_model(
    path: Path,
    family: str,
    *,
    q: int,
    kv: int,
    head_dim: int = 8,
    hidden: int | None = None,
    mlp: int = 48,
    layers: int = 2,
    vocab: int = 64,
    tied: bool = False,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str | int = "1GB",
    **more: Any,
) -> Path:
    """A model directory by save_pretrained. Its weights are such that every head and channel matters."""
    config_class, model_class = CLASSES[family]
    config = config_class(
        hidden_size=hidden or q * head_dim,
        intermediate_size=mlp,
        num_attention_heads=q,
        num_key_value_heads=kv,
        num_hidden_layers=layers,
        vocab_size=vocab,
        tie_word_embeddings=tied,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
        **({} if family in ("llama", "qwen2") else {"head_dim": head_dim}),
        **more,
    )
    torch.manual_seed(q * 1000 + kv)
    model = model_class(config).to(dtype)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.copy_(1 + 0.3 * torch.randn(parameter.shape))
            elif name.endswith(".bias"):
                parameter.copy_(0.5 * torch.randn(parameter.shape))
            else:
                scale = 2.0 if "q_proj" in name or "k_proj" in name else 1.0
                parameter.copy_(scale * torch.randn(parameter.shape) / parameter.shape[-1] ** 0.5)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    return path


def logits(path: Path, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """[tokens, vocab]: what AutoModelForCausalLM computes from the directory, and nothing but it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, info = transformers.AutoModelForCausalLM.from_pretrained(
            path, dtype=dtype, attn_implementation="eager", output_loading_info=True
        )
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    with torch.inference_mode():
        out: torch.Tensor = model(torch.tensor([TOKENS]), use_cache=False).logits[0]
    assert out.dtype == dtype
    return out


def difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest difference, relative to the largest value."""
    return float((a - b).abs().max() / a.abs().max())


def weights(path: Path) -> dict[str, torch.Tensor]:
    """Every tensor of the directory, by the safetensors library."""
    found: dict[str, torch.Tensor] = {}
    for file in sorted(path.glob("*.safetensors")):
        found |= load_file(file)
    return found


def config(path: Path) -> dict[str, Any]:
    made: dict[str, Any] = json.loads((path / "config.json").read_text())
    return made


def tree(path: Path) -> dict[str, bytes]:
    """Every file of the directory with what is in it."""
    return {str(f.relative_to(path)): f.read_bytes() for f in sorted(path.rglob("*")) if f.is_file()}


def command(*arguments: str | Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run `oddrank ...`."""
    return subprocess.run(
        [sys.executable, "-m", "oddrank", *map(str, arguments)],
        capture_output=True,
        text=True,
        env=os.environ | (env or {}),
        timeout=120,
    )
