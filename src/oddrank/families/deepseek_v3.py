"""DeepSeek-V3 / R1, Kimi-K2 and DeepSeek-V2: multi-head latent attention, and experts beside shared ones in all but the
first layers.

Queries come through a latent of `q_lora_rank` (where there is one), keys and values through one of `kv_lora_rank` that
all heads share: the projections to a latent are whole on every rank, those from it are cut by heads. The cache holds
the latent and one rotary key, the same on every rank.
"""

from __future__ import annotations

from oddrank.checkpoint.config import ConfigView
from oddrank.families.base import Config, Family
from oddrank.families.decoder import Index, Part, decoder, layer_index, layers, linear, mlp, norm, pre_norms
from oddrank.families.experts import Experts, per_expert, router
from oddrank.families.next_token import drafts
from oddrank.families.respell import require_dividing_heads
from oddrank.geometry import Along, Axis, KVCache, Model, Whole


def latent_attention(c: ConfigView, at: str, index: Index) -> Part:
    """MLA. Rows of q_b_proj are per head `[plain | rotary]`, of kv_b_proj `[plain key | value]`."""
    hidden, low, bias = c.require_int("hidden_size"), c.require_int("kv_lora_rank"), c.get_bool("attention_bias", False)
    plain, turned = c.require_int("qk_nope_head_dim"), c.require_int("qk_rope_head_dim")
    value = c.get_int("v_head_dim", 128)
    q, kv, h = Along("q_heads", plain + turned), Along("q_heads", plain + value), Whole(hidden)
    if "q_lora_rank" in c:
        between = c.require_int("q_lora_rank")
        queries = [
            *linear(f"{at}.q_a_proj", Whole(between), h, "replicated", index, bias),
            norm(f"{at}.q_a_layernorm", between, index),
            *linear(f"{at}.q_b_proj", q, Whole(between), "column", index),
        ]
    else:
        queries = linear(f"{at}.q_proj", q, h, "column", index)
    return Part(
        roles=[
            *queries,
            *linear(f"{at}.kv_a_proj_with_mqa", Whole(low + turned), h, "replicated", index, bias),
            norm(f"{at}.kv_a_layernorm", low, index),
            *linear(f"{at}.kv_b_proj", kv, Whole(low), "column", index),
            *linear(f"{at}.o_proj", h, Along("q_heads", value), "row", index, bias),
        ],
        axes=(Axis("q_heads", c.require_int("num_attention_heads"), "heads"),),
        kv=(KVCache(None, layers=len(index[0][1]), width=low + turned),),
        config_axes=(("num_attention_heads", "q_heads"), ("num_key_value_heads", "q_heads")),
    )


def build(c: ConfigView, prefix: str) -> Model:
    hidden, every = c.require_int("hidden_size"), layer_index(c)
    corrected = c.model_type != "deepseek_v2"  # a bias for the choice of experts; V2 has none
    dense = min(c.get_int("first_k_dense_replace", 3 if corrected else 0, low=0), len(every[0][1]))
    experts = Experts.of(c, count=("n_routed_experts", "num_local_experts", "num_experts"))
    shared = c.get_int("n_shared_experts", 1 if corrected else 2, low=0)
    layer = f"{prefix}layers.{{layer}}"

    def block(layer: str, index: Index, sparse: Index, choice: str) -> list[Part]:
        at, gate = f"{layer}.mlp", f"{layer}.mlp.gate"
        bias = [per_expert(f"{gate}.e_score_correction_bias", sparse)] if corrected else []
        return [
            latent_attention(c, f"{layer}.self_attn", index),
            experts.part(f"{at}.experts", hidden, sparse, choice=choice),
            experts.shared(f"{at}.shared_experts", hidden, shared, sparse),
            Part([router(gate, hidden, sparse), *bias, *pre_norms(layer, hidden, index)]),
        ]

    return decoder(
        c,
        prefix,
        "deepseek_v3",
        *block(layer, every, layers(every[0][1][dense:]), "experts"),
        mlp(c, f"{layer}.mlp", layers(every[0][1][:dense])),
        drafts(c, prefix, lambda at, index: block(at, index, index, "MTP experts")) if corrected else Part(),
    )


def respell(config: Config, reader: str) -> Config:
    """DeepseekV2Config (transformers 5.x) refuses hidden % heads != 0, which latent attention has no use for."""
    if config.get("model_type") == "deepseek_v2":
        require_dividing_heads(config)
    return config


FAMILY = Family("deepseek_v3", ("deepseek_v3", "deepseek_v2", "kimi_k2"), build, respell=respell)
