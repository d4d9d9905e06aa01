"""config.json of a release, complete enough for transformers to build the model."""

from __future__ import annotations

from typing import Any

from oddrank.synth.gemmas import gemma_config
from oddrank.synth.mixtures import mixture_config
from oddrank.synth.quantization import quantization_config
from oddrank.synth.release import Release
from oddrank.synth.sizes import Dense, Drafter, Gemma, Hybrid, Mixture, Vision

Config = dict[str, Any]

_ARCHITECTURES = {
    "qwen3_5": "Qwen3_5",
    "qwen3_5_moe": "Qwen3_5Moe",
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "phi3": "Phi3",
    "seed_oss": "SeedOss",
}


def config(release: Release) -> Config:
    """The whole config.json."""
    size = release.size
    if isinstance(size, Hybrid):
        made = _next(size) if release.family == "qwen3_next" else _hybrid(release, size)
    elif isinstance(size, Drafter):
        made = _drafter(size)
    elif isinstance(size, Mixture):
        made = mixture_config(release.family, size)
    elif isinstance(size, Gemma):
        made = gemma_config(release.family, size)
    else:
        made = _dense(release, size)
    quantization = quantization_config(release)
    return {**made, "quantization_config": quantization} if quantization else made


def _common(release: Release | None, size: Hybrid | Dense | Drafter) -> Config:
    return {
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "dtype": "bfloat16",
        "eos_token_id": size.vocab - 1,
        "head_dim": size.head_dim,
        "hidden_act": "silu",
        "hidden_size": size.hidden,
        "initializer_range": 0.02,
        "num_attention_heads": size.q_heads,
        "num_hidden_layers": size.layers,
        "num_key_value_heads": size.kv_heads,
        "vocab_size": size.vocab,
    }


def _hybrid(release: Release, size: Hybrid) -> Config:
    text: Config = {
        **_common(release, size),
        "attn_output_gate": True,
        "full_attention_interval": 4,
        "layer_types": ["linear_attention" if (i + 1) % 4 else "full_attention" for i in range(size.layers)],
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": size.gdn_width,
        "linear_num_key_heads": size.gdn_k_heads,
        "linear_num_value_heads": size.gdn_v_heads,
        "linear_value_head_dim": size.gdn_width,
        "mamba_ssm_dtype": "float32",
        "max_position_embeddings": 262144,
        "model_type": f"{release.family}_text",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "mrope_interleaved": True,
            # a quarter of the head turns, in pairs, shared by time, height and width
            "mrope_section": _mrope(size.head_dim // 8),
            "partial_rotary_factor": 0.25,
            "rope_theta": 10000000,
            "rope_type": "default",
        },
        "tie_word_embeddings": size.tied,
        "use_cache": True,
    }
    if size.mlp is not None:
        text["intermediate_size"] = size.mlp
    else:
        text |= {
            "moe_intermediate_size": size.moe,
            "num_experts": size.experts,
            "num_experts_per_tok": size.chosen,
            "output_router_logits": False,
            "router_aux_loss_coef": 0.001,
            "shared_expert_intermediate_size": size.shared,
        }
    name = _ARCHITECTURES[release.family]
    if not release.wrapped:
        return {"architectures": [f"{name}ForCausalLM"], **text}
    return {
        "architectures": [f"{name}ForConditionalGeneration"],
        "image_token_id": max(size.vocab - 4, 0),
        "model_type": release.family,
        "text_config": text,
        "tie_word_embeddings": size.tied,
        "video_token_id": max(size.vocab - 3, 0),
        "vision_config": _vision(release, size, size.vision),
        "vision_end_token_id": max(size.vocab - 5, 0),
        "vision_start_token_id": max(size.vocab - 6, 0),
    }


