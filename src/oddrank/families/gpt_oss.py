"""gpt-oss: grouped-query attention with a sink per query head, and experts stacked in two tensors a layer.

Every linear layer has a bias. `gate_up_proj` alternates gate and up; as plain numbers it is stored
[E, hidden, 2 width], and `down_proj` [E, width, hidden], inputs before outputs. Each expert's output bias is weighted
by the router before the ranks are summed, so one rank adds it. Source: transformers 5.24's modeling_gpt_oss.py.
"""

from __future__ import annotations

from oddrank.checkpoint.config import ConfigView
from oddrank.families.base import Family
from oddrank.families.decoder import Heads, Index, Part, attention, decoder, layer_index, linear, pre_norms
from oddrank.families.experts import Experts
from oddrank.geometry import Along, Axis, Model, Role, Whole


def build(c: ConfigView, prefix: str) -> Model:
    hidden, heads, every = c.require_int("hidden_size"), Heads.of(c, kv_heads=8, head_dim=64), layer_index(c)
    bias, layer = c.get_bool("attention_bias", True), f"{prefix}layers.{{layer}}"
    sizes = Experts.of(c, count=("num_local_experts", "num_experts"), width="intermediate_size")
    sinks = Role(f"{layer}.self_attn.sinks", (Along("q_heads"),), "column", every)
    return decoder(
        c,
        prefix,
        "gpt_oss",
        attention(f"{layer}.self_attn", hidden, heads, every, qkv_bias=bias, o_bias=bias),
        experts(f"{layer}.mlp", hidden, sizes, every),
        Part([sinks, *pre_norms(layer, hidden, every)]),
    )


def experts(at: str, hidden: int, sizes: Experts, index: Index) -> Part:
    """The router, which every rank has whole, and the stacked experts, cut inside."""
    h, each, width, both = Whole(hidden), Along("experts"), Along("moe"), Along("moe", 2)
    work, up, down = sizes.chosen / sizes.count, f"{at}.experts.gate_up_proj", f"{at}.experts.down_proj"
    return Part(
        roles=[
            *linear(f"{at}.router", each, h, "replicated", index, bias=True),
            Role(up, (each, both, h), "column", index, matrix=True, work=work, transposed=True),
            Role(f"{up}_bias", (each, both), "column", index),
            Role(down, (each, h, width), "row", index, matrix=True, work=work, transposed=True),
            Role(f"{down}_bias", (each, h), "replicated", index, joins=down),
        ],
        axes=(Axis("experts", sizes.count, "experts", summed=False), Axis("moe", sizes.width, "width")),
        config_axes=((sizes.width_key, "moe"),),
    )


FAMILY = Family("gpt_oss", ("gpt_oss",), build)
