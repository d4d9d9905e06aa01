"""Gemma 4: layers of two geometries, attention over a sliding window and over everything, with their own head_dim and,
where the config says so, their own number of KV heads; norms on query and key heads and around both halves of a layer.

Layers over everything may use their keys as values too, the last layers the keys and values of an earlier one; experts
may stand beside the MLP; a small second embedding may feed every layer. Text-only checkpoints and those wrapped with
towers, which every rank has whole. Source: transformers 5.24's modeling_gemma4.py.

The config counts the query heads of both geometries by one number, so executors that read it need as many of both.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from oddrank.checkpoint.config import ConfigView
from oddrank.families.base import Family
from oddrank.families.decoder import Index, Part, decoder, gated_mlp, layers, linear, norm, norms
from oddrank.families.experts import Experts, per_expert, router
from oddrank.families.gemma3 import PREFIXES, TOWERS, around_halves
from oddrank.geometry import Along, Axis, KVCache, Model, Pair, Role, Whole

SLIDING, FULL = "sliding_attention", "full_attention"


class Geometry(NamedTuple):
    """The heads of some layers. kind: "sliding" or "full". numbers: of the layers. own_keys: of those that make keys
    and values; the others use those of one of these. queries, keys: axes. values: whether values are made, too, or
    keys serve as values."""

    kind: str
    numbers: tuple[int, ...]
    own_keys: tuple[int, ...]
    queries: str
    keys: str
    q: int
    kv: int
    width: int
    values: bool

    def part(self, prefix: str, hidden: int, bias: bool) -> Part:
        q, kv, h = Along(self.queries, self.width), Along(self.keys, self.width), Whole(hidden)
        # a pattern for each geometry: a term that joins a sum has its own owner in each
        index, own = (((self.kind, numbers),) for numbers in (self.numbers, self.own_keys))
        at = f"{prefix}layers.{{{self.kind}}}.self_attn"
        names = ["k_proj", *(["v_proj"] if self.values else [])]
        return Part(
            roles=[
                *linear(f"{at}.q_proj", q, h, "column", index, bias),
                *(role for name in names for role in linear(f"{at}.{name}", kv, h, "column", own, bias)),
                *linear(f"{at}.o_proj", h, q, "row", index, bias),
                norm(f"{at}.q_norm", self.width, index),
                norm(f"{at}.k_norm", self.width, own),
            ],
            axes=(Axis(self.queries, self.q, "heads"), Axis(self.keys, self.kv, "heads", summed=False)),
            pairs=(Pair(self.queries, self.keys),),
            kv=(KVCache(self.keys, len(self.own_keys), 2 * self.width, self.queries),),
            config_axes=(("num_attention_heads", self.queries),),
        )


def kinds_of(t: ConfigView) -> list[str]:
    """The kind of every layer; the last is always one over everything."""
    count = t.count("num_hidden_layers")
    kinds = [str(k) for k in t.get_list("layer_types")] or [FULL if i % 6 == 5 else SLIDING for i in range(count)]
    if len(kinds) != count or set(kinds) - {SLIDING, FULL}:
        raise t.error("layer_types", f"{count} of {SLIDING} and {FULL}", kinds)
    return [*kinds[:-1], FULL]


def overrides(t: ConfigView) -> dict[int, tuple[str, ConfigView]]:
    """Layer -> (its key in `per_layer_config`, what that says instead of the config). Older configs say the same of all
    layers over everything by `global_head_dim` and `num_global_key_value_heads`."""
    whole = t.child("per_layer_config")
    if whole is None:
        return {}
    if not all(key.isascii() and key.isdecimal() and len(key) < 6 for key in whole.data):
        raise t.error("per_layer_config", "an object by layer numbers", whole.data)
    return {int(key): (key, view) for key in whole.data if (view := whole.child(key))}


def geometries(t: ConfigView) -> tuple[list[Geometry], list[tuple[str, str]]]:
    """The geometries of a model's layers, and the config keys that count their KV heads."""
    kinds, said = kinds_of(t), overrides(t)
    q, kv, width = t.require_int("num_attention_heads"), t.num_key_value_heads(4), t.head_dim(256)
    same = t.get_bool("attention_k_eq_v", False)
    everywhere = t.get_int("num_global_key_value_heads", kv) if same and not said else kv
    shared = t.get_int("num_kv_shared_layers", 0, low=0, high=len(kinds))
    found: dict[tuple[str, int, int], list[int]] = {}
    keys = {"num_key_value_heads": "kv_heads"}
    if same and not said and "num_global_key_value_heads" in t:
        keys["num_global_key_value_heads"] = "kv_heads" if everywhere == kv else "full_kv_heads"
    for i, kind in enumerate(kinds):
        heads, d = (everywhere, t.get_int("global_head_dim", 512)) if kind == FULL and not said else (kv, width)
        if i in said:
            key, own = said[i]
            heads, d = own.get_int("num_key_value_heads", heads), own.get_int("head_dim", d)
            if "num_key_value_heads" in own:
                keys[f"per_layer_config.{key}.num_key_value_heads"] = "kv_heads" if heads == kv else "full_kv_heads"
        if q % heads:
            raise t.error("num_attention_heads", f"a multiple of layer {i}'s {heads} KV heads", q)
        found.setdefault((kind, heads, d), []).append(i)
    if len(found) > 2 or len({kind for kind, _, _ in found}) < len(found):
        raise t.error("per_layer_config", "one geometry of heads for each kind of layer", sorted(found))
    first = len(kinds) - shared
    if any(numbers[0] >= first for numbers in found.values()):
        raise t.error("num_kv_shared_layers", "so few that each kind of layer has one with keys of its own", shared)
    return [
        Geometry(
            kind.partition("_")[0],
            tuple(numbers),
            tuple(i for i in numbers if i < first),
            "q_heads" if heads == kv else "full_q_heads",
            "kv_heads" if heads == kv else "full_kv_heads",
            q,
            heads,
            d,
            kind == SLIDING or not same,
        )
        for (kind, heads, d), numbers in sorted(found.items(), key=lambda item: item[0][0] == FULL)
    ], list(keys.items())


