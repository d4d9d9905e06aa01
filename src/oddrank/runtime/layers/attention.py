"""Grouped-query attention over a cache, for any map from query slots to KV slots."""

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor

from oddrank.native.attention import decode_attention
from oddrank.native.operations import compiled
from oddrank.native.prefill import prefill_attention
from oddrank.native.rotary import cache_heads
from oddrank.runtime.cache import KVCache
from oddrank.runtime.layers.module import Module, Parameter
from oddrank.runtime.layers.norm import RMSNorm
from oddrank.runtime.layers.rotary import Rotary
from oddrank.runtime.step import Step


class HeadMap:
    """Which local KV slot each local query slot reads, as what decoding needs: queries grouped by KV slot.

    partner: int64 [query slots], local KV slot of each. `group` is the largest number of queries at one KV
    slot; shorter groups are filled with a repeated query whose result is not used.
    """

    def __init__(self, partner: npt.NDArray[np.int64], kv_heads: int, device: torch.device | str = "cpu") -> None:
        q_heads = len(partner)
        counts = np.bincount(partner, minlength=kv_heads) if q_heads else np.zeros(kv_heads, np.int64)
        self.q_heads, self.kv_heads = q_heads, kv_heads
        self.group = int(counts.max()) if q_heads else 0
        self.shape = (kv_heads, self.group, -1)
        order = np.argsort(partner, kind="stable")
        self.queries = torch.from_numpy(order.astype(np.int64)).to(device)
        """The query slots of KV slot 0, of 1, ...: int64 [query slots]."""
        self.starts = torch.from_numpy(np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)).to(device)
        """Where each KV slot's begin in `queries`, and the end: int64 [KV slots + 1]."""
        place = np.empty(q_heads, dtype=np.int64)  # where in the groups each query slot lies
        starts = np.concatenate([[0], np.cumsum(counts)[:-1]]) if kv_heads else counts
        place[order] = partner[order] * self.group + np.arange(q_heads) - starts[partner[order]]
        members = np.zeros(kv_heads * self.group, dtype=np.int64)
        members[place] = np.arange(q_heads)
        in_place = len(members) == q_heads and bool((place == np.arange(q_heads)).all())
        self.members = None if in_place else torch.from_numpy(members).to(device)
        self.place = None if in_place else torch.from_numpy(place).to(device)
        one_each = q_heads == kv_heads and bool((partner == np.arange(q_heads)).all())
        self.partner = None if one_each else torch.from_numpy(np.array(partner)).to(device)


class Attention:
    """softmax(q k^T * scale) v, causal, over the tokens the cache holds and the step's own.

    window: each token sees itself and the window - 1 tokens before it; None: all before it.
    sinks: [query slots], scores that take part in the softmax and have no value.
    """

    def __init__(self, heads: HeadMap, layer: int, scale: float, window: int | None = None) -> None:
        self.heads, self.layer, self.scale, self.window = heads, layer, scale, window

    def __call__(self, q: Tensor, kv: Tensor, step: Step, cache: KVCache, sinks: Tensor | None = None) -> Tensor:
        """q [tokens, query slots, head_dim], kv [tokens, 2 * KV slots, head_dim], keys first -> as q, after `kv`
        is cached."""
        heads = self.heads
        if heads.q_heads == 0:
            return q
        if not step.decode:
            return self._prefill(q, kv, step, cache, sinks)
        assert step.in_order
        # A group's queries are the rows of one small matrix against its keys, so that keys are read once and never
        # repeated.
        grouped = q if heads.members is None else q.index_select(1, heads.members)
        if sinks is not None:
            sinks = sinks if heads.members is None else sinks.index_select(0, heads.members)
            sinks = sinks.view(heads.shape)
        if len(step.segments) > 1 or cache.half or step.static:
            out = self._decode(grouped, kv, step, cache, sinks)
        else:
            # The same in three small products, which cost less to start than the fused one.
            target, keys, values = cache.views(step, self.window)[self.layer]
            target.copy_(kv[0])
            scores = torch.bmm(grouped.view(heads.shape), keys).mul_(self.scale)
            out = torch.bmm(_softmax(scores, sinks), values).view(1, -1, cache.head_dim)
        return out if heads.place is None else out.index_select(1, heads.place)

    def _decode(self, grouped: Tensor, kv: Tensor, step: Step, cache: KVCache, sinks: Tensor | None) -> Tensor:
        """All sequences at once; shorter ones mask what lies past their end. sinks: [KV slots, group, 1]."""
        buffer, heads, n = cache.layer(self.layer), self.heads, len(step.segments)
        buffer[torch.arange(n, device=kv.device), :, step.positions] = kv.to(buffer.dtype)
        if kv.is_cuda and sinks is None:
            from oddrank.gpu.attention import decode

            paged = decode(grouped, step, cache, self.layer, self.scale, self.window)
            if paged is not None:
                return paged
        first = step.first_key(self.window)
        keys = buffer[:n, : heads.kv_heads, first : step.longest]
        values = buffer[:n, heads.kv_heads :, first : step.longest]
        q = grouped.reshape(n, heads.kv_heads, heads.group, -1).to(keys.dtype)
        mask = step.decode_mask(self.window, keys.dtype)
        out = _attend(q, keys, values, mask, self.scale, sinks)
        return out.to(grouped.dtype).reshape(grouped.shape)

    def _prefill(self, q: Tensor, kv: Tensor, step: Step, cache: KVCache, sinks: Tensor | None) -> Tensor:
        """A sequence at a time, in the activations' type, from what the cache holds: what decoding will see."""
        partner, out = self.heads.partner, torch.empty_like(q)
        for i, s in enumerate(step.segments):
            cache.store(self.layer, s.slot, s.past, kv[s.start : s.stop].transpose(0, 1))
            both = cache.load(self.layer, s.slot, s.length).to(q.dtype)
            k, v = both[: self.heads.kv_heads], both[self.heads.kv_heads :]
            if partner is not None:
                k, v = k.index_select(0, partner), v.index_select(0, partner)
            mask = step.prefill_mask(i, self.window, q.dtype)
            rows = q[s.start : s.stop].transpose(0, 1)
            seen = _attend(
                rows[None], k[None], v[None], mask, self.scale, None if sinks is None else sinks[:, None, None],
                causal=mask is None,
            )  # fmt: skip
            out[s.start : s.stop] = seen[0].transpose(0, 1)
        return out


