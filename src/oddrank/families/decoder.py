"""Parts that decoder families share: embeddings, grouped-query attention, gated MLP, and a decoder made of parts.

A part is tensors (roles) with the axes they run along and what these mean for the cache and the config. A family file
picks the parts and adds what is its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import msgspec

from oddrank.checkpoint.config import ConfigView
from oddrank.geometry import Along, Axis, Crosstalk, Dim, KVCache, Model, Pair, Role, State, Whole

Index = tuple[tuple[str, tuple[int, ...]], ...]
WITHOUT_ROLE = (
    r".*rotary_emb\.inv_freq",  # derived from the config, stored by old exporters
    r".*self_attn\.(?:attn\.|[kv]_proj\.)?[kv]_scale",  # one scale of the KV cache a layer, whatever the heads
)


class Part(msgspec.Struct, frozen=True):
    """What one piece brings into a Model; the fields are Model's. Parts may name the same axis or config key."""

    roles: Sequence[Role] = ()
    axes: tuple[Axis, ...] = ()
    pairs: tuple[Pair, ...] = ()
    kv: tuple[KVCache, ...] = ()
    states: tuple[State, ...] = ()
    crosstalk: tuple[Crosstalk, ...] = ()
    config_axes: tuple[tuple[str, str], ...] = ()
    config_fixed: tuple[tuple[str, int], ...] = ()


def decoder(c: ConfigView, prefix: str, family: str, *parts: Part) -> Model:
    """A model of these parts, with embedding, final norm and head around them.

    c: the whole config, in which the decoder's own may be wrapped (`text_config`). prefix: of its tensors.
    """
    words = vocabulary(c, prefix)

    def once(field: Callable[[Part], Iterable[Any]]) -> tuple[Any, ...]:
        return tuple(dict.fromkeys(x for part in (*parts, words) for x in field(part)))

    return Model(
        family=family,
        architecture=architecture(c),
        hidden=c.text().require_int("hidden_size"),
        axes=once(lambda p: p.axes),
        pairs=once(lambda p: p.pairs),
        roles=tuple(role for part in (words, *parts) for role in part.roles if role.count()),
        kv=tuple(cache for part in parts for cache in part.kv if cache.layers),
        states=tuple(state for part in parts for state in part.states if state.layers),
        crosstalk=once(lambda p: p.crosstalk),
        config_axes=once(lambda p: p.config_axes),
        config_fixed=once(lambda p: p.config_fixed),
        config_path=() if c.text() is c else ("text_config",),
        ignored=WITHOUT_ROLE,
    )


def architecture(c: ConfigView) -> str:
    """The class name config.json gives, for messages."""
    names = c.get_list("architectures")
    return str(names[0]) if names else c.model_type


def linear(name: str, n: Dim, k: Dim, combine: str, index: Index, bias: bool = False) -> list[Role]:
    """A linear layer [N, K] and its bias. A column layer's bias is cut with its rows; a row layer's bias joins
    the sum through one owner; a replicated layer is whole on every rank."""
    if combine == "row":
        weight = Role(f"{name}.weight", (n, k), "row", index, matrix=True, work=1.0)
        extra = Role(f"{name}.bias", (n,), "replicated", index, joins=f"{name}.weight")
    else:
        kind: Any = combine
        weight = Role(f"{name}.weight", (n, k), kind, index, matrix=True, work=1.0)
        extra = Role(f"{name}.bias", (n,), kind, index)
    return [weight, extra] if bias else [weight]


def norm(name: str, width: int, index: Index = ()) -> Role:
    return Role(f"{name}.weight", (Whole(width),), "replicated", index)


def norms(at: str, width: int, index: Index, *names: str) -> list[Role]:
    return [norm(f"{at}.{name}", width, index) for name in names]


def layer_index(c: ConfigView) -> Index:
    return layers(range(c.count("num_hidden_layers")))


def layers(numbers: Iterable[int]) -> Index:
    return (("layer", tuple(numbers)),)


def in_group(roles: Iterable[Role], group: str) -> list[Role]:
    """Roles of a part that a checkpoint has completely or not at all."""
    return [msgspec.structs.replace(r, group=group) for r in roles]


def optional(parts: Sequence[Part], group: str, *more: Role) -> Part:
    """Parts, and `more` roles, that a checkpoint has completely or not at all. Their caches are not counted."""
    return Part(
        roles=in_group([*(role for part in parts for role in part.roles), *more], group),
        axes=tuple(axis for part in parts for axis in part.axes),
        pairs=tuple(pair for part in parts for pair in part.pairs),
        config_axes=tuple(key for part in parts for key in part.config_axes),
    )