def per_layer_input(t: ConfigView, prefix: str, layer: str, index: Index) -> Part:
    """A second embedding, `hidden_size_per_layer_input` wide for every layer: whole on every rank."""
    width, hidden = t.get_int("hidden_size_per_layer_input", 256, low=0), t.require_int("hidden_size")
    if not width:
        return Part()
    rows, across = t.get_int("vocab_size_per_layer_input", 262_144), len(index[0][1]) * width
    return Part(
        [
            Role(f"{prefix}embed_tokens_per_layer.weight", (Whole(rows), Whole(across)), "replicated", matrix=True),
            *linear(f"{prefix}per_layer_model_projection", Whole(across), Whole(hidden), "replicated", ()),
            norm(f"{prefix}per_layer_projection_norm", width),
            *linear(f"{layer}.per_layer_input_gate", Whole(width), Whole(hidden), "replicated", index),
            *linear(f"{layer}.per_layer_projection", Whole(hidden), Whole(width), "replicated", index),
            norm(f"{layer}.post_per_layer_input_norm", hidden, index),
        ]
    )


def mixture(t: ConfigView, layer: str, index: Index) -> list[Part]:
    """Experts beside the MLP; their router norms its input and scales what each expert puts out."""
    if not t.get_bool("enable_moe_block", False):
        return []
    hidden = t.require_int("hidden_size")
    extra = ("post_feedforward_layernorm_1", "post_feedforward_layernorm_2", "pre_feedforward_layernorm_2")
    return [
        Experts.of(t, count=("num_experts",), chosen="top_k_experts").part(f"{layer}.experts", hidden, index),
        Part(
            [
                router(f"{layer}.router.proj", hidden, index),
                Role(f"{layer}.router.scale", (Whole(hidden),), "replicated", index),
                per_expert(f"{layer}.router.per_expert_scale", index),
                *norms(layer, hidden, index, *extra),
            ]
        ),
    ]


def build(c: ConfigView, prefix: str) -> Model:
    t = c.text()
    hidden, count = t.require_int("hidden_size"), t.count("num_hidden_layers")
    layer, every = f"{prefix}layers.{{layer}}", layers(range(count))
    heads, keys = geometries(t)
    shared = t.get_int("num_kv_shared_layers", 0, low=0, high=count)
    wide = shared if t.get_bool("use_double_wide_mlp", False) else 0
    narrow, double = layers(range(count - wide)), layers(range(count - wide, count))
    model = decoder(
        c,
        prefix,
        "gemma4",
        *(g.part(prefix, hidden, t.get_bool("attention_bias", False)) for g in heads),
        Part(
            roles=[
                *gated_mlp(f"{layer}.mlp", hidden, Along("mlp"), narrow),
                *gated_mlp(f"{layer}.mlp", hidden, Along("mlp", 2), double),
                *around_halves(layer, hidden, every),
                Role(f"{layer}.layer_scalar", (Whole(1),), "replicated", every),
            ],
            axes=(Axis("mlp", t.require_int("intermediate_size"), "width"),),
            config_axes=(*keys, ("intermediate_size", "mlp")),
            config_fixed=(("head_dim", t.head_dim(256)),),
        ),
        *mixture(t, layer, every),
        per_layer_input(t, prefix, layer, every),
    )
    unread = "|".join(str(i) for i in range(count - shared, count))  # stored beside the keys that these layers use
    borrowed = [rf"{prefix}layers\.(?:{unread})\.self_attn\.[kv]_(?:proj|norm)\..*"] if shared else []
    return msgspec.structs.replace(model, ignored=(*model.ignored, TOWERS, *borrowed))


FAMILY = Family("gemma4", ("gemma4_text", "gemma4"), build, prefixes=PREFIXES)
