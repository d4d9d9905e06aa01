"""Tiny models of true geometry: for each family, random configs with the ratios, widths and switches that it has.

Head counts and widths are such that nothing divides by chance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from family_reference import Config

Rng = np.random.Generator
HEADS = ((6, 2), (9, 3), (8, 4), (12, 2), (4, 4), (10, 2))
"""Query and KV heads."""


def _common(rng: Rng, model_type: str, name: str, heads: tuple[int, int] | None = None, **more: Any) -> Config:
    q, kv = heads or HEADS[int(rng.integers(len(HEADS)))]
    made: Config = {
        "model_type": model_type,
        "architectures": [f"{name}ForCausalLM"],
        "num_attention_heads": q,
        "num_key_value_heads": kv,
        "head_dim": 4,
        "hidden_size": int(rng.choice([20, 26, 33])),
        "num_hidden_layers": 2,
        "vocab_size": int(rng.choice([33, 40, 64])),
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "tie_word_embeddings": bool(rng.random() < 0.3),
        "max_position_embeddings": 512,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
        "dtype": "float64",
    }
    return {**made, **more}


def _experts(rng: Rng, count: str = "num_experts", width: str = "moe_intermediate_size") -> Config:
    number, chosen = [(4, 2), (5, 2), (4, 1), (6, 3)][int(rng.integers(4))]
    return {count: number, "num_experts_per_tok": chosen, width: int(rng.choice([9, 14, 22]))}


def _switch(rng: Rng, p: float = 0.5) -> bool:
    return bool(rng.random() < p)


def qwen3_moe(rng: Rng) -> Config:
    dense = [[], [0], [1]][int(rng.integers(3))]
    return _common(
        rng, "qwen3_moe", "Qwen3Moe", **_experts(rng), intermediate_size=int(rng.choice([15, 20])),
        attention_bias=_switch(rng), norm_topk_prob=_switch(rng), mlp_only_layers=dense, decoder_sparse_step=1,
    )  # fmt: skip


def mixtral(rng: Rng) -> Config:
    window = 4 if _switch(rng, 0.3) else None
    return _common(
        rng, "mixtral", "Mixtral", **_experts(rng, "num_local_experts", "intermediate_size"), sliding_window=window
    )


def phi3(rng: Rng) -> Config:
    """No field of its own for head_dim: it is hidden / heads, unless the config writes it out nevertheless."""
    q, kv = HEADS[int(rng.integers(len(HEADS)))]
    c = _common(
        rng, "phi3", "Phi3", (q, kv), hidden_size=q * 4, intermediate_size=int(rng.choice([9, 14, 22])),
        partial_rotary_factor=float(rng.choice([0.5, 1.0])), original_max_position_embeddings=512,
        resid_pdrop=0.0, embd_pdrop=0.0, sliding_window=4 if _switch(rng, 0.3) else None,
    )  # fmt: skip
    c["rope_parameters"]["partial_rotary_factor"] = c["partial_rotary_factor"]
    del c["head_dim"]
    return c


def seed_oss(rng: Rng) -> Config:
    """Any of its three switches for biases, each by itself."""
    return _common(
        rng, "seed_oss", "SeedOss", intermediate_size=int(rng.choice([9, 14, 22])), attention_bias=_switch(rng),
        attention_out_bias=_switch(rng), mlp_bias=_switch(rng), attention_dropout=0.0, residual_dropout=0.0,
    )  # fmt: skip


def gpt_oss(rng: Rng) -> Config:
    kinds = [["sliding_attention", "full_attention"], ["full_attention", "sliding_attention"]][int(rng.integers(2))]
    return _common(
        rng, "gpt_oss", "GptOss", **_experts(rng, "num_local_experts", "intermediate_size"), sliding_window=3,
        layer_types=kinds, attention_bias=True, swiglu_alpha=1.702, swiglu_limit=float(rng.choice([0.7, 7.0])),
    )  # fmt: skip


def _grouped(rng: Rng) -> Config:
    """Experts of DeepSeek's kind, chosen inside the best groups of them."""
    experts, groups, kept, chosen = [(6, 1, 1, 2), (8, 2, 1, 2), (8, 4, 2, 3), (6, 3, 2, 2)][int(rng.integers(4))]
    return {
        "n_routed_experts": experts, "n_group": groups, "topk_group": kept, "num_experts_per_tok": chosen,
        "moe_intermediate_size": int(rng.choice([9, 14])), "intermediate_size": int(rng.choice([15, 20])),
        "n_shared_experts": int(rng.integers(1, 3)), "routed_scaling_factor": 1.5, "first_k_dense_replace": 1,
    }  # fmt: skip


def glm4_moe(rng: Rng) -> Config:
    c = _common(
        rng, "glm4_moe", "Glm4Moe", **_grouped(rng), use_qk_norm=_switch(rng), attention_bias=_switch(rng),
        norm_topk_prob=_switch(rng), partial_rotary_factor=0.5, num_nextn_predict_layers=0,
    )  # fmt: skip
    c["rope_parameters"]["partial_rotary_factor"] = 0.5
    return c


def qwen3_next(rng: Rng) -> Config:
    k, v = [(4, 8), (2, 6), (5, 10), (3, 3)][int(rng.integers(4))]
    c = _common(
        rng, "qwen3_next", "Qwen3Next", **_experts(rng), head_dim=8, linear_num_key_heads=k, linear_num_value_heads=v,
        linear_key_head_dim=4, linear_value_head_dim=6, linear_conv_kernel_dim=4, norm_topk_prob=True,
        shared_expert_intermediate_size=int(rng.choice([8, 11])), intermediate_size=int(rng.choice([15, 20])),
        layer_types=["linear_attention", "full_attention"], attention_bias=_switch(rng), decoder_sparse_step=1,
        mlp_only_layers=[[], [0]][int(rng.integers(2))], partial_rotary_factor=0.5,
    )  # fmt: skip
    c["rope_parameters"]["partial_rotary_factor"] = 0.5
    return c


