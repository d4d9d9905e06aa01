"""Qwen2 / Qwen2.5: llama's tensors with a bias on q, k and v."""

from __future__ import annotations

from oddrank.checkpoint.config import ConfigView
from oddrank.families.base import Config, Family
from oddrank.families.decoder import dense_decoder
from oddrank.families.respell import as_seed_oss, head_dim_is_implied
from oddrank.geometry import Model


def build(c: ConfigView, prefix: str) -> Model:
    return dense_decoder(c, prefix, family="qwen2", kv_heads=32, qkv_bias=True)


def respell(config: Config, reader: str) -> Config:
    """transformers reads `head_dim`; vLLM's qwen2 computes hidden / heads whatever the config says."""
    if reader != "vllm" or head_dim_is_implied(config):
        return config
    return as_seed_oss(config, qkv_bias=True, o_bias=False, mlp_bias=False)


FAMILY = Family("qwen2", ("qwen2",), build, respell=respell)
