"""What the dimensions of each tensor are made of, by name: written from the model code, apart from the families."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from formats.codec import Raw, decode
from formats.integers import awq, ct, gptq
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from oddrank.checkpoint import Checkpoint

Sections = tuple[tuple[str, int], ...]
"""(axis, positions an element takes), one after another."""


class Widths(NamedTuple):
    """kind: model_type. latent: widths of plain and rotary part, and of values, of latent attention's heads. full:
    layers of Gemma 4 with heads of their own, `full_head` wide."""

    head: int
    gated: bool
    gdn: int
    kind: str
    latent: tuple[int, int, int]
    full: frozenset[str]
    full_head: int


def widths(config: dict[str, Any]) -> Widths:
    text = config.get("text_config", config)
    head = text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    latent = tuple(text.get(key, 0) for key in ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"))
    own = [f".{i}." for i, kind in enumerate(text.get("layer_types", ())) if kind == "full_attention"]
    full = frozenset(own if text.get("num_global_key_value_heads") else ())
    return Widths(
        head, "linear_key_head_dim" in text, text.get("linear_key_head_dim", 0), text["model_type"], latent, full,
        text.get("global_head_dim", 0),
    )  # fmt: skip


INTERLEAVED = ("in_proj_qkvz.weight", "in_proj_ba.weight")
"""Key head by key head, which is no concatenation of sections; the families' own tests read them."""


def cut_dims(dense_name: str, w: Widths) -> dict[int, Sections]:
    """Dimension -> sections, for each dimension that some axis divides. Dimensions of the logical tensor."""
    if dense_name.startswith("model.visual.") or dense_name == "mtp.fc.weight":
        return {}
    *_, module, leaf = ("", *dense_name.split("."))
    what = leaf if leaf not in ("weight", "bias") else module
    # the shared expert of GLM and DeepSeek is as wide as a routed one
    is_expert = ".experts" in dense_name or ".shared_experts." in dense_name
    width = "moe" if is_expert else "shared" if ".shared_expert." in dense_name else "mlp"
    k, v = ("gdn_k_heads", w.gdn), ("gdn_v_heads", w.gdn)
    if any(layer in dense_name for layer in w.full):
        q, kv = ("full_q_heads", w.full_head), ("full_kv_heads", w.full_head)
    else:
        q, kv = ("q_heads", w.head), ("kv_heads", w.head)
    plain, turned, value = w.latent
    special: dict[str, dict[int, Sections]] = {
        "gpt_oss": {
            # inputs before outputs, gate and up in turn
            "gate_up_proj": {2: (("moe", 2),)},
            "gate_up_proj_bias": {1: (("moe", 2),)},
            "down_proj": {1: (("moe", 1),)},
            "o_proj": {1: (q,)} if leaf == "weight" else {},
        },
        "deepseek_v3": {
            "q_b_proj": {0: (("q_heads", plain + turned),)},
            "kv_b_proj": {0: (("q_heads", plain + value),)},
            "o_proj": {1: (("q_heads", value),)},
        },
        "minimax_m2": {"q_norm": {0: (q,)}, "k_norm": {0: (kv,)}},
        "phi3": {"qkv_proj": {0: (q, kv, kv)}, "gate_up_proj": {0: (("mlp", 1), ("mlp", 1))}},
    }.get(w.kind, {})
    if what in special:
        return special[what]
    rows: dict[str, Sections] = {
        "embed_tokens": (("vocab", 1),),
        "lm_head": (("vocab", 1),),
        # a gated attention's query head has its gate beside it
        "q_proj": ((q[0], q[1] * (2 if w.gated else 1)),),
        "k_proj": (kv,),
        "v_proj": (kv,),
        "sinks": (("q_heads", 1),),
        "w1": ((width, 1),),
        "w3": ((width, 1),),
        "gate_proj": ((width, 1),),
        "up_proj": ((width, 1),),
        "in_proj_qkv": (k, k, v),
        "conv1d": (k, k, v),
        "in_proj_z": (v,),
        "in_proj_a": (("gdn_v_heads", 1),),
        "in_proj_b": (("gdn_v_heads", 1),),
        "A_log": (("gdn_v_heads", 1),),
        "dt_bias": (("gdn_v_heads", 1),),
    }
    columns: dict[str, Sections] = {
        "o_proj": (q,),
        "out_proj": (v,),
        "w2": ((width, 1),),
        "down_proj": ((width, 1),),
    }
    if what == "gate_up_proj":
        return {1: (("moe", 1), ("moe", 1))}
    if what in rows:
        return {0: rows[what]}
    if what in columns:
        stacked = leaf == "down_proj"  # [experts, hidden, width], without `.weight`
        return {2 if stacked else 1: columns[what]}
    return {}


COMPANIONS = (
    ".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".weight_global_scale", ".input_scale",
    ".input_global_scale",
)  # fmt: skip
BLOCKS = ("_blocks", "_scales")
"""Of gpt-oss's stacked experts, in place of [E, K, N]."""
PACKED = (".qweight", ".qzeros", ".scales", ".g_idx", ".weight_shape", ".weight_zero_point")
"""What else integers in 32-bit words are stored in."""


