"""Tiny random checkpoints of vLLM's families, written by transformers. Every rank of TP=3 gets trained heads.

Nothing divides by 3: 10 query heads over 5 KV heads, 5 GDN key heads with 10 value heads, an MLP of 200.
"""

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

BASE = {
    "vocab_size": 1000,
    "hidden_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 10,
    "num_key_value_heads": 5,
    "head_dim": 32,
    "intermediate_size": 200,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 1,
}
GDN = {
    "num_hidden_layers": 4,
    "full_attention_interval": 4,
    "linear_num_key_heads": 5,
    "linear_num_value_heads": 10,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "head_dim": 64,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25,
                        "mrope_section": [3, 3, 2], "mrope_interleaved": True},
}  # fmt: skip
MOE = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 80,
    "shared_expert_intermediate_size": 80,
}
CONFIGS = {
    "llama": BASE | {"hidden_size": 320},
    "qwen2": {k: v for k, v in BASE.items() if k != "head_dim"} | {"hidden_size": 320},
    "qwen3": BASE,
    "qwen3_5_text": BASE | GDN,
    "qwen3_5_moe_text": BASE | GDN | MOE,
}
SPREAD = 4.0
"""How much larger than transformers' initial values the weights are, so that attention and gates do something."""


def write_tiny(model_type: str, folder: Path, dtype: torch.dtype = torch.float32, seed: int = 0, **changes) -> Path:
    """A random model of `model_type` in `folder`."""
    config = AutoConfig.for_model(model_type, **(CONFIGS[model_type] | changes))
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    with torch.no_grad():
        for name, value in model.named_parameters():
            if value.ndim > 1:
                value.mul_(SPREAD)
            elif "norm" in name:
                value.add_(0.2 * torch.randn_like(value))
            else:
                value.normal_(0.0, 0.3)
    model.to(dtype).save_pretrained(folder)
    return folder
