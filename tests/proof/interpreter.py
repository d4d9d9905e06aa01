"""The four families in plain numpy float64, rank by rank, from rank slices: an oracle independent of the runtime.

Ranks run one after another and their partial sums are added. Slots may hold anything in any order.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from proof.tiny import F64, Memory, interpreter_facts

from oddrank.layout.plan import Plan
from oddrank.transform.slice import RankSlice


def logits(c: dict[str, Any], plan: Plan, weights: dict[str, F64], tokens: list[int]) -> F64:
    """[tokens, vocab] of one sequence; NaN in vocabulary rows that no rank holds."""
    facts = interpreter_facts(c)
    ranks = [_Rank(plan, weights, rank) for rank in range(plan.tp)]
    x = sum(r.embed(tokens, facts.hidden) for r in ranks)
    for i in range(facts.layers):
        at = f"model.layers.{i}."
        h = _norm(x, weights[f"{at}input_layernorm.weight"], facts.eps)
        x = x + sum(r.attention(f"{at}self_attn.", h, facts) for r in ranks)
        h = _norm(x, weights[f"{at}post_attention_layernorm.weight"], facts.eps)
        x = x + sum(r.mlp(f"{at}mlp.", h) for r in ranks)
    x = _norm(x, weights["model.norm.weight"], facts.eps)
    head = "model.embed_tokens.weight" if facts.tied else "lm_head.weight"
    out = np.full((len(tokens), facts.vocab), np.nan)
    for r in ranks:
        rows = r.slice.source("vocab")
        local = x @ r.weight(head).T
        out[:, rows[rows >= 0]] = local[:, rows >= 0]
    return out


def _norm(x: F64, weight: F64, eps: float) -> F64:
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight


def _rope(x: F64, theta: float) -> F64:
    """Rotate halves of x [heads, tokens, head_dim] by position."""
    d = x.shape[-1]
    angle = np.arange(x.shape[1])[:, None] * theta ** (-np.arange(0, d, 2) / d)[None, :]
    cos, sin = np.cos(angle), np.sin(angle)
    a, b = x[..., : d // 2], x[..., d // 2 :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


class _Rank:
    def __init__(self, plan: Plan, weights: dict[str, F64], rank: int) -> None:
        self.slice = RankSlice(plan, Memory(weights), rank)  # type: ignore[arg-type]
        self.stored = set(weights)
        # straight from the plan, so that a term with two owners is added twice
        self.owned = {
            name: sum(owner == rank and pattern == role.name for pattern, owner in plan.owners)
            for role in plan.model.roles
            if role.joins is not None
            for name in role.instances()
        }

    def weight(self, name: str) -> F64:
        out = np.empty(self.slice.shape(name), dtype=np.uint64)
        self.slice.read_into(name, out)
        return out.view(np.float64)

    def column(self, name: str, x: F64) -> F64:
        y = x @ self.weight(f"{name}.weight").T
        return y + self.weight(f"{name}.bias") if f"{name}.bias" in self.stored else y

    def row(self, name: str, x: F64) -> F64:
        y = x @ self.weight(f"{name}.weight").T
        bias = f"{name}.bias"
        return y + self.owned[bias] * self.weight(bias) if bias in self.stored else y

    def embed(self, tokens: list[int], hidden: int) -> F64:
        table, rows = self.weight("model.embed_tokens.weight"), self.slice.source("vocab")
        out = np.zeros((len(tokens), hidden))
        for i, token in enumerate(tokens):
            for at in np.flatnonzero(rows == token):
                out[i] += table[at]
        return out

    def attention(self, at: str, x: F64, facts: Any) -> F64:
        d, t = facts.head_dim, len(x)
        q, k, v = (self.column(f"{at}{p}_proj", x).reshape(t, -1, d).transpose(1, 0, 2) for p in ("q", "k", "v"))
        if facts.qk_norm:
            q = _norm(q, self.weight(f"{at}q_norm.weight"), facts.eps)
            k = _norm(k, self.weight(f"{at}k_norm.weight"), facts.eps)
        q, k = _rope(q, facts.theta), _rope(k, facts.theta)
        partner = self.slice.partner("q_heads")
        k, v = k[partner], v[partner]
        scores = q @ k.transpose(0, 2, 1) / np.sqrt(d)
        scores = np.where(_hidden(t, facts.window)[None], -np.inf, scores)
        p = np.exp(scores - scores.max(-1, keepdims=True, initial=-1e300))
        out = (p / p.sum(-1, keepdims=True)) @ v
        return self.row(f"{at}o_proj", out.transpose(1, 0, 2).reshape(t, len(partner) * d))

    def mlp(self, at: str, x: F64) -> F64:
        gate = self.column(f"{at}gate_proj", x)
        return self.row(f"{at}down_proj", gate / (1.0 + np.exp(-gate)) * self.column(f"{at}up_proj", x))


def _hidden(t: int, window: int | None) -> npt.NDArray[np.bool_]:
    i, j = np.arange(t)[:, None], np.arange(t)[None, :]
    mask = j > i
    return mask if window is None else mask | (j <= i - window)