def vocabulary(c: ConfigView, prefix: str) -> Part:
    """Token embedding (a lookup whose ranks are summed) and the head over the same vocabulary axis."""
    t = c.text()
    hidden = t.require_int("hidden_size")
    table, row = f"{prefix}embed_tokens.weight", (Along("vocab"), Whole(hidden))
    tied = table if c.tie_word_embeddings() else None
    return Part(
        roles=(
            # a row of the table is one element of the summed axis: each token's row is on exactly one rank
            Role(table, row, "column", matrix=True),
            Role("lm_head.weight", row, "column", matrix=True, work=1.0, tied_to=tied),
            norm(f"{prefix}norm", hidden),
        ),
        axes=(Axis("vocab", t.require_int("vocab_size"), "vocab"),),
    )


class Heads(NamedTuple):
    """Query heads, KV heads, and the width of one."""

    q: int
    kv: int
    width: int

    @classmethod
    def of(cls, c: ConfigView, *, kv_heads: int | None = None, head_dim: int | None = None) -> Heads:
        """As the config says; kv_heads, head_dim: the model type's own defaults where it does not."""
        return cls(c.require_int("num_attention_heads"), c.num_key_value_heads(kv_heads), c.head_dim(head_dim))

    def part(self, index: Index, roles: Sequence[Role]) -> Part:
        """The axes of grouped-query attention, its KV cache and its config keys, for `roles` along them."""
        return Part(
            roles=roles,
            axes=(Axis("q_heads", self.q, "heads"), Axis("kv_heads", self.kv, "heads", summed=False)),
            pairs=(Pair("q_heads", "kv_heads"),),
            kv=(KVCache("kv_heads", layers=len(index[0][1]), width=2 * self.width),),
            config_axes=(("num_attention_heads", "q_heads"), ("num_key_value_heads", "kv_heads")),
            config_fixed=(("head_dim", self.width),),
        )


def attention(
    at: str,
    hidden: int,
    heads: Heads,
    index: Index,
    *,
    qkv_bias: bool = False,
    o_bias: bool = False,
    gated: bool = False,
) -> Part:
    """Grouped-query attention with separate q, k, v, o projections. gated: q_proj's rows are per head
    `[query | output gate]`."""
    q, kv, h = Along("q_heads", heads.width), Along("kv_heads", heads.width), Whole(hidden)
    rows = Along("q_heads", 2 * heads.width) if gated else q
    roles = [
        *linear(f"{at}.q_proj", rows, h, "column", index, qkv_bias),
        *linear(f"{at}.k_proj", kv, h, "column", index, qkv_bias),
        *linear(f"{at}.v_proj", kv, h, "column", index, qkv_bias),
        *linear(f"{at}.o_proj", h, q, "row", index, o_bias),
    ]
    return heads.part(index, roles)


def head_norms(at: str, heads: Heads, index: Index) -> list[Role]:
    """An RMS norm on every query and key head by itself."""
    return norms(at, heads.width, index, "q_norm", "k_norm")


def gated_mlp(
    at: str,
    hidden: int,
    width: Dim,
    index: Index,
    bias: bool = False,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> list[Role]:
    """down(act(gate(x)) * up(x)), `width` wide."""
    gate, up, down = (f"{at}.{name}" for name in names)
    return [
        *linear(gate, width, Whole(hidden), "column", index, bias),
        *linear(up, width, Whole(hidden), "column", index, bias),
        *linear(down, Whole(hidden), width, "row", index, bias),
    ]


def mlp(c: ConfigView, at: str, index: Index, bias: bool = False) -> Part:
    """The gated MLP of the layers in `index`; nothing where there are none."""
    if not index[0][1]:
        return Part()
    return Part(
        roles=gated_mlp(at, c.require_int("hidden_size"), Along("mlp"), index, bias),
        axes=(Axis("mlp", c.require_int("intermediate_size"), "width"),),
        config_axes=(("intermediate_size", "mlp"),),
    )


def dense_decoder(
    c: ConfigView,
    prefix: str,
    *,
    family: str,
    kv_heads: int | None = None,
    head_dim: int | None = None,
    qkv_bias: bool = False,
    o_bias: bool = False,
    mlp_bias: bool = False,
    qk_norm: bool = False,
    more: Iterable[Role] = (),
) -> Model:
    """The llama shape: every layer the same attention and gated MLP, pre-norms, one vocabulary.

    kv_heads, head_dim: the model type's own defaults where the config does not say. qk_norm: an RMS norm per head.
    """
    hidden, index, layer = c.require_int("hidden_size"), layer_index(c), f"{prefix}layers.{{layer}}"
    heads = Heads.of(c, kv_heads=kv_heads, head_dim=head_dim)
    return decoder(
        c,
        prefix,
        family,
        attention(f"{layer}.self_attn", hidden, heads, index, qkv_bias=qkv_bias, o_bias=o_bias),
        Part(head_norms(f"{layer}.self_attn", heads, index) if qk_norm else ()),
        mlp(c, f"{layer}.mlp", index, mlp_bias),
        Part([*pre_norms(layer, hidden, index), *more]),
    )


def pre_norms(layer: str, hidden: int, index: Index) -> list[Role]:
    """The norms before attention and before the MLP."""
    return norms(layer, hidden, index, "input_layernorm", "post_attention_layernorm")
