"""Tiny random hybrid models (qwen3_5, qwen3_5_moe) in float64, and transformers' logits for them in true float64.

Names and shapes are transformers' own: a state dict loads strictly. MTP layers, which transformers ignores, are named
and shaped as published.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
import transformers
from layout.shapes import Config, Tensor
from proof.tiny import F64, Weights, true_float64
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5Config, Qwen3_5TextConfig
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeConfig, Qwen3_5MoeTextConfig

from oddrank.checkpoint.config import ConfigView
from oddrank.families import family_of
from oddrank.layout.census import take_census
from oddrank.layout.plan import config_digest
from oddrank.planner import KV_ITEMSIZE, Subject

FULL, LINEAR = "full_attention", "linear_attention"
FAMILIES = ("qwen3_5", "qwen3_5_moe")
_CLASSES = {
    "qwen3_5": ("Qwen3_5", Qwen3_5Config, Qwen3_5TextConfig),
    "qwen3_5_moe": ("Qwen3_5Moe", Qwen3_5MoeConfig, Qwen3_5MoeTextConfig),
}


class Heads(NamedTuple):
    """Query, KV, GDN key and value heads."""

    q: int
    kv: int
    k: int
    v: int


SHAPES = (Heads(6, 2, 4, 8), Heads(8, 2, 2, 6), Heads(6, 3, 5, 10), Heads(8, 4, 3, 3), Heads(9, 3, 3, 9))


def config(
    family: str,
    heads: Heads,
    *,
    layers: tuple[str, ...] = (LINEAR, FULL, LINEAR),
    head_dim: int = 4,
    widths: tuple[int, int] = (4, 6),
    hidden: int = 26,
    mlp: int = 22,
    shared: int = 14,
    vocab: int = 40,
    experts: tuple[int, int] = (4, 2),
    tied: bool = False,
    bias: bool = False,
    wrapped: bool = False,
    mtp: int = 1,
) -> Config:
    """config.json. mlp: the dense width, or a routed expert's. widths: of a GDN key and value head."""
    name = _CLASSES[family][0]
    pairs = head_dim // 4  # half of each head turns
    text: Config = {
        "model_type": f"{family}_text",
        "hidden_size": hidden,
        "num_attention_heads": heads.q,
        "num_key_value_heads": heads.kv,
        "head_dim": head_dim,
        "linear_num_key_heads": heads.k,
        "linear_num_value_heads": heads.v,
        "linear_key_head_dim": widths[0],
        "linear_value_head_dim": widths[1],
        "linear_conv_kernel_dim": 4,
        "layer_types": list(layers),
        "num_hidden_layers": len(layers),
        "vocab_size": vocab,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {
            "rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5,
            "mrope_section": [pairs, 0, 0], "mrope_interleaved": True,
        },
        "attention_bias": bias,
        "tie_word_embeddings": tied,
        "hidden_act": "silu",
        "max_position_embeddings": 512,
        "mtp_num_hidden_layers": mtp,
        "dtype": "float64",
    }  # fmt: skip
    if family == "qwen3_5":
        text["intermediate_size"] = mlp
    else:
        text |= {
            "moe_intermediate_size": mlp,
            "shared_expert_intermediate_size": shared,
            "num_experts": experts[0],
            "num_experts_per_tok": experts[1],
        }
    if not wrapped:
        return {**text, "architectures": [f"{name}ForCausalLM"]}
    return {
        "architectures": [f"{name}ForConditionalGeneration"],
        "model_type": family,
        "text_config": text,
        "tie_word_embeddings": tied,
        "dtype": "float64",
        "image_token_id": vocab - 4, "video_token_id": vocab - 3,
        "vision_start_token_id": vocab - 6, "vision_end_token_id": vocab - 5,
        "vision_config": {
            "model_type": f"{family}_vision", "depth": 1, "hidden_size": 16, "intermediate_size": 12, "num_heads": 2,
            "in_channels": 3, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
            "out_hidden_size": hidden, "num_position_embeddings": 16,
        },
    }  # fmt: skip


def text_of(c: Config) -> Config:
    return c.get("text_config", c)


def prefix_of(c: Config) -> str:
    return "model.language_model." if "text_config" in c else "model."


def is_moe(c: Config) -> bool:
    return "num_experts" in text_of(c)


Shapes = dict[str, tuple[int, ...]]


