"""Seed-OSS: llama's tensors; `attention_bias` puts a bias on q, k and v, `attention_out_bias` one on o, and `mlp_bias`
on all of the MLP."""

from __future__ import annotations

from oddrank.checkpoint.config import ConfigView
from oddrank.families.base import Family
from oddrank.families.decoder import dense_decoder
from oddrank.geometry import Model


def build(c: ConfigView, prefix: str) -> Model:
    """Defaults are those of transformers' SeedOssConfig; the biases of q, k and v are on."""
    return dense_decoder(
        c,
        prefix,
        family="seed_oss",
        kv_heads=8,
        head_dim=128,
        qkv_bias=c.get_bool("attention_bias", True),
        o_bias=c.get_bool("attention_out_bias", False),
        mlp_bias=c.get_bool("mlp_bias", False),
    )


FAMILY = Family("seed_oss", ("seed_oss",), build)