def _next(size: Hybrid) -> Config:
    return {
        **_common(None, size),
        "architectures": ["Qwen3NextForCausalLM"],
        "decoder_sparse_step": 1,
        "full_attention_interval": 4,
        "intermediate_size": 5120,
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": size.gdn_width,
        "linear_num_key_heads": size.gdn_k_heads,
        "linear_num_value_heads": size.gdn_v_heads,
        "linear_value_head_dim": size.gdn_width,
        "max_position_embeddings": 262144,
        "mlp_only_layers": [],
        "model_type": "qwen3_next",
        "moe_intermediate_size": size.moe,
        "norm_topk_prob": True,
        "num_experts": size.experts,
        "num_experts_per_tok": size.chosen,
        "partial_rotary_factor": 0.25,
        "rms_norm_eps": 1e-6,
        "rope_scaling": None,
        "rope_theta": 10000000,
        "shared_expert_intermediate_size": size.shared,
        "tie_word_embeddings": size.tied,
        "use_cache": True,
    }


def _mrope(pairs: int) -> list[int]:
    """Rotary pairs of time, height and width: 11, 11, 10 of 32."""
    third = -(-pairs // 3)
    return [third, third, pairs - 2 * third]


def _vision(release: Release, size: Hybrid, tower: Vision) -> Config:
    return {
        "depth": tower.depth,
        "hidden_act": "gelu_pytorch_tanh",
        "hidden_size": tower.hidden,
        "in_channels": 3,
        "initializer_range": 0.02,
        "intermediate_size": tower.mlp,
        "model_type": f"{release.family}_vision",
        "num_heads": tower.heads,
        "num_position_embeddings": 2304,
        "out_hidden_size": size.hidden,
        "patch_size": 16,
        "spatial_merge_size": 2,
        "temporal_patch_size": 2,
    }


def _dense(release: Release, size: Dense) -> Config:
    made: Config = {
        **_common(release, size),
        "architectures": [f"{_ARCHITECTURES[release.family]}ForCausalLM"],
        "intermediate_size": size.mlp,
        "max_position_embeddings": 32768,
        "model_type": release.family,
        "rms_norm_eps": size.eps,
        "rope_parameters": {"rope_theta": size.theta, "rope_type": "default"},
        "tie_word_embeddings": size.tied,
        "use_cache": True,
    }
    if release.family == "mistral":
        made["sliding_window"] = None
    if release.family in ("qwen2", "qwen3"):
        made |= {"max_window_layers": size.layers, "sliding_window": None, "use_sliding_window": False}
    if release.family in ("mistral", "qwen2"):
        del made["attention_bias"]
    if release.family == "qwen2":
        # as published: the class computes it
        del made["head_dim"]
    if release.family == "llama":
        made["mlp_bias"] = False
    if release.family == "seed_oss":
        made |= {"attention_bias": True, "attention_out_bias": False, "mlp_bias": False, "residual_dropout": 0.0}
    if release.family == "phi3":
        made |= {"original_max_position_embeddings": 32768, "pad_token_id": size.vocab - 1, "sliding_window": None}
        # as published: its class computes the one and knows nothing of the other
        del made["head_dim"], made["attention_bias"]
    return made


def _drafter(size: Drafter) -> Config:
    return {
        **_common(None, size),
        "architectures": ["DFlash2DraftModel"],
        "block_size": size.block_size,
        "dflash_config": {
            "block_size": size.block_size,
            "conv_group_size": size.conv_group,
            "conv_kernel_size": size.conv_kernel,
            "mask_token_id": size.vocab - 2,
            "selector_rank": size.selector_rank,
            "selector_top_k": size.selector_top_k,
            "target_layer_ids": list(size.taps),
        },
        "intermediate_size": size.mlp,
        "is_causal": False,
        "layer_types": ["sliding_attention"] * size.layers,
        "max_position_embeddings": 262144,
        "max_window_layers": size.layers,
        "model_type": "qwen3",
        "num_target_layers": size.target_layers,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
        "sliding_window": size.window,
        "tie_word_embeddings": False,
        "use_cache": False,
        "use_sliding_window": True,
    }
