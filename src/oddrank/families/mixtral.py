"""Mixtral: Mistral's attention, and in every layer experts that are named w1 (gate), w2 (down) and w3 (up)."""

from __future__ import annotations

from oddrank.checkpoint.config import ConfigView
from oddrank.families.base import Family
from oddrank.families.decoder import Heads, Part, attention, decoder, layer_index, pre_norms
from oddrank.families.experts import NUMBERED, Experts, router
from oddrank.geometry import Model


def build(c: ConfigView, prefix: str) -> Model:
    hidden, heads, every = c.require_int("hidden_size"), Heads.of(c, kv_heads=8), layer_index(c)
    layer = f"{prefix}layers.{{layer}}"
    experts = Experts.of(c, count=("num_local_experts", "num_experts"), width="intermediate_size")
    return decoder(
        c,
        prefix,
        "mixtral",
        attention(f"{layer}.self_attn", hidden, heads, every),
        experts.part(f"{layer}.block_sparse_moe.experts", hidden, every, names=NUMBERED),
        Part([router(f"{layer}.block_sparse_moe.gate", hidden, every), *pre_norms(layer, hidden, every)]),
    )


FAMILY = Family("mixtral", ("mixtral",), build)
