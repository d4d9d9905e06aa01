"""Qwen3 MoE: Qwen3's attention, and experts in place of the MLP in all layers but those that the config names."""

from __future__ import annotations

from oddrank.checkpoint.config import ConfigView
from oddrank.families.base import Family
from oddrank.families.decoder import Heads, Part, attention, decoder, head_norms, layer_index, layers, mlp, pre_norms
from oddrank.families.experts import Experts, router, sparse_layers
from oddrank.geometry import Model


def build(c: ConfigView, prefix: str) -> Model:
    hidden, heads, every = c.require_int("hidden_size"), Heads.of(c, kv_heads=4), layer_index(c)
    bias, layer = c.get_bool("attention_bias", False), f"{prefix}layers.{{layer}}"
    dense, sparse = (layers(numbers) for numbers in sparse_layers(c))
    return decoder(
        c,
        prefix,
        "qwen3_moe",
        attention(f"{layer}.self_attn", hidden, heads, every, qkv_bias=bias, o_bias=bias),
        mlp(c, f"{layer}.mlp", dense),
        Experts.of(c).part(f"{layer}.mlp.experts", hidden, sparse),
        Part([router(f"{layer}.mlp.gate", hidden, sparse)]),
        Part([*head_norms(f"{layer}.self_attn", heads, every), *pre_norms(layer, hidden, every)]),
    )


FAMILY = Family("qwen3_moe", ("qwen3_moe",), build)
