"""The arithmetic of decoder families in plain numpy float64: norms, rotary positions, attention, routing."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from proof.tiny import F64


def rms(x: F64, weight: F64 | float, eps: float) -> F64:
    out: F64 = x / np.sqrt((x * x).mean(-1, keepdims=True) + eps) * weight
    return out


def sigmoid(x: F64) -> F64:
    return 1.0 / (1.0 + np.exp(-x))


def silu(x: F64) -> F64:
    return x * sigmoid(x)


def gelu_tanh(x: F64) -> F64:
    return 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3)))


def clamped(gate: F64, up: F64, alpha: float, limit: float) -> F64:
    """gpt-oss's unit: both sides clamped, and one added to `up`."""
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    return (up + 1.0) * gate * sigmoid(alpha * gate)


def softmax(x: F64) -> F64:
    p = np.exp(x - x.max(-1, keepdims=True, initial=-1e300))
    out: F64 = p / p.sum(-1, keepdims=True)
    return out


def rope(x: F64, rotary: int, theta: float, *, pairs: bool = False) -> F64:
    """Rotate the first `rotary` of x [heads, tokens, width] by position: its halves, or with `pairs` its neighbours."""
    angle = np.arange(x.shape[1])[:, None] * theta ** (-np.arange(0, rotary, 2) / rotary)[None, :]
    cos, sin = np.cos(angle), np.sin(angle)
    turned, rest = x[..., :rotary], x[..., rotary:]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if pairs else np.split(turned, 2, axis=-1)
    # queries and keys are reordered alike, which leaves their products
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1)


def hidden_from(t: int, window: int | None) -> npt.NDArray[np.bool_]:
    i, j = np.arange(t)[:, None], np.arange(t)[None, :]
    return (j > i) if window is None else (j > i) | (j <= i - window)


def attend(q: F64, k: F64, v: F64, scale: float, window: int | None, sinks: F64 | None = None) -> F64:
    """[heads, tokens, width] each, one key head for every query head. sinks [heads]: a score that takes its share of
    the probability and has no value."""
    scores = np.where(hidden_from(q.shape[1], window)[None], -np.inf, q @ k.transpose(0, 2, 1) * scale)
    if sinks is None:
        return softmax(scores) @ v
    more = np.broadcast_to(sinks[:, None, None], (*scores.shape[:2], 1))
    return softmax(np.concatenate([scores, more], axis=-1))[..., :-1] @ v


def best(scores: F64, count: int, gaps: list[float] | None) -> npt.NDArray[np.int64]:
    """The `count` best of each row; gaps: receives how far the last of them is above the best of the others."""
    order = np.argsort(-scores, axis=-1, kind="stable")
    if gaps is not None and scores.shape[1] > count:
        ranked = np.take_along_axis(scores, order, axis=-1)
        gaps.extend((ranked[:, count - 1] - ranked[:, count]).tolist())
    return order[:, :count]


def at_chosen(values: F64, chosen: npt.NDArray[np.int64]) -> F64:
    """`values` where chosen, zero elsewhere."""
    out = np.zeros_like(values)
    np.put_along_axis(out, chosen, np.take_along_axis(values, chosen, axis=-1), axis=-1)
    return out


def in_best_groups(scores: F64, groups: int, kept: int, top: int, gaps: list[float] | None) -> F64:
    """-inf outside the `kept` groups of experts whose best `top` have the largest sum; all as they are where they make
    no whole groups."""
    if scores.shape[1] % groups:
        return scores
    by_group = scores.reshape(len(scores), groups, -1)
    worth = np.sort(by_group, axis=-1)[..., -top:].sum(-1)
    keep = np.zeros_like(worth, dtype=bool)
    np.put_along_axis(keep, best(worth, kept, gaps), True, axis=-1)
    return np.where(keep[..., None], by_group, -np.inf).reshape(scores.shape)


def delta_rule(q: F64, k: F64, v: F64, beta: F64, decay: F64) -> F64:
    """Gated Delta Networks, eq. 10, [tokens, heads, width]: S <- aS + k (b (v - (aS)'k))', then o = S'q."""
    state = np.zeros((v.shape[1], k.shape[2], v.shape[2]))
    out = np.empty_like(v)
    for i in range(len(v)):
        state = state * decay[i, :, None, None]
        known = np.einsum("hkv,hk->hv", state, k[i])
        state = state + np.einsum("hk,hv->hkv", k[i], beta[i, :, None] * (v[i] - known))
        out[i] = np.einsum("hkv,hk->hv", state, q[i])
    return out


def convolved(x: F64, kernel: F64) -> F64:
    """[tokens, channels] by a causal kernel [channels, taps]."""
    taps = kernel.shape[1]
    past = np.concatenate([np.zeros((taps - 1, x.shape[1])), x])
    return sum((past[j : j + len(x)] * kernel[:, j] for j in range(taps)), np.zeros_like(x))
