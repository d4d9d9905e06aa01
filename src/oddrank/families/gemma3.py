"""Gemma 3: grouped-query attention, in most layers over a sliding window; norms (1 + w) on query and key heads, and
before and after both halves of a layer. Text-only checkpoints and those wrapped with a vision tower, which every rank
has whole."""

from __future__ import annotations

import msgspec

from oddrank.checkpoint.config import ConfigView
from oddrank.families.base import Config, Family
from oddrank.families.decoder import Heads, Index, Part, attention, decoder, head_norms, layer_index, mlp, norms
from oddrank.families.respell import require_dividing_heads
from oddrank.geometry import Model, Role

PREFIXES = ("model.language_model.", "language_model.model.", "model.", "")
TOWERS = r"(?:model\.)?(?:vision_tower|audio_tower|multi_modal_projector|embed_vision|embed_audio)\..*"
"""What a multimodal checkpoint holds beside its text model; no layout touches it."""


def around_halves(layer: str, hidden: int, index: Index) -> list[Role]:
    """A norm before and one after attention, and the same around the MLP."""
    both = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm")
    return norms(layer, hidden, index, *both)


def build(c: ConfigView, prefix: str) -> Model:
    t = c.text()
    hidden, heads, every = t.require_int("hidden_size"), Heads.of(t, kv_heads=4, head_dim=256), layer_index(t)
    bias, layer = t.get_bool("attention_bias", False), f"{prefix}layers.{{layer}}"
    at = f"{layer}.self_attn"
    model = decoder(
        c,
        prefix,
        "gemma3",
        attention(at, hidden, heads, every, qkv_bias=bias, o_bias=bias),
        mlp(t, f"{layer}.mlp", every),
        Part([*head_norms(at, heads, every), *around_halves(layer, hidden, every)]),
    )
    return msgspec.structs.replace(model, ignored=(*model.ignored, TOWERS))


def respell(config: Config, reader: str) -> Config:
    """Gemma3TextConfig (transformers 5.x) refuses hidden % heads != 0 even with head_dim written out."""
    require_dividing_heads(config)
    return config


FAMILY = Family("gemma3", ("gemma3_text", "gemma3"), build, prefixes=PREFIXES, respell=respell)
