"""What a family's arithmetic needs beyond its tensors, from its config: the published definition of each."""

from __future__ import annotations

from typing import Any, NamedTuple

from family_reference import Config, module_of


class Attention(NamedTuple):
    """One layer's attention. width: of a head. rotary: how much of it turns, `pairs`: its neighbours, not its halves.
    queries, keys: the axes. across: the norm of queries and keys runs over all heads. gated: each head has an output
    gate beside its query. latent: multi-head latent attention, with values of width `value`.
    normed_values: an RMS norm on values, without weights. borrows: the layer whose keys and values it uses."""

    width: int
    scale: float
    theta: float
    rotary: int
    window: int | None = None
    queries: str = "q_heads"
    keys: str = "kv_heads"
    across: bool = False
    gated: bool = False
    latent: bool = False
    pairs: bool = False
    value: int = 0
    normed_values: bool = False
    borrows: int | None = None


class Facts(NamedTuple):
    """attention: per layer, None where it is a gated delta net. offset: what norms add to their weight. group_top: how
    many of a group's experts its worth is the sum of. clamp: alpha and limit of gpt-oss's unit. net: widths of a gated
    delta net's key and value heads."""

    at: str
    layers: int
    vocab: int
    tied: bool
    eps: float
    attention: tuple[Attention | None, ...]
    offset: float = 0.0
    embed_scale: float = 1.0
    softcap: float | None = None
    unit: str = "silu"
    router: str = "softmax"
    chosen: int = 0
    renormalised: bool = True
    routed_scale: float = 1.0
    groups: int = 1
    kept_groups: int = 1
    group_top: int = 2
    clamp: tuple[float, float] | None = None
    net: tuple[int, int] = (0, 0)


def facts_of(c: Config) -> Facts:
    made = globals()[f"_{module_of(c)}"](c)
    common = {
        "at": "model.",
        "layers": c["num_hidden_layers"],
        "vocab": c["vocab_size"],
        "tied": bool(c["tie_word_embeddings"]),
        "eps": c["rms_norm_eps"],
        "chosen": c.get("num_experts_per_tok", 0),
    }
    return Facts(**{**common, **made})


def _plain(c: Config, **more: Any) -> Attention:
    d = c.get("head_dim") or c["hidden_size"] // c["num_attention_heads"]
    rotary = int(d * c["rope_parameters"].get("partial_rotary_factor", 1.0))
    made: dict[str, Any] = {"width": d, "scale": d**-0.5, "theta": c["rope_parameters"]["rope_theta"], "rotary": rotary}
    return Attention(**{**made, **more})


def _every(c: Config, attention: Attention) -> tuple[Attention, ...]:
    return (attention,) * c["num_hidden_layers"]


def _qwen3_moe(c: Config) -> dict[str, Any]:
    return {"attention": _every(c, _plain(c)), "renormalised": c["norm_topk_prob"]}


def _mixtral(c: Config) -> dict[str, Any]:
    return {"attention": _every(c, _plain(c, window=c["sliding_window"]))}


def _phi3(c: Config) -> dict[str, Any]:
    return {"attention": _every(c, _plain(c, window=c["sliding_window"]))}


def _seed_oss(c: Config) -> dict[str, Any]:
    return {"attention": _every(c, _plain(c))}


def _kinds(c: Config, sliding: Attention, full: Attention) -> tuple[Attention, ...]:
    return tuple(sliding if kind == "sliding_attention" else full for kind in c["layer_types"])


def _gpt_oss(c: Config) -> dict[str, Any]:
    return {
        "attention": _kinds(c, _plain(c, window=c["sliding_window"]), _plain(c)),
        "router": "softmax of the best",
        "clamp": (c["swiglu_alpha"], c["swiglu_limit"]),
    }


def _grouped(c: Config) -> dict[str, Any]:
    return {
        "router": "sigmoid", "groups": c["n_group"], "kept_groups": c["topk_group"],
        "routed_scale": c["routed_scaling_factor"], "renormalised": c["norm_topk_prob"],
    }  # fmt: skip


def _glm4_moe(c: Config) -> dict[str, Any]:
    return {"attention": _every(c, _plain(c)), **_grouped(c)}


def _qwen3_next(c: Config) -> dict[str, Any]:
    kinds = (None if kind == "linear_attention" else _plain(c, gated=True) for kind in c["layer_types"])
    return {"attention": tuple(kinds), "offset": 1.0, "net": (c["linear_key_head_dim"], c["linear_value_head_dim"])}


def _gemma3(c: Config) -> dict[str, Any]:
    thetas = (c["rope_parameters"][kind]["rope_theta"] for kind in ("sliding_attention", "full_attention"))
    d, scale = c["head_dim"], c["query_pre_attn_scalar"] ** -0.5
    sliding, full = (Attention(d, scale, theta, d) for theta in thetas)
    return {
        "attention": _kinds(c, sliding._replace(window=c["sliding_window"]), full),
        "offset": 1.0,
        "embed_scale": c["hidden_size"] ** 0.5,
        "softcap": c["final_logit_softcapping"],
        "unit": "gelu",
    }


def _latent(c: Config) -> Attention:
    width, turned = c["qk_nope_head_dim"] + c["qk_rope_head_dim"], c["qk_rope_head_dim"]
    theta = c["rope_parameters"]["rope_theta"]
    return Attention(width, width**-0.5, theta, turned, latent=True, pairs=True, value=c["v_head_dim"])


def _deepseek_v3(c: Config) -> dict[str, Any]:
    return {"attention": _every(c, _latent(c)), **_grouped(c)}


def _deepseek_v2(c: Config) -> dict[str, Any]:
    """Softmax scores, a group's worth is its best expert's, and the chosen are not made to sum to one."""
    more = {"router": "softmax", "group_top": 1, "renormalised": False}
    return {"attention": _every(c, _latent(c)), **_grouped(c), **more}


def _minimax_m2(c: Config) -> dict[str, Any]:
    return {"attention": _every(c, _plain(c, across=True)), "router": "sigmoid"}


def _gemma4(c: Config) -> dict[str, Any]:
    """As many layers as share use the keys and values of the last of their kind before them."""
    count, q, kv = c["num_hidden_layers"], c["num_attention_heads"], c["num_key_value_heads"]
    full_kv = c["num_global_key_value_heads"] if c.get("attention_k_eq_v") else kv
    first = count - c["num_kv_shared_layers"]
    assert q % kv == q % full_kv == 0
    made = []
    for i, kind in enumerate(c["layer_types"]):
        full = kind == "full_attention"
        width, theta = c["global_head_dim" if full else "head_dim"], c["rope_parameters"][kind]["rope_theta"]
        own = "full_" if full and full_kv != kv else ""
        lender = max(j for j in range(first) if c["layer_types"][j] == kind)
        window = None if full else c["sliding_window"]
        axes = {"queries": f"{own}q_heads", "keys": f"{own}kv_heads"}
        borrows = lender if i >= first else None
        made.append(Attention(width, 1.0, theta, width, window, **axes, normed_values=True, borrows=borrows))
    return {
        "attention": tuple(made),
        "embed_scale": c["hidden_size"] ** 0.5,
        "softcap": c["final_logit_softcapping"],
        "unit": "gelu",
        "chosen": c.get("top_k_experts", 0),
    }
