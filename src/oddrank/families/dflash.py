"""DFlash / DFlash2 drafters: a few Qwen3 layers over the target's hidden states, `fc` mixing several of them.

Recognised by `dflash_config` in config.json, whatever `model_type` says. Embedding and head are the target's unless
the checkpoint stores its own. DFlash2 adds two convolutions a layer, over groups of the hidden stream's channels, and a
selector of candidate tokens; neither touches an axis that is cut. Source: the reference implementation's module names
(layers.N as in Qwen3, fc, hidden_norm, norm, candidate_selector) and a published DFlash2 header.
"""

from __future__ import annotations

import msgspec

from oddrank.checkpoint.config import ConfigView
from oddrank.families.base import Family
from oddrank.families.decoder import dense_decoder, in_group, layer_index, linear, norm
from oddrank.geometry import Model, Role, Whole


def _replicated(name: str, *shape: int) -> Role:
    return Role(f"{name}.weight", tuple(Whole(n) for n in shape), "replicated", matrix=True, work=1.0)


def convolutions(c: ConfigView, draft: ConfigView, prefix: str, hidden: int) -> list[Role]:
    """Per layer and sublayer a kernel [2, taps, hidden] and the projection of its dynamic part, 2 * taps per group."""
    taps = draft.get_int("conv_kernel_size", 0, low=0)
    if not taps:
        return []
    groups = hidden // draft.require_int("conv_group_size", low=1)
    index, roles = layer_index(c), []
    for conv in ("attention_conv", "mlp_conv"):
        at = f"{prefix}layers.{{layer}}.{conv}"
        projection = _replicated(f"{at}.kernel_projection", 2 * taps * groups, hidden)
        roles += [
            Role(f"{at}.base_kernel", (Whole(2), Whole(taps), Whole(hidden)), "replicated", index),
            msgspec.structs.replace(projection, index=index),
        ]
    return roles


def selector(c: ConfigView, draft: ConfigView, prefix: str, hidden: int) -> list[Role]:
    """Two codebooks [vocab, rank], looked up by candidate token on every rank, so whole there."""
    rank = draft.get_int("selector_rank", 0, low=0)
    if not rank:
        return []
    at = f"{prefix}candidate_selector"
    books = [
        Role(f"{at}.{name}", (Whole(c.require_int("vocab_size")), Whole(rank)), "replicated", matrix=True)
        for name in ("predecessor_codebook", "successor_codebook")
    ]
    return [_replicated(f"{at}.hidden_projection", rank, hidden), *books]


def build(c: ConfigView, prefix: str) -> Model:
    bias = c.get_bool("attention_bias", False)
    hidden = c.require_int("hidden_size")
    draft = c.child("dflash_config")
    taken = len(draft.get_list("target_layer_ids")) if draft is not None else 0
    mixer = linear(f"{prefix}fc", Whole(hidden), Whole(max(taken, 1) * hidden), "replicated", ())
    model = dense_decoder(
        c,
        prefix,
        family="dflash",
        kv_heads=32,
        head_dim=128,
        qkv_bias=bias,
        o_bias=bias,
        qk_norm=True,
        more=[
            *mixer,
            norm(f"{prefix}hidden_norm", hidden),
            *(convolutions(c, draft, prefix, hidden) if draft is not None else ()),
            *(selector(c, draft, prefix, hidden) if draft is not None else ()),
        ],
    )
    # the vocabulary's tensors are optional: the drafter shares the target's
    roles = [
        in_group([r], "own vocabulary")[0] if "vocab" in r.axes() and r.tied_to is None else r for r in model.roles
    ]
    return msgspec.structs.replace(model, roles=tuple(roles))


FAMILY = Family("dflash", ("dflash", "dflash2"), build, prefixes=("", "model."), marker="dflash_config")