def matrices(names: Iterator[str] | list[str]) -> dict[str, list[str]]:
    """Dense name -> suffixes of its stored tensors; "" where it is stored under its dense name."""
    found: dict[str, list[str]] = {}
    for name in names:
        suffix = next((s for s in (*COMPANIONS, ".weight_packed", *PACKED) if name.endswith(s)), None)
        if name.endswith(BLOCKS):
            found.setdefault(name[:-7], []).append(name[-7:])
        elif suffix is None and not name.endswith(".weight"):
            found[name] = [""]
        else:
            base = name.removesuffix(suffix or ".weight")
            found.setdefault(f"{base}.weight", []).append(suffix or ".weight")
    return found


def scale_block(parts: dict[str, Raw], logical: tuple[int, ...]) -> tuple[int, int]:
    """Elements along (N, K) per scale, as the releases store them."""
    if "_blocks" in parts:
        return (1, 32)
    if is_packed(parts):
        groups = parts[".scales"].words.shape[0] if ".scales" in parts else parts[".weight_scale"].words.shape[1]
        return (1, logical[1] // groups if groups > 1 else 0)
    scale = parts.get(".weight_scale_inv") or parts.get(".weight_scale")
    values = parts.get(".weight_packed") or parts[".weight"]
    if scale is None or (scale.words.size == 1 and scale.words.ndim < 2):
        return (0, 0)
    if scale.dtype == "U8":
        return (1, 32)
    if values.dtype == "U8":
        return (1, 16)
    if scale.words.ndim == 1 or scale.words.shape == (logical[0], 1):
        return (1, 0)
    return (128, 128)


def is_packed(parts: dict[str, Raw]) -> bool:
    return not {".qweight", ".weight_shape"}.isdisjoint(parts)


def unpacked(parts: dict[str, Raw], group: int | None) -> npt.NDArray[np.float64]:
    """Integers in 32-bit words, as the releases store them. group: columns of a scale, 0 = all; None: as many as
    there are groups."""
    if ".weight_shape" in parts:
        n, k = (int(i) for i in parts[".weight_shape"].words)
        groups, per = parts[".weight_scale"].words.shape[1], round(k / max(1, parts[".weight_packed"].words.shape[1]))
        made = ct(32 // (per or 8), _width(k, groups, group), symmetric=".weight_zero_point" not in parts)
        return made.decode(parts)
    groups, n = parts[".scales"].words.shape
    rows, columns = parts[".qweight"].words.shape
    if columns != n:
        return awq(_width(rows, groups, group)).decode(parts)
    per = n // parts[".qzeros"].words.shape[1]
    made = gptq(32 // per, _width(rows * per, groups, group), index=".g_idx" in parts)
    return made.decode(parts)


def _width(k: int, groups: int, group: int | None) -> int:
    return group if group is not None else k // groups if groups > 1 else 0


def logical(parts: dict[str, Raw], block: tuple[int, int] | None = None) -> npt.NDArray[np.float64]:
    """The decoded tensor, from its stored tensors by suffix."""
    if "_blocks" in parts:
        made = [torch.from_numpy(np.array(parts[s].words)) for s in BLOCKS]
        return convert_moe_packed_tensors(*made, dtype=torch.float64).numpy()
    if is_packed(parts):
        return unpacked(parts, None if block is None else block[1])
    if set(parts) == {""}:
        parts = {".weight": parts[""]}
    values = parts.get(".weight_packed") or parts[".weight"]
    shape = values.words.shape
    return decode(parts, block or scale_block(parts, shape))


def raw(checkpoint: Checkpoint, name: str) -> Raw:
    return Raw(checkpoint.tensors[name].dtype, checkpoint.array(name))


def parts_of(checkpoint: Checkpoint, dense_name: str, suffixes: list[str]) -> dict[str, Raw]:
    base = dense_name.removesuffix(".weight")
    return {s: raw(checkpoint, base + s if s else dense_name) for s in suffixes}


def places(sections: Sections, stock: dict[str, int], slots: dict[str, npt.NDArray[Any]]) -> list[int]:
    """Source position of every position of the result along a dimension, -1 = dummy."""
    found: list[int] = []
    start = 0
    for axis, width in sections:
        for element in slots[axis].tolist():
            found += range(start + element * width, start + (element + 1) * width) if element >= 0 else [-1] * width
        start += stock[axis] * width
    return found


def gathered(
    source: npt.NDArray[np.float64],
    dims: dict[int, Sections],
    stock: dict[str, int],
    slots: dict[str, npt.NDArray[Any]],
) -> npt.NDArray[np.float64]:
    """The logical tensor with its elements where the slots say, zeros for dummies."""
    made = source
    for d, sections in dims.items():
        at = np.array(places(sections, stock, slots))
        made = np.take(made, np.maximum(at, 0), axis=d)
        shape = [1] * made.ndim
        shape[d] = len(at)
        made = np.where((at >= 0).reshape(shape), made, 0.0)
    return made
