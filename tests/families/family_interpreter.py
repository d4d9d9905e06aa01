"""Decoder families in plain numpy float64, rank by rank, from rank slices: an oracle independent of the runtime.

Ranks run one after another and their partial sums are added. Slots may hold anything in any order. Which biases, norms,
experts and projections there are is read off the tensors; what tensors do not say is in `family_facts`.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from family_arithmetic import (
    at_chosen,
    attend,
    best,
    clamped,
    convolved,
    delta_rule,
    gelu_tanh,
    in_best_groups,
    rms,
    rope,
    sigmoid,
    silu,
    softmax,
)
from family_facts import Attention, Facts, facts_of
from family_reference import Config
from proof.tiny import F64, Memory

from oddrank.layout.plan import Plan
from oddrank.transform.slice import RankSlice

UNITS: dict[str, Callable[[F64], F64]] = {"silu": silu, "gelu": gelu_tanh}
L2_EPS = 1e-6


def logits(
    c: Config, plan: Plan, weights: dict[str, F64], tokens: list[int], *, gaps: list[float] | None = None
) -> F64:
    """[tokens, vocab] of one sequence; NaN in vocabulary rows that no rank holds. gaps: receives how far each last
    choice of a router is above the best that was not chosen."""
    f = facts_of(c)
    ranks = [_Rank(plan, weights, rank, f) for rank in range(plan.tp)]
    model = _Model(f, ranks, weights, gaps)
    x = sum(r.embed(tokens) for r in ranks) * f.embed_scale
    extra = model.per_layer_inputs(tokens, x)
    for i in range(f.layers):
        x = model.layer(i, x, extra)
    x = model.norm("norm", x)
    head = f"{f.at}embed_tokens.weight" if f.tied else "lm_head.weight"
    out = np.full((len(tokens), f.vocab), np.nan)
    for r in ranks:
        rows = r.slice.source("vocab")
        local = x @ r.weight(head).T
        out[:, rows[rows >= 0]] = local[:, rows >= 0]
    return out if f.softcap is None else np.tanh(out / f.softcap) * f.softcap


class _Model:
    """What all ranks compute together: norms of the residual stream, sums, routing."""

    def __init__(self, f: Facts, ranks: list[_Rank], weights: dict[str, F64], gaps: list[float] | None) -> None:
        self.f, self.ranks, self.weights, self.gaps = f, ranks, weights, gaps
        self.kept: dict[int, list[dict[str, F64]]] = {}

    def norm(self, name: str, x: F64) -> F64:
        return rms(x, self.f.offset + self.weights[f"{self.f.at}{name}.weight"], self.f.eps)

    def has(self, name: str) -> bool:
        return f"{self.f.at}{name}.weight" in self.weights

    def layer(self, i: int, x: F64, extra: F64 | None) -> F64:
        at = f"layers.{i}."
        mixed = self.mix(i, self.norm(f"{at}input_layernorm", x))
        if not self.has(f"{at}pre_feedforward_layernorm"):
            x = x + mixed
            return x + self.feed(f"{self.f.at}{at}", self.norm(f"{at}post_attention_layernorm", x))
        x = x + self.norm(f"{at}post_attention_layernorm", mixed)
        fed = self.feed(f"{self.f.at}{at}", self.norm(f"{at}pre_feedforward_layernorm", x))
        if self.has(f"{at}post_feedforward_layernorm_1"):
            beside = self.beside(f"{self.f.at}{at}", x, self.norm(f"{at}pre_feedforward_layernorm_2", x))
            fed = self.norm(f"{at}post_feedforward_layernorm_1", fed)
            fed = fed + self.norm(f"{at}post_feedforward_layernorm_2", beside)
        x = x + self.norm(f"{at}post_feedforward_layernorm", fed)
        if extra is not None:
            gate, back = (self.weights[f"{self.f.at}{at}{n}.weight"]
                          for n in ("per_layer_input_gate", "per_layer_projection"))  # fmt: skip
            fed = (UNITS[self.f.unit](x @ gate.T) * extra[:, i]) @ back.T
            x = x + self.norm(f"{at}post_per_layer_input_norm", fed)
        return x * self.weights.get(f"{self.f.at}{at}layer_scalar", 1.0)

    def per_layer_inputs(self, tokens: list[int], x: F64) -> F64 | None:
        """Gemma 4's second embedding, [tokens, layers, width]: of the token, and of the first embedding."""
        table = self.weights.get(f"{self.f.at}embed_tokens_per_layer.weight")
        if table is None:
            return None
        width = table.shape[1] // self.f.layers
        shape = (len(tokens), self.f.layers, width)
        projection = self.weights[f"{self.f.at}per_layer_model_projection.weight"]
        first = self.norm("per_layer_projection_norm", (x @ projection.T / np.sqrt(x.shape[1])).reshape(shape))
        return (first + table[tokens].reshape(shape) * np.sqrt(width)) / np.sqrt(2)

    def beside(self, at: str, x: F64, h: F64) -> F64:
        """Gemma 4's experts beside the MLP: routed by the normed and scaled input, each expert's output scaled."""
        total = np.zeros_like(x)
        for r in self.ranks:
            plain = rms(x, 1.0, self.f.eps) * r.weight(f"{at}router.scale") / np.sqrt(x.shape[1])
            p = softmax(plain @ r.weight(f"{at}router.proj.weight").T)
            share = at_chosen(p, best(p, self.f.chosen, self.gaps if r is self.ranks[0] else None))
            share = share / share.sum(-1, keepdims=True) * r.weight(f"{at}router.per_expert_scale")
            total += r.experts(at, h, share)
        return total

    def mix(self, i: int, x: F64) -> F64:
        kind, at = self.f.attention[i], f"{self.f.at}layers.{i}."
        if kind is None:
            return sum(r.delta_net(f"{at}linear_attn.", x) for r in self.ranks)
        at = f"{at}self_attn."
        if kind.latent:
            return sum(r.latent_attention(at, x, kind) for r in self.ranks)
        heads = [r.heads(at, x, kind) for r in self.ranks]
        if kind.across:
            self.norm_across(at, heads, kind)
        for rank, h in enumerate(heads):
            h |= {n: rope(h[n], kind.rotary, kind.theta) for n in "qk" if n in h}
            if kind.borrows is not None:
                h |= {n: self.kept[kind.borrows][rank][n] for n in "kv"}
        self.kept[i] = heads
        return sum(r.attention(at, h, kind) for r, h in zip(self.ranks, heads, strict=True))

    def norm_across(self, at: str, heads: list[dict[str, F64]], kind: Attention) -> None:
        """A norm over all heads of all ranks together. An executor that handles it counts each head once; another takes
        the mean over every slot it has."""
        for part, axis in (("q", kind.queries), ("k", kind.keys)):
            slots = [r.slice.source(axis) for r in self.ranks]
            squares = [(h[part] ** 2).sum(-1) for h in heads]  # [slots, tokens]
            if self.ranks[0].handles("rms_norm"):
                count = np.bincount(np.concatenate(slots)[np.concatenate(slots) >= 0])
                share = [np.where(s < 0, 0.0, 1.0 / count[s]) for s in slots]
                number = len(count)
            else:
                share, number = [np.ones(len(s)) for s in slots], sum(len(s) for s in slots)
            total = sum(s @ sq for s, sq in zip(share, squares, strict=True))
            scale = 1.0 / np.sqrt(total / (number * kind.width) + self.f.eps)
            for r, h in zip(self.ranks, heads, strict=True):
                weight = r.weight(f"{at}{part}_norm.weight").reshape(-1, 1, kind.width)
                h[part] = h[part] * scale[None, :, None] * weight

    def feed(self, at: str, x: F64) -> F64:
        block = next((b for b in (f"{at}mlp.", f"{at}block_sparse_moe.") if self._router(b)), None)
        if block is None:
            return sum(r.mlp(f"{at}mlp.", x) for r in self.ranks)
        return sum(r.experts(block, x, share) for r, share in zip(self.ranks, self.route(block, x), strict=True))

    def _router(self, block: str) -> str | None:
        names = (f"{block}{name}" for name in ("gate", "router"))
        return next((n for n in names if f"{n}.weight" in self.weights), None)

    def route(self, block: str, x: F64) -> list[F64]:
        """[tokens, experts] on every rank, which routes by itself: each token's weight of each expert."""
        return [self._route(block, x, r, self.gaps if r is self.ranks[0] else None) for r in self.ranks]

    def _route(self, block: str, x: F64, rank: _Rank, gaps: list[float] | None) -> F64:
        f, name = self.f, self._router(block)
        scores = x @ rank.weight(f"{name}.weight").T
        if f.router == "softmax of the best":
            scores = scores + rank.weight(f"{name}.bias")
            share = at_chosen(np.exp(scores - scores.max(-1, keepdims=True)), best(scores, f.chosen, gaps))
            return share / share.sum(-1, keepdims=True)
        p = sigmoid(scores) if f.router == "sigmoid" else softmax(scores)
        bias = next((b for b in (f"{name}.e_score_correction_bias", f"{block}e_score_correction_bias")
                     if b in self.weights), None)  # fmt: skip
        ranked = p if bias is None else p + rank.weight(bias)
        if f.groups > 1:
            ranked = in_best_groups(ranked, f.groups, f.kept_groups, f.group_top, gaps)
        share = at_chosen(p, best(ranked, f.chosen, gaps))
        if f.renormalised:
            share = share / share.sum(-1, keepdims=True)
        return share * f.routed_scale