def gemma3(rng: Rng) -> Config:
    c = _common(
        rng, "gemma3_text", "Gemma3", intermediate_size=int(rng.choice([9, 14, 22])), sliding_window=3,
        layer_types=["sliding_attention", "full_attention"], query_pre_attn_scalar=5, attention_bias=_switch(rng),
        final_logit_softcapping=3.0 if _switch(rng) else None, hidden_activation="gelu_pytorch_tanh",
        tie_word_embeddings=True,
    )  # fmt: skip
    c["hidden_size"] = 2 * c["num_attention_heads"]
    c["rope_parameters"] = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return c


def _latent(rng: Rng, model_type: str, name: str, **more: Any) -> Config:
    heads = int(rng.choice([4, 6, 9, 10]))
    c = _common(
        rng, model_type, name, (heads, heads), **_grouped(rng), kv_lora_rank=12, qk_nope_head_dim=6, qk_rope_head_dim=4,
        v_head_dim=5, q_lora_rank=10 if _switch(rng) else None, attention_bias=_switch(rng),
        num_nextn_predict_layers=0, **more,
    )  # fmt: skip
    del c["head_dim"]
    return c


def deepseek_v3(rng: Rng) -> Config:
    return _latent(rng, "deepseek_v3", "DeepseekV3", norm_topk_prob=_switch(rng), rope_interleave=True)


def deepseek_v2(rng: Rng) -> Config:
    c = _latent(rng, "deepseek_v2", "DeepseekV2", norm_topk_prob=False)
    c["topk_method"] = "greedy" if c["n_group"] == 1 else "group_limited_greedy"
    c["hidden_size"] = 2 * c["num_attention_heads"]
    return c


def minimax_m2(rng: Rng) -> Config:
    c = _common(
        rng, "minimax_m2", "MiniMaxM2", **_experts(rng, "num_local_experts", "intermediate_size"), rotary_dim=2
    )
    c["rope_parameters"]["partial_rotary_factor"] = 0.5
    return c


def gemma4(rng: Rng) -> Config:
    """Two geometries, keys that serve as values, experts, double-wide MLPs of layers that use another's keys, a second
    embedding: each in some of the configs."""
    q, kv, full = [(8, 4, 2), (12, 6, 3), (6, 3, 3), (8, 2, 4), (12, 4, 6)][int(rng.integers(5))]
    shared = int(rng.choice([0, 2]))
    kinds = ["sliding_attention", "full_attention"] * (2 if shared else 1)
    c = _common(
        rng, "gemma4_text", "Gemma4", (q, kv), intermediate_size=int(rng.choice([9, 14])), sliding_window=3,
        num_hidden_layers=len(kinds), layer_types=kinds, num_kv_shared_layers=shared, global_head_dim=8,
        use_double_wide_mlp=_switch(rng), hidden_size_per_layer_input=6 if shared else int(rng.choice([0, 6])),
        vocab_size_per_layer_input=512, attention_bias=_switch(rng), hidden_activation="gelu_pytorch_tanh",
        final_logit_softcapping=3.0 if _switch(rng) else None, enable_moe_block=_switch(rng), tie_word_embeddings=True,
    )  # fmt: skip
    if _switch(rng, 0.7):
        c |= {"attention_k_eq_v": True, "num_global_key_value_heads": full}
    if c["enable_moe_block"]:
        chosen = _experts(rng)
        c |= {k: chosen[k] for k in ("num_experts", "moe_intermediate_size")}
        c["top_k_experts"] = chosen["num_experts_per_tok"]
    c["rope_parameters"] = {
        "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }
    return c


FAMILIES: dict[str, Callable[[Rng], Config]] = {
    make.__name__: make
    for make in (
        qwen3_moe, mixtral, phi3, seed_oss, gpt_oss, glm4_moe, qwen3_next, gemma3, deepseek_v3, deepseek_v2, minimax_m2,
        gemma4,
    )
}  # fmt: skip
"""What a test is parametrized by -> a random config of it."""

MIXTURES = [name for name, make in FAMILIES.items() if "num_experts_per_tok" in make(np.random.default_rng(0))]


def busy(family: str, tp: int) -> Config:
    """A config whose heads, widths and vocabulary fit `tp` ranks badly and yet leave something real on every rank, with
    dummies and at the trained ratio."""
    c = FAMILIES[family](np.random.default_rng(tp))
    kv = 2 * tp - 1
    q = kv if "kv_lora_rank" in c else 3 * kv
    if family == "minimax_m2":  # copies of KV heads, equally many of each and no dummies, serve the size
        kv = 4 if tp % 3 == 0 else 3
        q = kv * tp
    c |= {"num_attention_heads": q, "num_key_value_heads": kv, "vocab_size": 64 * tp - 5}
    if family in ("phi3", "gemma3", "deepseek_v2"):  # the stock class wants whole heads in the hidden size
        c["hidden_size"] = 4 * q if family == "phi3" else 2 * q
    if c.get("attention_k_eq_v"):
        c |= {"num_attention_heads": 4 * kv, "num_global_key_value_heads": 2 * kv}
    if "linear_num_key_heads" in c:
        c |= {"linear_num_key_heads": kv, "linear_num_value_heads": 2 * kv}
    for key, width in (("intermediate_size", 37), ("moe_intermediate_size", 23)):
        if key in c:
            c[key] = width
    if "shared_expert_intermediate_size" in c:
        c["shared_expert_intermediate_size"] = 19
    return c
