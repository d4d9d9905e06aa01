"""Pieces that decoder families share: embeddings, grouped-query attention, gated MLP.

Each piece is a list of roles; a family file picks the pieces and adds what is its own.
"""

from __future__ import annotations

from collections.abc import Iterable

from oddrank.checkpoint.config import ConfigView
from oddrank.geometry import Along, Axis, Dim, KVCache, Model, Pair, Role, Whole

Index = tuple[tuple[str, tuple[int, ...]], ...]
WITHOUT_ROLE = (
    r".*rotary_emb\.inv_freq",  # derived from the config, stored by old exporters
    r".*self_attn\.(?:attn\.|[kv]_proj\.)?[kv]_scale",  # one scale of the KV cache a layer, whatever the heads
)


def linear(name: str, n: Dim, k: Dim, combine: str, index: Index, bias: bool = False) -> list[Role]:
    """A linear layer [N, K] and its bias. A column layer's bias is cut with its rows; a row layer's bias joins
    the sum through one owner."""
    if combine == "column":
        weight = Role(f"{name}.weight", (n, k), "column", index, matrix=True, work=1.0)
        extra = Role(f"{name}.bias", (n,), "column", index)
    else:
        weight = Role(f"{name}.weight", (n, k), "row", index, matrix=True, work=1.0)
        extra = Role(f"{name}.bias", (n,), "replicated", index, joins=f"{name}.weight")
    return [weight, extra] if bias else [weight]


def norm(name: str, width: int, index: Index = ()) -> Role:
    return Role(f"{name}.weight", (Whole(width),), "replicated", index)


def embeddings(prefix: str, hidden: int, tied: bool) -> list[Role]:
    """Token embedding (a lookup whose ranks are summed) and the head over the same vocabulary axis."""
    table, row = f"{prefix}embed_tokens.weight", (Along("vocab"), Whole(hidden))
    head = Role("lm_head.weight", row, "column", matrix=True, work=1.0, tied_to=table if tied else None)
    # a row of the table is one element of the summed vocabulary axis: each token's row is on exactly one rank
    return [Role(table, row, "column", matrix=True), head, norm(f"{prefix}norm", hidden)]


def attention(
    prefix: str, hidden: int, head_dim: int, index: Index, *, qkv_bias: bool, o_bias: bool, qk_norm: bool
) -> list[Role]:
    """Grouped-query attention with separate q, k, v, o projections; `qk_norm`: an RMS norm per head."""
    at = f"{prefix}layers.{{layer}}.self_attn"
    q, kv, h = Along("q_heads", head_dim), Along("kv_heads", head_dim), Whole(hidden)
    roles = [
        *linear(f"{at}.q_proj", q, h, "column", index, qkv_bias),
        *linear(f"{at}.k_proj", kv, h, "column", index, qkv_bias),
        *linear(f"{at}.v_proj", kv, h, "column", index, qkv_bias),
        *linear(f"{at}.o_proj", h, q, "row", index, o_bias),
    ]
    if qk_norm:
        roles += [norm(f"{at}.q_norm", head_dim, index), norm(f"{at}.k_norm", head_dim, index)]
    return roles


def gated_mlp(at: str, hidden: int, axis: str, index: Index, bias: bool = False) -> list[Role]:
    """down(act(gate(x)) * up(x)) with its width along `axis`."""
    return [
        *linear(f"{at}.gate_proj", Along(axis), Whole(hidden), "column", index, bias),
        *linear(f"{at}.up_proj", Along(axis), Whole(hidden), "column", index, bias),
        *linear(f"{at}.down_proj", Whole(hidden), Along(axis), "row", index, bias),
    ]


def architecture(c: ConfigView) -> str:
    """The class name config.json gives, for messages."""
    names = c.get_list("architectures")
    return str(names[0]) if names else c.model_type


def layer_index(c: ConfigView) -> Index:
    return (("layer", tuple(range(c.require_int("num_hidden_layers")))),)


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

    kv_heads, head_dim: the model type's own defaults where the config does not say.
    """
    hidden, mlp = c.require_int("hidden_size"), c.require_int("intermediate_size")
    q, kv, head_dim = c.require_int("num_attention_heads"), c.num_key_value_heads(kv_heads), c.head_dim(head_dim)
    index = layer_index(c)
    layer = f"{prefix}layers.{{layer}}"
    return Model(
        family=family,
        architecture=architecture(c),
        hidden=hidden,
        axes=(
            Axis("q_heads", q, "heads"),
            Axis("kv_heads", kv, "heads", summed=False),
            Axis("mlp", mlp, "width"),
            Axis("vocab", c.require_int("vocab_size"), "vocab"),
        ),
        pairs=(Pair("q_heads", "kv_heads"),),
        roles=(
            *embeddings(prefix, hidden, c.tie_word_embeddings()),
            *attention(prefix, hidden, head_dim, index, qkv_bias=qkv_bias, o_bias=o_bias, qk_norm=qk_norm),
            *gated_mlp(f"{layer}.mlp", hidden, "mlp", index, mlp_bias),
            norm(f"{layer}.input_layernorm", hidden, index),
            norm(f"{layer}.post_attention_layernorm", hidden, index),
            *more,
        ),
        kv=KVCache("kv_heads", layers=len(index[0][1]), width=2 * head_dim),
        config_axes=(
            ("num_attention_heads", "q_heads"),
            ("num_key_value_heads", "kv_heads"),
            ("intermediate_size", "mlp"),
        ),
        config_fixed=(("head_dim", head_dim),),
        ignored=WITHOUT_ROLE,
    )
