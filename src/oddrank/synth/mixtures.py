"""Decoders with experts in all layers or nearly all: tensor tables and configs, from the published checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from oddrank.synth.sizes import Mixture
from oddrank.synth.tables import Logical, gated_mlp

Config = dict[str, Any]


class Names(NamedTuple):
    """What a family calls its block of experts, its router, and the gate, up and down projection of an expert."""

    block: str = "mlp"
    router: str = "gate"
    expert: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")


_NUMBERED = Names("block_sparse_moe", "gate", ("w1", "w3", "w2"))
NAMES = {"mixtral": _NUMBERED, "minimax_m2": _NUMBERED, "gpt_oss": Names(router="router")}


def mixture_table(family: str, size: Mixture) -> Iterator[Logical]:
    h = size.hidden
    yield Logical("model.embed_tokens.weight", (size.vocab, h), "embedding", "outside")
    for i in range(size.layers):
        yield from _layer(family, size, f"model.layers.{i}", f"layers-{i}", dense=i < size.dense)
    for i in range(size.layers, size.layers + size.drafts):
        at = f"model.layers.{i}"
        yield from _layer(family, size, at, "mtp", dense=False)
        yield Logical(f"{at}.eh_proj.weight", (h, 2 * h), "mtp_fc", "mtp")
        for norm in ("enorm", "hnorm", "shared_head.norm"):
            yield Logical(f"{at}.{norm}.weight", (h,), "norm", "mtp")
        if size.words:
            yield Logical(f"{at}.embed_tokens.weight", (size.vocab, h), "embedding", "mtp")
            yield Logical(f"{at}.shared_head.head.weight", (size.vocab, h), "lm_head", "mtp")
    yield Logical("model.norm.weight", (h,), "norm", "outside")
    if not size.tied:
        yield Logical("lm_head.weight", (size.vocab, h), "lm_head", "outside")


def _layer(family: str, size: Mixture, at: str, file: str, *, dense: bool) -> Iterator[Logical]:
    h = size.hidden
    yield from _attention(family, size, f"{at}.self_attn", file)
    if dense:
        yield from gated_mlp(f"{at}.mlp", size.mlp, h, "mlp", file)
    else:
        names = NAMES.get(family, Names())
        yield from _experts(family, size, f"{at}.{names.block}", file, names)
    for norm in ("input_layernorm", "post_attention_layernorm"):
        yield Logical(f"{at}.{norm}.weight", (h,), "norm", file)


def _linear(name: str, rows: int, columns: int, file: str, bias: bool) -> Iterator[Logical]:
    yield Logical(f"{name}.weight", (rows, columns), "attention", file)
    if bias:
        yield Logical(f"{name}.bias", (rows,), "bias", file)


def _attention(family: str, size: Mixture, at: str, file: str) -> Iterator[Logical]:
    h, q, kv = size.hidden, size.q_heads, size.kv_heads
    if size.latent is not None:
        m = size.latent
        width = m.plain + m.rotary
        if m.query_rank is None:
            yield from _linear(f"{at}.q_proj", q * width, h, file, False)
        else:
            yield from _linear(f"{at}.q_a_proj", m.query_rank, h, file, False)
            yield Logical(f"{at}.q_a_layernorm.weight", (m.query_rank,), "norm", file)
            yield from _linear(f"{at}.q_b_proj", q * width, m.query_rank, file, False)
        yield from _linear(f"{at}.kv_a_proj_with_mqa", m.kv_rank + m.rotary, h, file, False)
        yield Logical(f"{at}.kv_a_layernorm.weight", (m.kv_rank,), "norm", file)
        yield from _linear(f"{at}.kv_b_proj", q * (m.plain + m.value), m.kv_rank, file, False)
        yield from _linear(f"{at}.o_proj", h, q * m.value, file, False)
        return
    d, bias = size.head_dim, family in ("gpt_oss", "glm4_moe")
    for name, rows in (("q_proj", q * d), ("k_proj", kv * d), ("v_proj", kv * d)):
        yield from _linear(f"{at}.{name}", rows, h, file, bias)
    yield from _linear(f"{at}.o_proj", h, q * d, file, family == "gpt_oss")
    if family == "gpt_oss":
        yield Logical(f"{at}.sinks", (q,), "bias", file)
    # one norm per head, or one over all of them
    across = family == "minimax_m2"
    for name, heads in (("q_norm", q), ("k_norm", kv)) if size.qk_norm or across else ():
        yield Logical(f"{at}.{name}.weight", (heads * d if across else d,), "norm", file)


def _experts(family: str, size: Mixture, at: str, file: str, names: Names) -> Iterator[Logical]:
    h, count, width = size.hidden, size.experts, size.moe
    yield Logical(f"{at}.{names.router}.weight", (count, h), "router", file)
    if family == "gpt_oss":
        yield Logical(f"{at}.router.bias", (count,), "bias", file)
        yield Logical(f"{at}.experts.gate_up_proj", (count, h, 2 * width), "bank", file)
        yield Logical(f"{at}.experts.gate_up_proj_bias", (count, 2 * width), "bias", file)
        yield Logical(f"{at}.experts.down_proj", (count, width, h), "bank", file)
        yield Logical(f"{at}.experts.down_proj_bias", (count, h), "bias", file)
        return
    if family == "minimax_m2":
        yield Logical(f"{at}.e_score_correction_bias", (count,), "bias", file)
    elif family == "glm4_moe" or (family == "deepseek_v3" and size.model_type != "deepseek_v2"):
        yield Logical(f"{at}.gate.e_score_correction_bias", (count,), "bias", file)
    for e in range(count):
        yield from gated_mlp(f"{at}.experts.{e}", width, h, "expert", file, names.expert)
    if size.shared:
        yield from gated_mlp(f"{at}.shared_experts", size.shared * width, h, "shared", file)


_CLASSES = {
    "qwen3_moe": "Qwen3Moe", "mixtral": "Mixtral", "gpt_oss": "GptOss", "glm4_moe": "Glm4Moe",
    "deepseek_v3": "DeepseekV3", "minimax_m2": "MiniMaxM2",
}  # fmt: skip


def mixture_config(family: str, size: Mixture) -> Config:
    name = "DeepseekV2" if size.model_type == "deepseek_v2" else _CLASSES[family]
    made: Config = {
        "architectures": [f"{name}ForCausalLM"],
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": size.vocab - 1,
        "hidden_act": "silu",
        "hidden_size": size.hidden,
        "initializer_range": 0.02,
        "max_position_embeddings": 32768,
        "model_type": size.model_type or family,
        "num_attention_heads": size.q_heads,
        "num_experts_per_tok": size.chosen,
        "num_hidden_layers": size.layers,
        "num_key_value_heads": size.kv_heads,
        "rms_norm_eps": size.eps,
        "rope_parameters": {"rope_theta": size.theta, "rope_type": "default"},
        "tie_word_embeddings": size.tied,
        "use_cache": True,
        "vocab_size": size.vocab,
    }
    if size.latent is None:
        made["head_dim"] = size.head_dim
    return made | _OWN[family](size)


def _qwen3_moe(size: Mixture) -> Config:
    return {
        "attention_bias": False, "decoder_sparse_step": 1, "intermediate_size": size.mlp, "mlp_only_layers": [],
        "moe_intermediate_size": size.moe, "norm_topk_prob": True, "num_experts": size.experts,
        "sliding_window": None, "use_sliding_window": False,
    }  # fmt: skip


def _mixtral(size: Mixture) -> Config:
    return {"intermediate_size": size.moe, "num_local_experts": size.experts, "sliding_window": None}


def _gpt_oss(size: Mixture) -> Config:
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in range(size.layers)]
    return {
        "attention_bias": True, "intermediate_size": size.moe, "layer_types": kinds,
        "num_local_experts": size.experts, "sliding_window": 128, "swiglu_limit": 7.0,
    }  # fmt: skip


def _grouped(size: Mixture) -> Config:
    return {
        "attention_bias": False, "first_k_dense_replace": size.dense, "intermediate_size": size.mlp,
        "moe_intermediate_size": size.moe, "n_group": size.groups[0], "n_routed_experts": size.experts,
        "n_shared_experts": size.shared, "norm_topk_prob": True, "num_nextn_predict_layers": size.drafts,
        "routed_scaling_factor": 2.5, "topk_group": size.groups[1],
    }  # fmt: skip


def _glm4_moe(size: Mixture) -> Config:
    more = {"attention_bias": True, "partial_rotary_factor": 0.5, "use_qk_norm": size.qk_norm}
    return _grouped(size) | more


def _deepseek_v3(size: Mixture) -> Config:
    latent = size.latent
    assert latent is not None
    made = _grouped(size) | {
        "kv_lora_rank": latent.kv_rank, "q_lora_rank": latent.query_rank, "qk_nope_head_dim": latent.plain,
        "qk_rope_head_dim": latent.rotary, "v_head_dim": latent.value, "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }  # fmt: skip
    if size.model_type == "deepseek_v2":
        made |= {"topk_method": "greedy", "norm_topk_prob": False, "scoring_func": "softmax"}
    return made


def _minimax_m2(size: Mixture) -> Config:
    return {
        "intermediate_size": size.moe, "num_local_experts": size.experts, "qk_norm_type": "per_layer",
        "rotary_dim": size.head_dim // 2, "scoring_func": "sigmoid", "use_qk_norm": True, "use_routing_bias": True,
    }  # fmt: skip


_OWN = {
    "qwen3_moe": _qwen3_moe, "mixtral": _mixtral, "gpt_oss": _gpt_oss, "glm4_moe": _glm4_moe,
    "deepseek_v3": _deepseek_v3, "minimax_m2": _minimax_m2,
}  # fmt: skip
