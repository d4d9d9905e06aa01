"""MiniMax-M2: grouped-query attention whose norms of queries and keys each run across all heads, and experts in every
layer, chosen by sigmoid scores and a bias.

The mean of such a norm is over the whole width, so dummies and unequal copies would change it. Copies of every head
equally often do not, and vLLM's norm (0.32: MiniMaxText01RMSNormTP) averages the ranks' means, which is the same; other
layouts are refused for it.
"""

from __future__ import annotations

from oddrank.checkpoint.config import ConfigView
from oddrank.families.base import Family
from oddrank.families.decoder import Heads, Part, attention, decoder, layer_index, pre_norms
from oddrank.families.experts import NUMBERED, Experts, per_expert, router
from oddrank.geometry import Along, Crosstalk, Model, Role


def build(c: ConfigView, prefix: str) -> Model:
    hidden, heads, every = c.require_int("hidden_size"), Heads.of(c, kv_heads=8, head_dim=128), layer_index(c)
    bias, layer = c.get_bool("attention_bias", False), f"{prefix}layers.{{layer}}"
    moe, at = f"{layer}.block_sparse_moe", f"{layer}.self_attn"
    experts = Experts.of(c, count=("num_local_experts", "num_experts"), width="intermediate_size")
    norms = (("q_heads", f"{at}.q_norm"), ("kv_heads", f"{at}.k_norm"))
    corrected = c.get_bool("use_routing_bias", True)
    return decoder(
        c,
        prefix,
        "minimax_m2",
        attention(at, hidden, heads, every, qkv_bias=bias),
        Part(
            roles=[Role(f"{name}.weight", (Along(axis, heads.width),), "column", every) for axis, name in norms],
            crosstalk=tuple(Crosstalk(axis, "rms_norm", name) for axis, name in norms),
        ),
        experts.part(f"{moe}.experts", hidden, every, names=NUMBERED),
        Part([router(f"{moe}.gate", hidden, every), *pre_norms(layer, hidden, every)]),
        Part([per_expert(f"{moe}.e_score_correction_bias", every)] if corrected else ()),
    )


FAMILY = Family("minimax_m2", ("minimax_m2",), build)
