"""Tiny random models of every family, their float64 logits by transformers, and slices in any layout.

`TinySlice` answers as a rank slice does and is written from the state dict alone, so that the runtime is tested
without the code that cuts real checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from types import MethodType
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from numpy.random import Generator

from oddrank.runtime.loader import load
from oddrank.runtime.models import build_model
from oddrank.runtime.models.llama import Llama
from oddrank.runtime.parallel import Group, LocalGroup
from oddrank.runtime.precision import Precision
from oddrank.transform.slice import StoredMatrix

VOCAB = 53
TOKENS = [3, 17, 52, 0, 17, 41, 8, 29, 11]

CASES: dict[str, dict[str, Any]] = {
    "llama": {
        "hidden_size": 27, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 6, "intermediate_size": 23,
        "attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False,
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 500.0, "factor": 4.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 16,
        },
    },
    "mistral": {
        "hidden_size": 20, "num_attention_heads": 10, "num_key_value_heads": 5, "head_dim": 4, "intermediate_size": 17,
        "tie_word_embeddings": True, "sliding_window": 4,
    },
    "qwen2": {
        "hidden_size": 28, "num_attention_heads": 7, "num_key_value_heads": 1, "intermediate_size": 19,
        "tie_word_embeddings": False, "use_sliding_window": True, "sliding_window": 3, "max_window_layers": 1,
    },
    "qwen3": {
        "hidden_size": 22, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "intermediate_size": 13,
        "tie_word_embeddings": True, "attention_bias": True,
    },
    "seed_oss": {
        "hidden_size": 25, "num_attention_heads": 6, "num_key_value_heads": 3, "head_dim": 6, "intermediate_size": 21,
        "tie_word_embeddings": False, "attention_out_bias": True,
    },
}  # fmt: skip


class Tiny(NamedTuple):
    """config: config.json's content. state: stored tensors by name, float64. hf: the transformers model."""

    family: str
    config: dict[str, Any]
    state: dict[str, torch.Tensor]
    hf: Any


def _wide_norm(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.weight * x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.variance_epsilon)


def tiny(family: str, seed: int = 0, **changes: Any) -> Tiny:
    """A model in float64 throughout: transformers' norms, which go through fp32, are widened; its rotary tables
    stay fp32, as ours do; its sdpa attention has no fp32 in it."""
    values = {"vocab_size": VOCAB, "max_position_embeddings": 64, **CASES[family], **changes}
    config = transformers.AutoConfig.for_model(family, num_hidden_layers=2, rms_norm_eps=1e-5, **values)
    torch.manual_seed(seed)
    hf = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float64, attn_implementation="sdpa")
    with torch.no_grad():
        for parameter in hf.parameters():
            parameter.copy_(torch.randn(parameter.shape, dtype=torch.float64) * 0.4)
    for module in hf.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(_wide_norm, module)
    state = {name: t.detach() for name, t in hf.state_dict().items()}
    if values.get("tie_word_embeddings"):
        del state["lm_head.weight"]
    return Tiny(family, config.to_dict(), state, hf.eval())


@torch.no_grad()
def reference(model: Tiny, tokens: Sequence[int] = TOKENS) -> torch.Tensor:
    """transformers' logits [tokens, vocab]."""
    out: torch.Tensor = model.hf(torch.tensor([list(tokens)])).logits[0]
    return out