def tensor_shapes(c: Config, *, stacked: bool = True, mtp_stacked: bool = True, mtp: bool = True) -> Shapes:
    """Name -> shape of every stored tensor."""
    t, at, h = text_of(c), prefix_of(c), text_of(c)["hidden_size"]
    shapes: Shapes = {f"{at}embed_tokens.weight": (t["vocab_size"], h), f"{at}norm.weight": (h,)}
    if not c["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (t["vocab_size"], h)
    for i, kind in enumerate(t["layer_types"]):
        shapes |= _layer(t, f"{at}layers.{i}.", kind, stacked)
    if mtp:
        for i in range(t["mtp_num_hidden_layers"]):
            shapes |= _layer(t, f"mtp.layers.{i}.", FULL, mtp_stacked)
        norms = ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden")
        shapes |= {"mtp.fc.weight": (h, 2 * h)} | {f"mtp.{n}.weight": (h,) for n in norms}
    if "vision_config" in c:
        shapes |= _vision(c["vision_config"])
    return shapes


def _layer(t: Config, at: str, kind: str, stacked: bool) -> Shapes:
    h, d = t["hidden_size"], t["head_dim"]
    q, kv = t["num_attention_heads"] * d, t["num_key_value_heads"] * d
    v = t["linear_num_value_heads"]
    kw, vw = t["linear_num_key_heads"] * t["linear_key_head_dim"], v * t["linear_value_head_dim"]
    made: Shapes = {f"{at}{n}.weight": (h,) for n in ("input_layernorm", "post_attention_layernorm")}
    if kind == FULL:
        for name, n, k in (("q", 2 * q, h), ("k", kv, h), ("v", kv, h), ("o", h, q)):
            made[f"{at}self_attn.{name}_proj.weight"] = (n, k)
            if t["attention_bias"]:
                made[f"{at}self_attn.{name}_proj.bias"] = (n,)
        made |= {f"{at}self_attn.{n}_norm.weight": (d,) for n in ("q", "k")}
    else:
        gdn = f"{at}linear_attn."
        made |= {
            f"{gdn}in_proj_qkv.weight": (2 * kw + vw, h), f"{gdn}in_proj_z.weight": (vw, h),
            f"{gdn}in_proj_b.weight": (v, h), f"{gdn}in_proj_a.weight": (v, h),
            f"{gdn}conv1d.weight": (2 * kw + vw, 1, t["linear_conv_kernel_dim"]),
            f"{gdn}A_log": (v,), f"{gdn}dt_bias": (v,), f"{gdn}norm.weight": (t["linear_value_head_dim"],),
            f"{gdn}out_proj.weight": (h, vw),
        }  # fmt: skip
    if "num_experts" not in t:
        return made | _mlp(f"{at}mlp.", t["intermediate_size"], h)
    e, m, mlp = t["num_experts"], t["moe_intermediate_size"], f"{at}mlp."
    made |= {f"{mlp}gate.weight": (e, h), f"{mlp}shared_expert_gate.weight": (1, h)}
    made |= _mlp(f"{mlp}shared_expert.", t["shared_expert_intermediate_size"], h)
    if stacked:
        return made | {f"{mlp}experts.gate_up_proj": (e, 2 * m, h), f"{mlp}experts.down_proj": (e, h, m)}
    for i in range(e):
        made |= _mlp(f"{mlp}experts.{i}.", m, h)
    return made


def _mlp(at: str, m: int, h: int) -> Shapes:
    return {f"{at}gate_proj.weight": (m, h), f"{at}up_proj.weight": (m, h), f"{at}down_proj.weight": (h, m)}


def _vision(v: Config) -> Shapes:
    h, at, m = v["hidden_size"], "model.visual.", v["intermediate_size"]
    merged = h * v["spatial_merge_size"] ** 2
    made: Shapes = {f"{at}pos_embed.weight": (v["num_position_embeddings"], h)}

    def both(name: str, *shape: int) -> None:
        made[f"{at}{name}.weight"] = shape
        made[f"{at}{name}.bias"] = shape[:1]

    both("patch_embed.proj", h, v["in_channels"], v["temporal_patch_size"], v["patch_size"], v["patch_size"])
    for i in range(v["depth"]):
        both(f"blocks.{i}.norm1", h)
        both(f"blocks.{i}.norm2", h)
        both(f"blocks.{i}.attn.qkv", 3 * h, h)
        both(f"blocks.{i}.attn.proj", h, h)
        both(f"blocks.{i}.mlp.linear_fc1", m, h)
        both(f"blocks.{i}.mlp.linear_fc2", h, m)
    both("merger.norm", h)
    both("merger.linear_fc1", merged, merged)
    both("merger.linear_fc2", v["out_hidden_size"], merged)
    return made


def random_weights(shapes: Mapping[str, tuple[int, ...]], rng: np.random.Generator) -> Weights:
    """Weights with which every head, channel and row matters: logits of order one, attention far from uniform,
    GDN states that remember a few tokens, router logits well apart."""
    made: Weights = {}
    for name, shape in shapes.items():
        noise = rng.standard_normal(shape)
        if name.endswith("linear_attn.norm.weight") or (".visual." in name and "norm" in name):
            made[name] = 1.0 + 0.3 * noise
        elif "norm" in name and name.endswith(".weight"):
            made[name] = 0.3 * noise  # (1 + w)
        elif name.endswith("A_log"):
            made[name] = np.log(rng.uniform(0.2, 3.0, shape))
        elif name.endswith((".bias", "dt_bias", "conv1d.weight")):
            made[name] = 0.5 * noise
        elif name.endswith("embed_tokens.weight"):
            made[name] = noise
        else:
            strong = name.endswith((".q_proj.weight", ".k_proj.weight", "mlp.gate.weight"))
            made[name] = (2.0 if strong else 1.0) * noise / np.sqrt(shape[-1])
    return made


def random_config(family: str, rng: np.random.Generator, wrapped: bool | None = None) -> Config:
    """One of SHAPES with odd widths; tied or not, with attention biases or not, text-only or wrapped."""
    heads = SHAPES[int(rng.integers(len(SHAPES)))]
    layers = [(LINEAR, FULL), (FULL, LINEAR), (LINEAR, FULL), (LINEAR, FULL, LINEAR)][int(rng.integers(4))]
    return config(
        family,
        heads,
        layers=layers,
        head_dim=int(rng.choice([4, 8])),
        widths=[(4, 6), (4, 4), (6, 3)][int(rng.integers(3))],
        hidden=int(rng.choice([20, 26, 33])),
        mlp=int(rng.choice([9, 14, 22])),
        shared=int(rng.choice([8, 11, 15])),
        vocab=int(rng.choice([33, 40, 64])),
        experts=[(4, 2), (5, 2), (4, 1), (6, 3)][int(rng.integers(4))],
        tied=bool(rng.random() < 0.3),
        bias=bool(rng.random() < 0.4),
        wrapped=bool(rng.random() < 0.3) if wrapped is None else wrapped,
        mtp=0,
    )


def tiny_subject(c: Config, weights: Mapping[str, Any], dtype: str = "F64") -> Subject:
    """A checkpoint of this config and these tensors, as far as planning needs it."""
    view = ConfigView(c)
    model = family_of(view).build(view, prefix_of(c))
    census = take_census(model, {n: Tensor(dtype, tuple(w.shape)) for n, w in weights.items()})
    return Subject("tiny", config_digest(c), model, census, KV_ITEMSIZE["float64"])


def _state(c: Config, weights: Mapping[str, F64]) -> Weights:
    """What transformers loads: no MTP layer, experts stacked."""
    state = {n: w for n, w in weights.items() if not n.startswith("mtp.")}
    if is_moe(c):
        experts = text_of(c)["num_experts"]
        for i in range(text_of(c)["num_hidden_layers"]):
            at = f"{prefix_of(c)}layers.{i}.mlp.experts."
            if f"{at}down_proj" in state:
                continue
            gate, up, down = (
                np.stack([state.pop(f"{at}{e}.{part}_proj.weight") for e in range(experts)])
                for part in ("gate", "up", "down")
            )
            state |= {f"{at}gate_up_proj": np.concatenate([gate, up], axis=1), f"{at}down_proj": down}
    if c["tie_word_embeddings"]:
        state.setdefault("lm_head.weight", state[f"{prefix_of(c)}embed_tokens.weight"])
    return state


def transformers_logits(c: Config, weights: Mapping[str, F64], tokens: list[int]) -> F64:
    """[tokens, vocab]: transformers' logits for one sequence, all in float64; the state dict must fit exactly."""
    family = "qwen3_5_moe" if is_moe(c) else "qwen3_5"
    with true_float64(family), torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        _, wrapped, text = _CLASSES[family]
        made = (wrapped if "text_config" in c else text).from_dict(c)
        made._attn_implementation = "eager"
        made._experts_implementation = "eager"
        cls = getattr(transformers, c["architectures"][0])
        with mock.patch.object(cls, "init_weights", lambda self: None):  # every weight is loaded below
            model = cls(made)
        state = {n: torch.from_numpy(np.ascontiguousarray(w)) for n, w in _state(c, weights).items()}
        model.load_state_dict(state, strict=True, assign=True)
        model.eval()
        out = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    assert out.dtype == torch.float64
    return out.numpy().copy()
