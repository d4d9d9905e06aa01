"""Phi-3 / Phi-4: llama's arithmetic with q, k and v in one tensor, and gate and up in another."""

from __future__ import annotations

from oddrank.checkpoint.config import ConfigView
from oddrank.errors import OddrankError
from oddrank.families.base import Config, Family
from oddrank.families.decoder import Heads, Part, decoder, layer_index, linear, pre_norms
from oddrank.families.respell import head_dim_is_implied
from oddrank.geometry import Along, Axis, Concat, Model, Whole


def build(c: ConfigView, prefix: str) -> Model:
    h, heads, every = Whole(c.require_int("hidden_size")), Heads.of(c), layer_index(c)
    layer = f"{prefix}layers.{{layer}}"
    q, kv, width = Along("q_heads", heads.width), Along("kv_heads", heads.width), Along("mlp")
    attention = [
        *linear(f"{layer}.self_attn.qkv_proj", Concat((q, kv, kv)), h, "column", every),
        *linear(f"{layer}.self_attn.o_proj", h, q, "row", every),
    ]
    mlp = [
        *linear(f"{layer}.mlp.gate_up_proj", Concat((width, width)), h, "column", every),
        *linear(f"{layer}.mlp.down_proj", h, width, "row", every),
    ]
    return decoder(
        c,
        prefix,
        "phi3",
        heads.part(every, attention),
        Part(
            roles=[*mlp, *pre_norms(layer, h.length, every)],
            axes=(Axis("mlp", c.require_int("intermediate_size"), "width"),),
            config_axes=(("intermediate_size", "mlp"),),
        ),
    )


def respell(config: Config, reader: str) -> Config:
    """Phi3Config (transformers 5.x) checks the factors of a long rope against hidden / heads, even with head_dim
    written out, and no other class reads these tensors."""
    factors = ConfigView(config).rope().extra
    if head_dim_is_implied(config) or not (factors.get("short_factor") or factors.get("long_factor")):
        return config
    raise OddrankError(
        f"the padded config of this phi3 model has {config['num_attention_heads']} heads of {config['head_dim']}, and "
        f"its own class counts the factors of its long rope by hidden_size / num_attention_heads = "
        f"{config['hidden_size']} / {config['num_attention_heads']}, so nothing would load it from disk. "
        "`oddrank vllm serve` streams it into vLLM without rewriting the config on disk."
    )


FAMILY = Family("phi3", ("phi3",), build, respell=respell)