# -- layouts -----------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """slots[rank][axis]: source elements, -1 = dummy. partner[rank]: local KV slot of each query slot.
    owner: the rank that adds replicated terms."""

    slots: list[dict[str, np.ndarray]]
    partner: list[np.ndarray]
    owner: int


def ragged(model: Tiny, tp: int) -> Layout:
    """Every axis cut in order; each rank holds the KV heads that its queries touch."""
    sizes, group = _sizes(model)
    slots: list[dict[str, np.ndarray]] = []
    partner = []
    for rank in range(tp):
        mine = {a: np.array_split(np.arange(n), tp)[rank] for a, n in sizes.items() if a != "kv_heads"}
        touched = np.unique(mine["q_heads"] // group)
        slots.append({**mine, "kv_heads": touched})
        partner.append(np.searchsorted(touched, mine["q_heads"] // group))
    return Layout(slots, partner, owner=tp - 1)


def padded(model: Tiny, tp: int) -> Layout:
    """Equal ranks: dummy KV heads with all their queries, dummy channels and vocabulary rows at the end."""
    sizes, group = _sizes(model)
    per = {axis: -(-n // tp) for axis, n in sizes.items()}
    per["q_heads"] = per["kv_heads"] * group
    slots = []
    for rank in range(tp):
        at = {axis: np.arange(rank * n, (rank + 1) * n) for axis, n in per.items()}
        slots.append({axis: np.where(a < sizes[axis], a, -1) for axis, a in at.items()})
    return Layout(slots, [np.arange(per["q_heads"]) // group] * tp, owner=0)


def scattered(model: Tiny, tp: int, seed: int = 1) -> Layout:
    """Every unit anywhere, dummies anywhere, KV heads repeated, ranks of any size, empty ones too."""
    rng = np.random.default_rng([seed, tp])
    sizes, group = _sizes(model)
    slots: list[dict[str, np.ndarray]] = [{} for _ in range(tp)]
    for axis in ("q_heads", "mlp", "vocab"):
        where = rng.integers(0, tp, sizes[axis])
        for rank in range(tp):
            slots[rank][axis] = _mixed(rng, np.flatnonzero(where == rank))
    partner = []
    for rank in range(tp):
        q = slots[rank]["q_heads"]
        needed = np.unique(q[q >= 0] // group)
        kv = _mixed(rng, np.concatenate([needed, rng.choice(needed, len(needed) and 1)]))
        if len(q) and not len(kv):
            kv = np.array([-1])
        slots[rank]["kv_heads"] = kv
        partner.append(
            np.array([rng.choice(np.flatnonzero(kv == h // group) if h >= 0 else len(kv)) for h in q], np.int64)
        )
    return Layout(slots, partner, owner=int(rng.integers(tp)))


LAYOUTS = {"ragged": ragged, "padded": padded, "scattered": scattered}


def _mixed(rng: Generator, elements: np.ndarray) -> np.ndarray:
    return rng.permutation(np.concatenate([elements, np.full(rng.integers(0, 3), -1)])).astype(np.int64)


def _sizes(model: Tiny) -> tuple[dict[str, int], int]:
    c = model.config
    q, kv = c["num_attention_heads"], c["num_key_value_heads"]
    return {"q_heads": q, "kv_heads": kv, "mlp": c["intermediate_size"], "vocab": c["vocab_size"]}, q // kv


# -- slices ------------------------------------------------------------------------------------------------

_CUTS: list[tuple[str, str, int]] = [
    (r"q_proj\.(weight|bias)", "q_heads", 0),
    (r"[kv]_proj\.(weight|bias)", "kv_heads", 0),
    (r"o_proj\.weight", "q_heads", 1),
    (r"(gate|up)_proj\.(weight|bias)", "mlp", 0),
    (r"down_proj\.weight", "mlp", 1),
    (r"(embed_tokens|lm_head)\.weight", "vocab", 0),
]
_NAMES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32", torch.float64: "F64"}
_WORDS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


class TinySlice:
    """One rank of a layout, drawn from a state dict."""

    def __init__(self, model: Tiny, layout: Layout, rank: int, dtype: torch.dtype = torch.float64) -> None:
        self.rank, self.tp = rank, len(layout.slots)
        self._slots, self._partner, self._owner = layout.slots[rank], layout.partner[rank], layout.owner
        self._tensors = {name: self._cut(model, name, t).to(dtype) for name, t in model.state.items()}
        self._dtype = dtype

    def _cut(self, model: Tiny, name: str, tensor: torch.Tensor) -> torch.Tensor:
        for pattern, axis, dim in _CUTS:
            if re.search(pattern, name):
                units = torch.from_numpy(self._slots[axis])
                width = tensor.shape[dim] // _sizes(model)[0][axis]
                index = (units[:, None] * width + torch.arange(width)).flatten()
                cut = tensor.index_select(dim, index.clamp(min=0))
                dummy = (units < 0).repeat_interleave(width)
                return cut.masked_fill(dummy if cut.dim() == 1 or dim else dummy[:, None], 0)
        return tensor

    def count(self, axis: str) -> int:
        return len(self._slots[axis])

    def source(self, axis: str) -> np.ndarray:
        return self._slots[axis]

    def partner(self, axis: str) -> np.ndarray:
        assert axis == "q_heads"
        return self._partner

    def owns(self, name: str) -> bool:
        return self.rank == self._owner

    def matrix(self, name: str) -> StoredMatrix:
        return StoredMatrix("dense", {".weight": f"{name}.weight"}, {".weight": (1, 1)})

    def part_of(self, name: str) -> None:
        return None

    def names(self) -> list[str]:
        return list(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def dtype(self, name: str) -> str:
        return _NAMES[self._dtype]

    def read_into(self, name: str, out: np.ndarray) -> None:
        self.read_rows_into(name, 0, out)

    def read_rows_into(self, name: str, start: int, out: np.ndarray) -> None:
        rows = self._tensors[name][start : start + len(out)]
        out[...] = rows.contiguous().view(_WORDS[self._dtype.itemsize]).numpy().view(out.dtype)


def rank_model(
    model: Tiny, layout: Layout, group: Group, dtype: str = "fp64", stored: torch.dtype = torch.float64
) -> Llama:
    """The runtime's model of one rank, loaded."""
    part = TinySlice(model, layout, group.rank, stored)
    made = build_model(model.family, model.config, part, group, Precision.of(dtype))
    load(made, part)
    return made


def on_ranks(model: Tiny, layout: Layout, work: Any, dtype: str = "fp64") -> list[Any]:
    """work(the rank's model) as every rank, in lockstep."""
    with torch.inference_mode():
        return LocalGroup.run(len(layout.slots), lambda group: work(rank_model(model, layout, group, dtype)))
