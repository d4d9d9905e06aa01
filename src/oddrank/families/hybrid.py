"""The hybrid decoder of Qwen3.5 / 3.6 / 3.8: three gated delta net layers to one of gated attention, with a dense MLP
or a mixture of experts.

Text-only checkpoints and those wrapped with a vision tower; an MTP layer (a draft layer of the same kind, behind
`fc` [hidden, 2 hidden]) completely or not at all. Layer norms are (1 + w), which no layout touches.
"""

from __future__ import annotations

import msgspec

from oddrank.checkpoint.config import ConfigView
from oddrank.families.decoder import WITHOUT_ROLE, Index, architecture, embeddings, gated_mlp, linear, norm
from oddrank.families.gated_delta import (
    FULL,
    LINEAR,
    DeltaNet,
    Experts,
    gated_attention,
    in_group,
    layers_of,
    vision_tower,
)
from oddrank.geometry import Axis, KVCache, Model, Pair, Role, Whole

PREFIXES = ("model.language_model.", "model.", "language_model.model.", "")


def hybrid(c: ConfigView, prefix: str, family: str, *, experts: bool) -> Model:
    """The whole model, its MTP layer and its vision tower; `experts`: a mixture of experts in place of the MLP."""
    t = c.text()
    moe = Experts.of(t) if experts else None
    hidden, head_dim, vocab = t.require_int("hidden_size"), t.head_dim(256), t.require_int("vocab_size")
    q, kv = t.require_int("num_attention_heads"), t.num_key_value_heads()
    bias = t.get_bool("attention_bias", False)
    gdn, layers = DeltaNet.of(t), layers_of(t)
    every: Index = (("layer", tuple(range(t.require_int("num_hidden_layers")))),)
    layer = f"{prefix}layers.{{layer}}"

    def block(at: str, index: Index, full: Index, choice: str) -> list[Role]:
        mlp = moe.roles(f"{at}.mlp", hidden, index, choice) if moe else gated_mlp(f"{at}.mlp", hidden, "mlp", index)
        return [
            *gated_attention(f"{at}.self_attn", hidden, head_dim, full, bias),
            *mlp,
            norm(f"{at}.input_layernorm", hidden, index),
            norm(f"{at}.post_attention_layernorm", hidden, index),
        ]

    mtp_layers: Index = (("layer", tuple(range(t.get_int("mtp_num_hidden_layers", 1, low=0)))),)
    mtp = [
        *block("mtp.layers.{layer}", mtp_layers, mtp_layers, "mtp experts"),
        *linear("mtp.fc", Whole(hidden), Whole(2 * hidden), "column", ()),
        norm("mtp.norm", hidden),
        norm("mtp.pre_fc_norm_embedding", hidden),
        norm("mtp.pre_fc_norm_hidden", hidden),
    ]
    # fc mixes the embedding and the hidden state, neither of which is ever cut
    mtp = [msgspec.structs.replace(r, combine="replicated") if r.name.startswith("mtp.fc") else r for r in mtp]
    widths: tuple[Axis, ...] = moe.axes() if moe else (Axis("mlp", t.require_int("intermediate_size"), "width"),)
    width_keys = (
        (("moe_intermediate_size", "moe"), ("shared_expert_intermediate_size", "shared"))
        if moe
        else (("intermediate_size", "mlp"),)
    )
    visual = f"{prefix.removesuffix('language_model.')}visual." if "language_model." in prefix else "model.visual."
    return Model(
        family=family,
        architecture=architecture(c),
        hidden=hidden,
        axes=(
            Axis("q_heads", q, "heads"),
            Axis("kv_heads", kv, "heads", summed=False),
            *gdn.axes(),
            *widths,
            Axis("vocab", vocab, "vocab"),
        ),
        pairs=(Pair("q_heads", "kv_heads"), gdn.pair()),
        roles=(
            *embeddings(prefix, hidden, c.tie_word_embeddings()),
            *block(layer, every, (("layer", layers[FULL]),), "experts"),
            *gdn.roles(f"{layer}.linear_attn", hidden, (("layer", layers[LINEAR]),)),
            *in_group(mtp, "MTP"),
            *vision_tower(c, visual),
        ),
        kv=KVCache("kv_heads", layers=len(layers[FULL]), width=2 * head_dim),
        states=gdn.states(len(layers[LINEAR])),
        config_axes=(
            ("num_attention_heads", "q_heads"),
            ("num_key_value_heads", "kv_heads"),
            ("linear_num_key_heads", "gdn_k_heads"),
            ("linear_num_value_heads", "gdn_v_heads"),
            *width_keys,
        ),
        config_fixed=(("head_dim", head_dim),),
        config_path=() if t is c else ("text_config",),
        ignored=WITHOUT_ROLE,
    )
