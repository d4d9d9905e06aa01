"""Llama: grouped-query attention, gated MLP; `attention_bias` puts a bias on q, k, v and o, `mlp_bias` on all three."""

from __future__ import annotations

from oddrank.checkpoint.config import ConfigView
from oddrank.families.base import Config, Family
from oddrank.families.decoder import dense_decoder
from oddrank.families.respell import as_mistral, as_seed_oss, head_dim_is_implied
from oddrank.geometry import Model


def build(c: ConfigView, prefix: str) -> Model:
    bias = c.get_bool("attention_bias", False)
    return dense_decoder(c, prefix, family="llama", qkv_bias=bias, o_bias=bias, mlp_bias=c.get_bool("mlp_bias", False))


def respell(config: Config, reader: str) -> Config:
    """LlamaConfig (transformers 5.x) refuses hidden % heads != 0 even with head_dim written out."""
    if head_dim_is_implied(config) or config["hidden_size"] % config["num_attention_heads"] == 0:
        return config
    bias, mlp_bias = bool(config.get("attention_bias")), bool(config.get("mlp_bias"))
    if bias or mlp_bias:
        return as_seed_oss(config, qkv_bias=bias, o_bias=bias, mlp_bias=mlp_bias)
    return as_mistral(config)


FAMILY = Family("llama", ("llama",), build, respell=respell)
