"""Qwen3 dense: an RMS norm of head_dim on every query and key head; optional bias on q, k, v and o."""

from __future__ import annotations

from oddrank.checkpoint.config import ConfigView
from oddrank.families.base import Family
from oddrank.families.decoder import dense_decoder
from oddrank.geometry import Model


def build(c: ConfigView, prefix: str) -> Model:
    bias = c.get_bool("attention_bias", False)
    return dense_decoder(c, prefix, family="qwen3", kv_heads=32, head_dim=128, qkv_bias=bias, o_bias=bias, qk_norm=True)


FAMILY = Family("qwen3", ("qwen3",), build)
