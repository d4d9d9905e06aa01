"""The hybrid families in plain numpy float64, rank by rank, from rank slices: an oracle independent of the runtime.

The gated delta net is the recurrence of the paper (Gated Delta Networks, eq. 10): S <- aS + k (b (v - (aS)'k))', then
o = S'q, with k and q of length one.
Ranks run one after another and their partial sums are added. Slots may hold anything in any order.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
from hybrid.tiny import FULL, prefix_of, text_of
from layout.shapes import Config
from proof.tiny import F64, Memory

from oddrank.layout.plan import Plan
from oddrank.transform.slice import RankSlice

L2_EPS = 1e-6
Cut = Callable[[int, str, F64], F64]
"""(rank, stored name, the rank's part) -> what the rank uses instead: for simulating a loader's faults."""


def _facts(c: Config) -> SimpleNamespace:
    t = text_of(c)
    rope = t["rope_parameters"]
    return SimpleNamespace(
        at=prefix_of(c),
        kinds=t["layer_types"],
        hidden=t["hidden_size"],
        vocab=t["vocab_size"],
        tied=c["tie_word_embeddings"],
        eps=t["rms_norm_eps"],
        d=t["head_dim"],
        rotary=int(t["head_dim"] * rope["partial_rotary_factor"]),
        theta=rope["rope_theta"],
        k_width=t["linear_key_head_dim"],
        v_width=t["linear_value_head_dim"],
        experts=t.get("num_experts", 0),
        chosen=t.get("num_experts_per_tok", 0),
    )


def logits(
    c: Config,
    plan: Plan,
    weights: dict[str, F64],
    tokens: list[int],
    *,
    cut: Cut | None = None,
    l2_eps: float = L2_EPS,
    gaps: list[float] | None = None,
) -> F64:
    """[tokens, vocab] of one sequence; NaN in vocabulary rows that no rank holds.

    gaps: receives, per router and token, how far (relative to it) the last chosen expert's probability is above the
    best one that was not chosen.
    """
    f = _facts(c)
    f.l2_eps, f.gaps = l2_eps, gaps
    ranks = [_Rank(plan, weights, rank, cut) for rank in range(plan.tp)]
    x = sum(r.embed(f, tokens) for r in ranks)
    for i, kind in enumerate(f.kinds):
        at = f"{f.at}layers.{i}."
        h = _norm(x, weights[f"{at}input_layernorm.weight"], f.eps)
        if kind == FULL:
            x = x + sum(r.attention(f"{at}self_attn.", h, f) for r in ranks)
        else:
            x = x + sum(r.delta_net(f"{at}linear_attn.", h, f) for r in ranks)
        h = _norm(x, weights[f"{at}post_attention_layernorm.weight"], f.eps)
        feed = [r.experts(f"{at}mlp.", h, f) if f.experts else r.mlp(f"{at}mlp.", h) for r in ranks]
        x = x + sum(feed)
    x = _norm(x, weights[f"{f.at}norm.weight"], f.eps)
    head = f"{f.at}embed_tokens.weight" if f.tied else "lm_head.weight"
    out = np.full((len(tokens), f.vocab), np.nan)
    for r in ranks:
        rows = r.slice.source("vocab")
        local = x @ r.weight(head).T
        out[:, rows[rows >= 0]] = local[:, rows >= 0]
    return out


def _norm(x: F64, weight: F64, eps: float) -> F64:
    """RMS norm scaled by 1 + w."""
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * (1.0 + weight)


def _sigmoid(x: F64) -> F64:
    return 1.0 / (1.0 + np.exp(-x))


def _silu(x: F64) -> F64:
    return x * _sigmoid(x)


def _rope(x: F64, rotary: int, theta: float) -> F64:
    """Rotate halves of the first `rotary` of x [heads, tokens, head_dim] by position."""
    angle = np.arange(x.shape[1])[:, None] * theta ** (-np.arange(0, rotary, 2) / rotary)[None, :]
    cos, sin = np.cos(angle), np.sin(angle)
    a, b, rest = x[..., : rotary // 2], x[..., rotary // 2 : rotary], x[..., rotary:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


class _Rank:
    def __init__(self, plan: Plan, weights: dict[str, F64], rank: int, cut: Cut | None) -> None:
        self.slice = RankSlice(plan, Memory(weights), rank)  # type: ignore[arg-type]
        self.rank, self.cut, self.stored = rank, cut, set(weights)
        self._held: dict[str, F64] = {}
        # straight from the plan, so that a term with two owners is added twice
        self.owned = {
            name: sum(owner == rank and pattern == role.name for pattern, owner in plan.owners)
            for role in plan.model.roles
            if role.joins is not None
            for name in role.instances()
        }

    def weight(self, name: str) -> F64:
        if name not in self._held:
            self._held[name] = self._read(name)
        return self._held[name]

    def _read(self, name: str) -> F64:
        out = np.empty(self.slice.shape(name), dtype=np.uint64)
        self.slice.read_into(name, out)
        local = out.view(np.float64)
        return local if self.cut is None else self.cut(self.rank, name, local)

    def column(self, name: str, x: F64) -> F64:
        y = x @ self.weight(f"{name}.weight").T
        return y + self.weight(f"{name}.bias") if f"{name}.bias" in self.stored else y

    def row(self, name: str, x: F64) -> F64:
        y = x @ self.weight(f"{name}.weight").T
        bias = f"{name}.bias"
        return y + self.owned[bias] * self.weight(bias) if bias in self.stored else y

    def embed(self, f: Any, tokens: list[int]) -> F64:
        table, rows = self.weight(f"{f.at}embed_tokens.weight"), self.slice.source("vocab")
        out = np.zeros((len(tokens), f.hidden))
        for i, token in enumerate(tokens):
            for at in np.flatnonzero(rows == token):
                out[i] += table[at]
        return out

    def attention(self, at: str, x: F64, f: Any) -> F64:
        d, t = f.d, len(x)
        queries, keys = self.slice.count("q_heads"), self.slice.count("kv_heads")
        both = self.column(f"{at}q_proj", x).reshape(t, queries, 2 * d)
        q, gate = both[..., :d].transpose(1, 0, 2), both[..., d:]
        k, v = (self.column(f"{at}{p}_proj", x).reshape(t, keys, d).transpose(1, 0, 2) for p in ("k", "v"))
        q = _rope(_norm(q, self.weight(f"{at}q_norm.weight"), f.eps), f.rotary, f.theta)
        k = _rope(_norm(k, self.weight(f"{at}k_norm.weight"), f.eps), f.rotary, f.theta)
        partner = self.slice.partner("q_heads")
        scores = q @ k[partner].transpose(0, 2, 1) / np.sqrt(d)
        scores = np.where(np.triu(np.ones((t, t), dtype=bool), 1), -np.inf, scores)
        p = np.exp(scores - scores.max(-1, keepdims=True, initial=-1e300))
        out = ((p / p.sum(-1, keepdims=True)) @ v[partner]).transpose(1, 0, 2)
        return self.row(f"{at}o_proj", (out * _sigmoid(gate)).reshape(t, queries * d))

    def delta_net(self, at: str, x: F64, f: Any) -> F64:
        t, kw, vw = len(x), f.k_width, f.v_width
        keys, values = self.slice.count("gdn_k_heads"), self.slice.count("gdn_v_heads")
        kernel = self.weight(f"{at}conv1d.weight")[:, 0, :]
        qkv = x @ self.weight(f"{at}in_proj_qkv.weight").T
        taps = kernel.shape[1]
        past = np.concatenate([np.zeros((taps - 1, qkv.shape[1])), qkv])
        mixed = _silu(sum(past[j : j + t] * kernel[:, j] for j in range(taps)))
        q, k = (part.reshape(t, keys, kw) for part in np.split(mixed[:, : 2 * keys * kw], 2, axis=1))
        v = mixed[:, 2 * keys * kw :].reshape(t, values, vw)
        with np.errstate(invalid="ignore"):
            q, k = (p / np.sqrt((p * p).sum(-1, keepdims=True) + f.l2_eps) for p in (q, k))
        partner = self.slice.partner("gdn_v_heads")
        q, k = q[:, partner] / np.sqrt(kw), k[:, partner]
        beta = _sigmoid(x @ self.weight(f"{at}in_proj_b.weight").T)
        step = x @ self.weight(f"{at}in_proj_a.weight").T + self.weight(f"{at}dt_bias")
        with np.errstate(invalid="ignore"):
            decay = np.exp(-np.exp(self.weight(f"{at}A_log")) * np.logaddexp(0.0, step))
        state = np.zeros((values, kw, vw))
        out = np.empty((t, values, vw))
        for i in range(t):
            state = state * decay[i, :, None, None]
            known = np.einsum("hkv,hk->hv", state, k[i])
            state = state + np.einsum("hk,hv->hkv", k[i], beta[i, :, None] * (v[i] - known))
            out[i] = np.einsum("hkv,hk->hv", state, q[i])
        out = out / np.sqrt((out * out).mean(-1, keepdims=True) + f.eps) * self.weight(f"{at}norm.weight")
        z = (x @ self.weight(f"{at}in_proj_z.weight").T).reshape(t, values, vw)
        return self.row(f"{at}out_proj", (out * _silu(z)).reshape(t, values * vw))

    def mlp(self, at: str, x: F64) -> F64:
        return self.row(f"{at}down_proj", _silu(self.column(f"{at}gate_proj", x)) * self.column(f"{at}up_proj", x))

    def experts(self, at: str, x: F64, f: Any) -> F64:
        """Softmax over all experts, the best `chosen` renormalised; the shared expert behind its sigmoid gate."""
        scores = x @ self.weight(f"{at}gate.weight").T
        p = np.exp(scores - scores.max(-1, keepdims=True))
        p /= p.sum(-1, keepdims=True)
        order = np.argsort(-p, axis=-1, kind="stable")
        if f.gaps is not None and self.rank == 0 and p.shape[1] > f.chosen:
            ranked = np.take_along_axis(p, order, axis=-1)
            f.gaps.extend(1.0 - ranked[:, f.chosen] / ranked[:, f.chosen - 1])
        gates = _sigmoid(x @ self.weight(f"{at}shared_expert_gate.weight").T)
        out: F64 = gates * self.mlp(f"{at}shared_expert.", x)
        best = order[:, : f.chosen]
        share = np.zeros_like(p)
        np.put_along_axis(share, best, np.take_along_axis(p, best, axis=-1), axis=-1)
        share /= share.sum(-1, keepdims=True)
        for e in np.unique(best).tolist():
            gate, up, down = self._expert(at, e)
            at_work = np.flatnonzero(share[:, e])
            h = x[at_work]
            out[at_work] += share[at_work, e, None] * ((_silu(h @ gate.T) * (h @ up.T)) @ down.T)
        return out

    def _expert(self, at: str, number: int) -> tuple[F64, F64, F64]:
        """Local rows of gate and up and columns of down, of local expert `number`; a dummy's are zero."""
        stacked = f"{at}experts.gate_up_proj"
        if stacked in self.stored:
            gate, up = np.split(self.weight(stacked)[number], 2)
            return gate, up, self.weight(f"{at}experts.down_proj")[number]
        source = int(self.slice.source("experts")[number])
        parts = [self.weight(f"{at}experts.{max(source, 0)}.{p}_proj.weight") for p in ("gate", "up", "down")]
        gate, up, down = (p if source >= 0 else np.zeros_like(p) for p in parts)
        return gate, up, down
