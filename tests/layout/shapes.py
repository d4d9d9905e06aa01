"""Model shapes for tests: configs, and the tensors such a checkpoint holds, told independently of the families.

The tables are written from transformers' parameter names and shapes; the families under test have no part in them.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from oddrank.checkpoint.config import ConfigView
from oddrank.families import family_of
from oddrank.geometry import Along, Axis, KVCache, Model, Pair, Role, Whole
from oddrank.layout.census import take_census
from oddrank.layout.executors import Constraints
from oddrank.layout.plan import config_digest
from oddrank.layout.solver import Request
from oddrank.planner import KV_ITEMSIZE, Planned, Subject, plan_subject

Config = dict[str, Any]


class Tensor(NamedTuple):
    """What a census reads of a stored tensor."""

    dtype: str
    shape: tuple[int, ...]


class Variant(NamedTuple):
    """A family with the switches that change which tensors it has."""

    model_type: str
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False

    @property
    def name(self) -> str:
        return self.model_type + "".join(
            f"+{k}" for k in ("qkv_bias", "o_bias", "mlp_bias") if getattr(self, k) and self.model_type != "qwen2"
        )


VARIANTS = {
    v.name: v
    for v in (
        Variant("llama"),
        Variant("llama", qkv_bias=True, o_bias=True),
        Variant("llama", qkv_bias=True, o_bias=True, mlp_bias=True),
        Variant("mistral"),
        Variant("qwen2", qkv_bias=True),
        Variant("qwen3", qk_norm=True),
        Variant("qwen3", qkv_bias=True, o_bias=True, qk_norm=True),
    )
}


def config(
    variant: str = "llama",
    *,
    q: int,
    kv: int,
    head_dim: int = 8,
    hidden: int | None = None,
    mlp: int = 48,
    vocab: int = 96,
    layers: int = 2,
    tied: bool = False,
    **more: Any,
) -> Config:
    """config.json of a model of this shape; `hidden` is q * head_dim unless given."""
    v = VARIANTS[variant]
    made: Config = {
        "model_type": v.model_type,
        "architectures": [
            {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}[v.model_type] + "ForCausalLM"
        ],
        "hidden_size": q * head_dim if hidden is None else hidden,
        "intermediate_size": mlp,
        "num_attention_heads": q,
        "num_key_value_heads": kv,
        "num_hidden_layers": layers,
        "vocab_size": vocab,
        "tie_word_embeddings": tied,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "torch_dtype": "bfloat16",
    }
    if (hidden is not None and hidden != q * head_dim) or v.model_type == "qwen3":
        made["head_dim"] = head_dim
    if v.model_type in ("llama", "qwen3"):
        made["attention_bias"] = v.o_bias
    if v.model_type == "llama":
        made["mlp_bias"] = v.mlp_bias
    if v.model_type == "mistral":
        made["sliding_window"] = None
    return {**made, **more}


def variant_of(c: Config) -> Variant:
    """The tensor switches of a config that `config` made."""
    kind = c["model_type"]
    bias = bool(c.get("attention_bias"))
    return Variant(
        kind,
        qkv_bias=bias or kind == "qwen2",
        o_bias=bias,
        mlp_bias=bool(c.get("mlp_bias")),
        qk_norm=kind == "qwen3",
    )


def tensor_table(c: Config, dtype: str = "BF16") -> dict[str, Tensor]:
    """Name -> tensor of a dense checkpoint with this config, as transformers names and shapes them."""
    v = variant_of(c)
    h, m, vocab = c["hidden_size"], c["intermediate_size"], c["vocab_size"]
    q, kv = c["num_attention_heads"], c["num_key_value_heads"]
    d = c.get("head_dim") or h // q
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, h), "model.norm.weight": (h,)}
    if not c.get("tie_word_embeddings"):
        shapes["lm_head.weight"] = (vocab, h)
    for i in range(c["num_hidden_layers"]):
        at = f"model.layers.{i}."
        for name, n, k, bias in (
            ("self_attn.q_proj", q * d, h, v.qkv_bias),
            ("self_attn.k_proj", kv * d, h, v.qkv_bias),
            ("self_attn.v_proj", kv * d, h, v.qkv_bias),
            ("self_attn.o_proj", h, q * d, v.o_bias),
            ("mlp.gate_proj", m, h, v.mlp_bias),
            ("mlp.up_proj", m, h, v.mlp_bias),
            ("mlp.down_proj", h, m, v.mlp_bias),
        ):
            shapes[f"{at}{name}.weight"] = (n, k)
            if bias:
                shapes[f"{at}{name}.bias"] = (n,)
        if v.qk_norm:
            shapes[f"{at}self_attn.q_norm.weight"] = (d,)
            shapes[f"{at}self_attn.k_norm.weight"] = (d,)
        shapes[f"{at}input_layernorm.weight"] = (h,)
        shapes[f"{at}post_attention_layernorm.weight"] = (h,)
    return {name: Tensor(dtype, shape) for name, shape in shapes.items()}


def subject(c: Config, table: dict[str, Tensor] | None = None, dtype: str = "BF16") -> Subject:
    """A checkpoint of this config as far as planning needs it."""
    view = ConfigView(c)
    model = family_of(view).build(view, "model.")
    census = take_census(model, tensor_table(c, dtype) if table is None else table)
    return Subject("tiny", config_digest(c), model, census, KV_ITEMSIZE[view.dtype() or "bfloat16"])


def subject_of(model: Model, table: dict[str, Tensor]) -> Subject:
    """A subject for a model that no family file describes."""
    return Subject("synthetic", "0" * 64, model, take_census(model, table), 2)


def plan(
    s: Subject,
    tp: int,
    executor: str = "runtime",
    layout: str = "auto",
    constraints: dict[str, int] | None = None,
    **more: Any,
) -> Planned:
    """A proven plan."""
    wanted = Constraints.parse(constraints or {}, s.model)
    return plan_subject(s, Request(tp=tp, executor=executor, layout=layout, constraints=wanted, **more))


def per_rank(planned: Planned, axis: str) -> tuple[int, ...]:
    return planned.plan.layout(axis).counts()


def head_choices(planned: Planned, follower: str = "q_heads") -> set[tuple[tuple[int, int], tuple[int, int]]]:
    """((planned followers, planned leaders), (fullest rank's followers, leaders)) of every alternative of a pair."""
    return {
        (c.candidate.totals(), c.candidate.largest())
        for group in planned.solution.choices
        for c in group
        if c.candidate.layouts[0].axis == follower
    }


def changed(planned_or_plan: Any, **fields: Any) -> Any:
    return msgspec.structs.replace(planned_or_plan, **fields)


def toy_model(
    *,
    followers: int,
    leaders: int,
    head_dim: int = 8,
    hidden: int = 32,
    widths: dict[str, int] | None = None,
    experts: int = 0,
    layers: int = 1,
    names: tuple[str, str] = ("q_heads", "kv_heads"),
    crosstalk: tuple[Any, ...] = (),
) -> Model:
    """A bare model: one pair of head axes with its four projections, and a gated block for each width.

    It has the head and width arithmetic of architectures that no family file describes yet.
    """
    index = (("layer", tuple(range(layers))),)
    f, le = names
    at = "layers.{layer}"
    wide = Whole(hidden)
    roles = [
        Role(f"{at}.q.weight", (Along(f, head_dim), wide), "column", index, matrix=True, work=1.0),
        Role(f"{at}.k.weight", (Along(le, head_dim), wide), "column", index, matrix=True, work=1.0),
        Role(f"{at}.v.weight", (Along(le, head_dim), wide), "column", index, matrix=True, work=1.0),
        Role(f"{at}.o.weight", (wide, Along(f, head_dim)), "row", index, matrix=True, work=1.0),
    ]
    axes = [Axis(f, followers, "heads"), Axis(le, leaders, "heads", summed=False)]
    for name, width in (widths or {}).items():
        axes.append(Axis(name, width, "width"))
        roles += [
            Role(f"{at}.{name}.up.weight", (Along(name), wide), "column", index, matrix=True, work=1.0),
            Role(f"{at}.{name}.down.weight", (wide, Along(name)), "row", index, matrix=True, work=1.0),
        ]
    if experts:
        axes.append(Axis("experts", experts, "experts", summed=False))
        roles.append(Role(f"{at}.router.weight", (Along("experts"), wide), "replicated", index))
    return Model(
        family="toy",
        architecture="Toy",
        hidden=hidden,
        axes=tuple(axes),
        pairs=(Pair(f, le),),
        roles=tuple(roles),
        kv=(KVCache(le, layers, 2 * head_dim),) if le == "kv_heads" else (),
        config_axes=(),
        crosstalk=crosstalk,
    )


def toy_table(model: Model, parts: dict[str, tuple[str, tuple[int, int]]] | None = None) -> dict[str, Tensor]:
    """Tensors of a toy model. `parts`: stored suffix -> (dtype, (elements an entry covers along N, K)) for
    matrices; dense bf16 by default. Shapes are rounded up to whole entries."""
    parts = parts or {".weight": ("BF16", (1, 1))}
    stock = model.stock()
    table: dict[str, Tensor] = {}
    for role in model.roles:
        shape = tuple(d.size(stock) for d in role.dims)
        for name in role.instances():
            if not role.matrix:
                table[name] = Tensor("BF16", shape)
                continue
            for suffix, (dtype, block) in parts.items():
                entries = tuple(-(-n // b) for n, b in zip(shape, block, strict=True))
                table[name.removesuffix(".weight") + suffix] = Tensor(dtype, entries)
    return table
