"""Gemma 3 and 4, text-only: tensor tables and configs, from the published checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from oddrank.synth.sizes import Gemma
from oddrank.synth.tables import Logical, gated_mlp

Config = dict[str, Any]
AROUND = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
BESIDE = ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")


def kinds(size: Gemma) -> list[str]:
    """Of every layer; the last attends to everything whatever its number."""
    made = ["sliding_attention" if (i + 1) % size.period else "full_attention" for i in range(size.layers)]
    return [*made[:-1], "full_attention"] if size.full_head_dim else made


def gemma_table(family: str, size: Gemma) -> Iterator[Logical]:
    h, new = size.hidden, family == "gemma4"
    norm = "norm" if new else "shifted_norm"
    yield Logical("model.embed_tokens.weight", (size.vocab, h), "embedding", "outside")
    for i, kind in enumerate(kinds(size)):
        at, file, full = f"model.layers.{i}", f"layers-{i}", kind == "full_attention"
        borrows = i >= size.layers - size.borrowing
        d = (size.full_head_dim or size.head_dim) if full else size.head_dim
        q, kv = size.q_heads * d, ((size.full_kv_heads or size.kv_heads) if full else size.kv_heads) * d
        rows = {"q_proj": q} if borrows else {"q_proj": q, "k_proj": kv, "v_proj": kv}
        if full and size.keys_as_values:
            rows.pop("v_proj", None)
        for name, n in rows.items():
            yield Logical(f"{at}.self_attn.{name}.weight", (n, h), "attention", file)
        yield Logical(f"{at}.self_attn.o_proj.weight", (h, q), "attention", file)
        for name in ("q_norm",) if borrows else ("q_norm", "k_norm"):
            yield Logical(f"{at}.self_attn.{name}.weight", (d,), norm, file)
        yield from gated_mlp(f"{at}.mlp", size.mlp * (2 if borrows else 1), h, "mlp", file)
        for name in (*AROUND, *(BESIDE if size.experts else ())):
            yield Logical(f"{at}.{name}.weight", (h,), norm, file)
        if new:
            yield Logical(f"{at}.layer_scalar", (1,), "norm", file)
        if size.experts:
            yield Logical(f"{at}.router.proj.weight", (size.experts, h), "router", file)
            yield Logical(f"{at}.router.scale", (h,), "norm", file)
            yield Logical(f"{at}.router.per_expert_scale", (size.experts,), "norm", file)
            yield Logical(f"{at}.experts.gate_up_proj", (size.experts, 2 * size.moe, h), "stacked", file)
            yield Logical(f"{at}.experts.down_proj", (size.experts, h, size.moe), "stacked", file)
        if size.per_layer:
            yield Logical(f"{at}.per_layer_input_gate.weight", (size.per_layer, h), "projection", file)
            yield Logical(f"{at}.per_layer_projection.weight", (h, size.per_layer), "projection", file)
            yield Logical(f"{at}.post_per_layer_input_norm.weight", (h,), norm, file)
    if size.per_layer:
        across = size.layers * size.per_layer
        yield Logical("model.embed_tokens_per_layer.weight", (size.vocab, across), "embedding", "outside")
        yield Logical("model.per_layer_model_projection.weight", (across, h), "projection", "outside")
        yield Logical("model.per_layer_projection_norm.weight", (size.per_layer,), norm, "outside")
    yield Logical("model.norm.weight", (h,), norm, "outside")


def gemma_config(family: str, size: Gemma) -> Config:
    made: Config = {
        "architectures": [{"gemma3": "Gemma3", "gemma4": "Gemma4"}[family] + "ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 2,
        "dtype": "bfloat16",
        "eos_token_id": 1,
        "final_logit_softcapping": 30.0 if family == "gemma4" else None,
        "head_dim": size.head_dim,
        "hidden_activation": "gelu_pytorch_tanh",
        "hidden_size": size.hidden,
        "initializer_range": 0.02,
        "intermediate_size": size.mlp,
        "layer_types": kinds(size),
        "max_position_embeddings": 131072,
        "model_type": f"{family}_text",
        "num_attention_heads": size.q_heads,
        "num_hidden_layers": size.layers,
        "num_key_value_heads": size.kv_heads,
        "pad_token_id": 0,
        "rms_norm_eps": size.eps,
        "rope_parameters": {
            "full_attention": {"rope_theta": 1000000.0, "rope_type": "default"},
            "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
        },
        "sliding_window": size.window,
        "tie_word_embeddings": size.tied,
        "use_cache": True,
        "vocab_size": size.vocab,
    }
    if family == "gemma3":
        return made | {"attn_logit_softcapping": None, "query_pre_attn_scalar": size.query_scalar}
    made["rope_parameters"]["full_attention"] |= {"partial_rotary_factor": 0.25, "rope_type": "proportional"}
    return made | {
        "attention_k_eq_v": size.keys_as_values,
        "enable_moe_block": size.experts > 0,
        "global_head_dim": size.full_head_dim,
        "hidden_size_per_layer_input": size.per_layer,
        "moe_intermediate_size": size.moe or None,
        "num_experts": size.experts or None,
        "num_global_key_value_heads": size.full_kv_heads,
        "num_kv_shared_layers": size.borrowing,
        "top_k_experts": size.chosen or None,
        "use_double_wide_mlp": size.borrowing > 0,
        "vocab_size_per_layer_input": size.vocab,
    }
