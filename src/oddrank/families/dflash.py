"""DFlash / DFlash2 drafters: a few Qwen3 layers over the target's hidden states, `fc` mixing several of them.

Recognised by `dflash_config` in config.json, whatever `model_type` says. Embedding and head are the target's unless
the checkpoint stores its own. Source: the reference implementation's module names (layers.N as in Qwen3, fc,
hidden_norm, norm).
"""

from __future__ import annotations

import msgspec

from oddrank.checkpoint.config import ConfigView
from oddrank.families.base import Family
from oddrank.families.decoder import dense_decoder, linear, norm
from oddrank.families.gated_delta import in_group
from oddrank.geometry import Model, Whole


def build(c: ConfigView, prefix: str) -> Model:
    bias = c.get_bool("attention_bias", False)
    hidden = c.require_int("hidden_size")
    draft = c.child("dflash_config")
    taken = len(draft.get_list("target_layer_ids")) if draft is not None else 0
    mixer = linear(f"{prefix}fc", Whole(hidden), Whole(max(taken, 1) * hidden), "column", ())
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
            *(msgspec.structs.replace(r, combine="replicated") for r in mixer),
            norm(f"{prefix}hidden_norm", hidden),
        ],
    )
    # the vocabulary's tensors are optional: the drafter shares the target's
    roles = [
        in_group([r], "own vocabulary")[0] if "vocab" in r.axes() and r.tied_to is None else r for r in model.roles
    ]
    return msgspec.structs.replace(model, roles=tuple(roles))


FAMILY = Family("dflash", ("dflash", "dflash2"), build, prefixes=("", "model."), marker="dflash_config")