def _attend(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, sinks: Tensor | None, *, causal: bool = False
) -> Tensor:
    """q [n, heads, rows, head_dim] over k and v [n, heads, keys, head_dim]. mask: is added to the scores. sinks:
    [heads, rows or 1, 1]. causal: row i sees keys 0 to i."""
    if sinks is None:
        return F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, scale=scale)
    scores = torch.matmul(q, k.mT).mul_(scale)
    if mask is not None:
        scores += mask
    if causal:
        scores.masked_fill_(scores.new_ones(scores.shape[-2:], dtype=torch.bool).triu_(1), float("-inf"))
    return torch.matmul(_softmax(scores, sinks), v)


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Over the keys [..., rows, keys], and what else of each head takes part."""
    if sinks is None:
        return torch.softmax(scores, -1)
    column = sinks.to(scores.dtype).expand(*scores.shape[:-1], 1)
    return torch.softmax(torch.cat((scores, column), -1), -1)[..., :-1]


class RotaryAttention(Module):
    """Attention whose queries and keys are rotated, after a norm of every head where the model has one.

    q [tokens, query slots, head_dim], kv [tokens, 2 * KV slots, head_dim], keys first, gate as q -> [tokens, query
    slots * head_dim], times sigmoid(gate) where there is one. q and kv are parts of one product, which is written to.
    sinks: see Attention.
    """

    def __init__(
        self,
        attention: Attention,
        q_norm: RMSNorm | None = None,
        k_norm: RMSNorm | None = None,
        sinks: Parameter | None = None,
    ) -> None:
        self.attention, self.q_norm, self.k_norm, self.sinks = attention, q_norm, k_norm, sinks
        self._threads = 1

    def prepare(self, threads: int) -> None:
        self._threads = threads

    def __call__(
        self, q: Tensor, kv: Tensor, rotary: Rotary, step: Step, cache: KVCache, gate: Tensor | None = None
    ) -> Tensor:
        tokens, heads, kv_heads = q.shape[0], self.attention.heads, kv.shape[1] // 2
        sinks = None if self.sinks is None else self.sinks.data
        library = compiled(q)
        if library is not None and heads.q_heads and cache.dtype.itemsize <= 4:
            pages = cache.pages(self.attention.layer)
            norms = None
            if self.q_norm is not None and self.k_norm is not None:
                norms = self.q_norm.gain(), self.k_norm.gain(), self.q_norm.eps
            slots, threads = (step.order, 1) if step.decode else (step.slots, self._threads)
            cache_heads(
                library, q, kv, pages, (*rotary.table, rotary.places), step.positions,
                slots=slots, norms=norms, threads=threads,
            )  # fmt: skip
            readers, scale, window = (heads.starts, heads.queries), self.attention.scale, self.attention.window
            if step.decode:
                return decode_attention(
                    library, q, pages, step.positions, *readers, scale, window=window, gate=gate, sinks=sinks,
                    slots=step.order, threads=self._threads,
                )  # fmt: skip
            return prefill_attention(
                library, q, pages, step.spans, *readers, scale, window=window, gate=gate, sinks=sinks,
                threads=self._threads,
            )  # fmt: skip
        k = kv.narrow(1, 0, kv_heads)
        if self.q_norm is not None and self.k_norm is not None:
            q.copy_(self.q_norm(q))
            k.copy_(self.k_norm(k))
        rotary.apply_(q, self._threads)
        rotary.apply_(k, self._threads)
        out = self.attention(q, kv, step, cache, sinks)
        if gate is not None:
            out = out * torch.sigmoid(gate)
        return out.reshape(tokens, -1)