class _Rank:
    def __init__(self, plan: Plan, weights: dict[str, F64], rank: int, f: Facts) -> None:
        self.slice, self.f, self.plan = RankSlice(plan, Memory(weights), rank), f, plan  # type: ignore[arg-type]
        self.stored = set(weights)
        # straight from the plan, so that a term with two owners is added twice
        self.owned = {
            name: sum(owner == rank and pattern == role.name for pattern, owner in plan.owners)
            for role in plan.model.roles
            if role.joins is not None
            for name in role.instances()
        }

    def handles(self, operation: str) -> bool:
        return operation in self.plan.executor_facts().handles

    def weight(self, name: str) -> F64:
        out = np.empty(self.slice.shape(name), dtype=np.uint64)
        self.slice.read_into(name, out)
        return out.view(np.float64)

    def maybe(self, name: str) -> F64 | None:
        return self.weight(name) if name in self.stored else None

    def column(self, name: str, x: F64) -> F64:
        y, bias = x @ self.weight(f"{name}.weight").T, self.maybe(f"{name}.bias")
        return y if bias is None else y + bias

    def row(self, name: str, x: F64) -> F64:
        y, bias = x @ self.weight(f"{name}.weight").T, self.maybe(f"{name}.bias")
        return y if bias is None else y + self.owned[f"{name}.bias"] * bias

    def embed(self, tokens: list[int]) -> F64:
        table, rows = self.weight(f"{self.f.at}embed_tokens.weight"), self.slice.source("vocab")
        out = np.zeros((len(tokens), table.shape[1]))
        for i, token in enumerate(tokens):
            for row in np.flatnonzero(rows == token):
                out[i] += table[row]
        return out

    def heads(self, at: str, x: F64, a: Attention) -> dict[str, F64]:
        """Queries, keys and values [slots, tokens, width], and an output gate where q_proj has one."""
        q, kv, t = self.slice.count(a.queries), self.slice.count(a.keys), len(x)

        def split(rows: F64, count: int, width: int) -> F64:
            return rows.reshape(t, count, width).transpose(1, 0, 2)

        if f"{at}qkv_proj.weight" in self.stored:
            parts = np.split(self.column(f"{at}qkv_proj", x), np.cumsum([q, kv]) * a.width, axis=1)
            return {n: split(p, c, a.width) for n, p, c in zip("qkv", parts, (q, kv, kv), strict=True)}
        stored = [n for n in "kv" if a.borrows is None and f"{at}{n}_proj.weight" in self.stored]
        made = {n: split(self.column(f"{at}{n}_proj", x), kv, a.width) for n in stored}
        if stored == ["k"]:
            made["v"] = made["k"]
        both = split(self.column(f"{at}q_proj", x), q, a.width * (2 if a.gated else 1))
        made |= {"q": both[..., : a.width], "gate": both[..., a.width :]}
        if not a.across:
            for n in "qk":
                weight = self.maybe(f"{at}{n}_norm.weight")
                if weight is not None and n in made:
                    made[n] = rms(made[n], self.f.offset + weight, self.f.eps)
        if a.normed_values and "v" in made:
            made["v"] = rms(made["v"], 1.0, self.f.eps)
        return made

    def attention(self, at: str, h: dict[str, F64], a: Attention) -> F64:
        partner, sinks = self.slice.partner(a.queries), self.maybe(f"{at}sinks")
        out = attend(h["q"], h["k"][partner], h["v"][partner], a.scale, a.window, sinks)
        if a.gated:
            out = out * sigmoid(h["gate"])
        return self.row(f"{at}o_proj", out.transpose(1, 0, 2).reshape(out.shape[1], -1))

    def latent_attention(self, at: str, x: F64, a: Attention) -> F64:
        """MLA (DeepSeek-V2): a latent that all heads share, and one rotary key for all of them."""
        count, t, turned, plain = self.slice.count(a.queries), len(x), a.rotary, a.width - a.rotary
        if f"{at}q_a_proj.weight" in self.stored:
            low = rms(self.column(f"{at}q_a_proj", x), self.weight(f"{at}q_a_layernorm.weight"), self.f.eps)
            q = self.column(f"{at}q_b_proj", low)
        else:
            q = self.column(f"{at}q_proj", x)
        q = q.reshape(t, count, a.width).transpose(1, 0, 2)
        latent = self.column(f"{at}kv_a_proj_with_mqa", x)
        latent, shared = latent[:, :-turned], latent[None, :, -turned:]
        latent = rms(latent, self.weight(f"{at}kv_a_layernorm.weight"), self.f.eps)
        kv = self.column(f"{at}kv_b_proj", latent).reshape(t, count, plain + a.value).transpose(1, 0, 2)
        q_turned, k_turned = (rope(part, turned, a.theta, pairs=a.pairs) for part in (q[..., plain:], shared))
        q = np.concatenate([q[..., :plain], q_turned], axis=-1)
        k = np.concatenate([kv[..., :plain], np.broadcast_to(k_turned, q_turned.shape)], axis=-1)
        out = attend(q, k, kv[..., plain:], a.scale, a.window)
        return self.row(f"{at}o_proj", out.transpose(1, 0, 2).reshape(t, -1))

    def delta_net(self, at: str, x: F64) -> F64:
        """Interleaved projections are, in a rank's slice, section by section where ranks may be ragged."""
        f, t = self.f, len(x)
        keys, values = self.slice.count("gdn_k_heads"), self.slice.count("gdn_v_heads")
        kw, vw = f.net
        qkvz, ba = (x @ self.weight(f"{at}{name}.weight").T for name in ("in_proj_qkvz", "in_proj_ba"))
        if self.plan.executor_facts().equal_ranks:
            g = values // max(1, keys)
            by_key = qkvz.reshape(t, keys, 2 * kw + 2 * g * vw)
            q, k, v, z = np.split(by_key, np.cumsum([kw, kw, g * vw]), axis=2)
            b, a = np.split(ba.reshape(t, keys, 2 * g), 2, axis=2)
        else:
            q, k, v, z = np.split(qkvz, np.cumsum([keys * kw, keys * kw, values * vw]), axis=1)
            b, a = np.split(ba, 2, axis=1)
        q, k, v, z, b, a = (part.reshape(t, -1) for part in (q, k, v, z, b, a))
        mixed = silu(convolved(np.concatenate([q, k, v], axis=1), self.weight(f"{at}conv1d.weight")[:, 0, :]))
        q, k, v = np.split(mixed, np.cumsum([keys * kw, keys * kw]), axis=1)
        q, k = (p.reshape(t, keys, kw) for p in (q, k))
        q, k = (p / np.sqrt((p * p).sum(-1, keepdims=True) + L2_EPS) for p in (q, k))
        partner = self.slice.partner("gdn_v_heads")
        decay = np.exp(-np.exp(self.weight(f"{at}A_log")) * np.logaddexp(0.0, a + self.weight(f"{at}dt_bias")))
        out = delta_rule(
            q[:, partner] / np.sqrt(kw), k[:, partner], v.reshape(t, values, vw), sigmoid(b), decay
        )
        out = rms(out, self.weight(f"{at}norm.weight"), f.eps) * silu(z.reshape(t, values, vw))
        return self.row(f"{at}out_proj", out.reshape(t, -1))

    def mlp(self, at: str, x: F64) -> F64:
        act = UNITS[self.f.unit]
        if f"{at}gate_up_proj.weight" in self.stored:
            gate, up = np.split(self.column(f"{at}gate_up_proj", x), 2, axis=1)
        else:
            gate, up = self.column(f"{at}gate_proj", x), self.column(f"{at}up_proj", x)
        return self.row(f"{at}down_proj", act(gate) * up)

    def experts(self, block: str, x: F64, share: F64) -> F64:
        """Routed experts, and a shared one where there is one."""
        out = np.zeros_like(x)
        for e in np.flatnonzero(share.any(axis=0)).tolist():
            on = np.flatnonzero(share[:, e])
            out[on] += share[on, e, None] * self._expert(block, e, x[on])
        if f"{block}shared_experts.down_proj.weight" in self.stored:
            out += self.mlp(f"{block}shared_experts.", x)
        if f"{block}shared_expert.down_proj.weight" in self.stored:
            out += sigmoid(x @ self.weight(f"{block}shared_expert_gate.weight").T) * self.mlp(
                f"{block}shared_expert.", x
            )
        return out

    def _expert(self, block: str, number: int, x: F64) -> F64:
        """Local expert `number` of x [tokens, hidden]; a dummy's output is zero."""
        at, act, e = f"{block}experts.", UNITS[self.f.unit], int(self.slice.source("experts")[number])
        if e < 0:
            return np.zeros_like(x)
        if self.f.clamp is not None:  # stacked, transposed, gate and up interleaved, with biases
            both = x @ self.weight(f"{at}gate_up_proj")[number] + self.weight(f"{at}gate_up_proj_bias")[number]
            hidden = clamped(both[:, 0::2], both[:, 1::2], *self.f.clamp)
            bias = f"{at}down_proj_bias"
            return hidden @ self.weight(f"{at}down_proj")[number] + self.owned[bias] * self.weight(bias)[number]
        if f"{at}gate_up_proj" in self.stored:
            gate, up = np.split(x @ self.weight(f"{at}gate_up_proj")[number].T, 2, axis=1)
            return (act(gate) * up) @ self.weight(f"{at}down_proj")[number].T
        names = ("w1", "w3", "w2") if f"{at}{e}.w1.weight" in self.stored else ("gate_proj", "up_proj", "down_proj")
        gate, up, down = (self.weight(f"{at}{e}.{n}.weight") for n in names)
        return (act(x @ gate.T) * (x @ up.T)) @ down.T
