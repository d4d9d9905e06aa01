"""The hybrid decoder of Qwen3-Next and Qwen3.5 / 3.6 / 3.8: three gated delta net layers to one of gated attention,
with a dense MLP or a mixture of experts.

Text-only checkpoints and those wrapped with a vision tower; an MTP layer (a draft layer of the same kind, behind
`fc` [hidden, 2 hidden]) completely or not at all. Layer norms are (1 + w), which no layout touches.
"""

from __future__ import annotations

from oddrank.checkpoint.config import ConfigView
from oddrank.families.decoder import (
    Heads,
    Index,
    Part,
    attention,
    decoder,
    gated_mlp,
    head_norms,
    layer_index,
    layers,
    linear,
    mlp,
    norms,
    optional,
    pre_norms,
)
from oddrank.families.experts import Experts, router, sparse_layers
from oddrank.families.gated_delta import FULL, LINEAR, DeltaNet, layers_of, vision_tower
from oddrank.geometry import Along, Axis, Model, Whole

PREFIXES = ("model.language_model.", "model.", "language_model.model.", "")


def hybrid(c: ConfigView, prefix: str, family: str, *, experts: bool, net: type[DeltaNet] = DeltaNet) -> Model:
    """The whole model, its MTP layer and its vision tower; `experts`: a mixture of experts in place of the MLP.
    net: how the gated delta net's tensors are stored."""
    t = c.text()
    hidden, heads = t.require_int("hidden_size"), Heads.of(t, head_dim=256)
    bias, kinds = t.get_bool("attention_bias", False), layers_of(t)
    every, layer = layer_index(t), f"{prefix}layers.{{layer}}"
    dense, sparse = (layers(n) for n in sparse_layers(t)) if experts else (every, layers(()))

    def block(at: str, index: Index, full: Index, sparse: Index, choice: str) -> list[Part]:
        gated = attention(f"{at}.self_attn", hidden, heads, full, qkv_bias=bias, o_bias=bias, gated=True)
        more = mixture(t, f"{at}.mlp", sparse, choice) if experts else []
        return [gated, Part([*head_norms(f"{at}.self_attn", heads, full), *pre_norms(at, hidden, index)]), *more]

    drafts = layers(range(t.count("mtp_num_hidden_layers", 1, low=0)))
    draft = block("mtp.layers.{layer}", drafts, drafts, drafts, "mtp experts")
    draft += [] if experts else [mlp(t, "mtp.layers.{layer}.mlp", drafts)]
    # fc mixes the embedding and the hidden state, neither of which is ever cut
    ends = [
        *linear("mtp.fc", Whole(hidden), Whole(2 * hidden), "replicated", ()),
        *norms("mtp", hidden, (), "norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"),
    ]
    visual = f"{prefix.removesuffix('language_model.')}visual." if "language_model." in prefix else "model.visual."
    gated, *rest = block(layer, every, layers(kinds[FULL]), sparse, "experts")
    return decoder(
        c,
        prefix,
        family,
        gated,
        net.of(t).part(f"{layer}.linear_attn", hidden, layers(kinds[LINEAR])),
        *rest,
        mlp(t, f"{layer}.mlp", dense),
        optional(draft, "MTP", *ends),
        Part(vision_tower(c, visual)),
    )


def mixture(t: ConfigView, at: str, index: Index, choice: str) -> list[Part]:
    """Routed experts, and a shared one behind a sigmoid gate."""
    hidden, key = t.require_int("hidden_size"), "shared_expert_intermediate_size"
    return [
        Experts.of(t).part(f"{at}.experts", hidden, index, choice=choice),
        Part(
            roles=[
                router(f"{at}.gate", hidden, index),
                *linear(f"{at}.shared_expert_gate", Whole(1), Whole(hidden), "replicated", index),
                *gated_mlp(f"{at}.shared_expert", hidden, Along("shared"), index),
            ],
            axes=(Axis("shared", t.require_int(key), "width"),),
            config_axes=((key, "shared"),),
        ),
    ]
