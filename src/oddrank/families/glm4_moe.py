"""GLM-4.5 / 4.6 / 4.7: grouped-query attention, half of each head rotary; experts beside a shared one in all but the
first layers; norms on query and key heads in the large ones, biases on q, k and v."""

from __future__ import annotations

from oddrank.checkpoint.config import ConfigView
from oddrank.families.base import Family
from oddrank.families.decoder import (
    Heads,
    Index,
    Part,
    attention,
    decoder,
    head_norms,
    layer_index,
    layers,
    mlp,
    pre_norms,
)
from oddrank.families.experts import Experts, per_expert, router
from oddrank.families.next_token import drafts
from oddrank.geometry import Model


def build(c: ConfigView, prefix: str) -> Model:
    hidden, heads, every = c.require_int("hidden_size"), Heads.of(c, kv_heads=8), layer_index(c)
    bias, normed = c.get_bool("attention_bias", False), c.get_bool("use_qk_norm", False)
    dense = min(c.get_int("first_k_dense_replace", 1, low=0), len(every[0][1]))
    layer, experts = f"{prefix}layers.{{layer}}", Experts.of(c, count=("n_routed_experts", "num_local_experts"))
    shared = c.get_int("n_shared_experts", 1, low=0)

    def block(layer: str, index: Index, sparse: Index, choice: str) -> list[Part]:
        at, gate = f"{layer}.mlp", f"{layer}.mlp.gate"
        norms = head_norms(f"{layer}.self_attn", heads, index) if normed else []
        return [
            attention(f"{layer}.self_attn", hidden, heads, index, qkv_bias=bias),
            experts.part(f"{at}.experts", hidden, sparse, choice=choice),
            experts.shared(f"{at}.shared_experts", hidden, shared, sparse),
            Part([router(gate, hidden, sparse), per_expert(f"{gate}.e_score_correction_bias", sparse)]),
            Part([*norms, *pre_norms(layer, hidden, index)]),
        ]

    return decoder(
        c,
        prefix,
        "glm4_moe",
        *block(layer, every, layers(every[0][1][dense:]), "experts"),
        mlp(c, f"{layer}.mlp", layers(every[0][1][:dense])),
        drafts(c, prefix, lambda at, index: block(at, index, index, "MTP experts")),
    )


FAMILY = Family("glm4_moe", ("glm4_moe",), build)
