"""The same weights under another architecture's name, where an engine's own class refuses or misreads a changed config.

Padding changes `num_attention_heads` while `hidden_size` and `head_dim` stay. A class that derives one from the
others then refuses the config or, worse, computes another head_dim. These functions name an architecture with the
same arithmetic whose class takes `head_dim` as written.
"""

from __future__ import annotations

from oddrank.errors import OddrankError
from oddrank.families.base import Config

_MEANT: dict[str, Config] = {
    "llama": {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None},
    "qwen2": {"max_position_embeddings": 32768, "bos_token_id": None, "eos_token_id": None, "pad_token_id": None},
}
"""What a key means under its own model type where the config leaves it out, for keys whose defaults differ from
those of the other type (transformers 5.24's config classes)."""


def _written_out(config: Config) -> Config:
    return {**_MEANT.get(str(config.get("model_type")), {}), **config}


def head_dim_is_implied(config: Config) -> bool:
    """Does hidden_size / num_attention_heads give the head_dim that the config writes out?"""
    heads = config["num_attention_heads"]
    return bool(config["hidden_size"] == heads * config.get("head_dim", -1))


def as_mistral(config: Config) -> Config:
    """No biases, no window: mistral's arithmetic is llama's when `sliding_window` is null."""
    return {
        # llama ignores layer_types, mistral would not
        **{k: v for k, v in _written_out(config).items() if k != "layer_types"},
        "model_type": "mistral",
        "architectures": ["MistralForCausalLM"],
        "sliding_window": None,
    }


def as_seed_oss(config: Config, *, qkv_bias: bool, o_bias: bool, mlp_bias: bool) -> Config:
    """Seed-OSS is llama with separate switches for the biases of q/k/v, of o, and of the MLP.

    Raises OddrankError where the config uses a sliding window, which Seed-OSS does not have.
    """
    if config.get("use_sliding_window"):
        raise OddrankError(
            f"the padded config of this {config.get('model_type')} model needs another architecture's name "
            "(its own class computes head_dim as hidden_size / num_attention_heads), and the one with the same "
            "arithmetic has no sliding window, which this config switches on (use_sliding_window). "
            "The runtime executor serves it without rewriting: oddrank generate --tp N."
        )
    drop = ("use_sliding_window", "sliding_window", "max_window_layers", "layer_types")
    return {
        **{k: v for k, v in _written_out(config).items() if k not in drop},
        "model_type": "seed_oss",
        "architectures": ["SeedOssForCausalLM"],
        "attention_bias": qkv_bias,
        "attention_out_bias": o_bias,
        "mlp_bias": mlp_bias,
        "attention_dropout": 0.0,
        "residual_dropout": 0.0,
    }


def require_dividing_heads(config: Config) -> None:
    """Raises OddrankError where the number of heads does not divide hidden_size and nothing but a class that demands it
    reads this model."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    if hidden % heads:
        works = [str(n) for n in range(heads + 1, hidden + 1) if hidden % n == 0][:4]
        ask = f"The next that divide are {', '.join(works)}: ask for one that the ranks divide, as in --constraint "
        remedy = f"{ask}q_heads={works[0]}." if works else "No larger number divides it: ask for fewer."
        raise OddrankError(
            f"the padded config of this {config.get('model_type')} model has {heads} heads, and its own class refuses "
            f"a number that does not divide hidden_size {hidden}, even with head_dim written out, so nothing would "
            f"load it from disk. {remedy} `oddrank vllm serve` streams any layout into vLLM without that check."
        )
