"""Grouped-query attention over a cache, for any map from query slots to KV slots."""

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor

from oddrank.runtime.cache import KVCache
from oddrank.runtime.step import Step


class HeadMap:
    """Which local KV slot each local query slot reads, as what decoding needs: queries grouped by KV slot.

    partner: int64 [query slots], local KV slot of each. `group` is the largest number of queries at one KV
    slot; shorter groups are filled with a repeated query whose result is not used.
    """

    def __init__(
        self, partner: npt.NDArray[np.int64], kv_heads: int, device: torch.device | str = "cpu"
    ) -> None:
        q_heads = len(partner)
        counts = np.bincount(partner, minlength=kv_heads) if q_heads else np.zeros(kv_heads, np.int64)
        self.q_heads, self.kv_heads = q_heads, kv_heads
        self.group = int(counts.max()) if q_heads else 0
        order = np.argsort(partner, kind="stable")
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
    """softmax(q k^T / sqrt(head_dim)) v, causal, over the tokens the cache holds and the step's own.

    window: each token sees itself and the window - 1 tokens before it; None: all before it.
    """

    def __init__(self, heads: HeadMap, layer: int, scale: float, window: int | None = None) -> None:
        self.heads, self.layer, self.scale, self.window = heads, layer, scale, window

    def __call__(self, q: Tensor, kv: Tensor, step: Step, cache: KVCache) -> Tensor:
        """q [tokens, query slots, head_dim], kv [tokens, 2, KV slots, head_dim] -> as q, after `kv` is cached."""
        if self.heads.q_heads == 0:
            return q
        return self._decode(q, kv, step, cache) if step.decode else self._prefill(q, kv, step, cache)

    def _decode(self, q: Tensor, kv: Tensor, step: Step, cache: KVCache) -> Tensor:
        """All sequences at once. A group's queries are the rows of one small matrix against its keys, so keys
        are read once and never repeated."""
        buffer, heads, n = cache.layer(self.layer), self.heads, len(step.segments)
        both, slot, head, token, _ = buffer.stride()
        dim, longest = cache.head_dim, step.longest
        if n == 1:
            buffer.as_strided((1, 2, heads.kv_heads, dim), (0, both, head, 1), (longest - 1) * token).copy_(kv)
        else:
            buffer[:, torch.arange(n, device=q.device), :, step.positions] = kv.to(buffer.dtype)
        first = step.first_key(self.window)
        shape, stride = (2, n, heads.kv_heads, longest - first, dim), (both, slot, head, token, 1)
        k, v = buffer.as_strided(shape, stride, first * token).unbind(0)
        grouped = q if heads.members is None else q.index_select(1, heads.members)
        grouped = grouped.view(n, heads.kv_heads, heads.group, dim).to(k.dtype)
        mask = step.decode_mask(self.window, k.dtype)
        out = F.scaled_dot_product_attention(grouped, k, v, mask, scale=self.scale).to(q.dtype)
        out = out.reshape(n, -1, dim)
        return out if heads.place is None else out.index_select(1, heads.place)

    def _prefill(self, q: Tensor, kv: Tensor, step: Step, cache: KVCache) -> Tensor:
        """A sequence at a time, in the activations' type, from what the cache holds: what decoding will see."""
        buffer, partner = cache.layer(self.layer), self.heads.partner
        out = torch.empty_like(q)
        for i, s in enumerate(step.segments):
            buffer[:, s.slot, :, s.past : s.length] = kv[s.start : s.stop].permute(1, 2, 0, 3)
            k, v = buffer[:, s.slot, :, : s.length].to(q.dtype).unbind(0)
            if partner is not None:
                k, v = k.index_select(0, partner), v.index_select(0, partner)
            mask = step.prefill_mask(i, self.window, q.dtype)
            rows = q[s.start : s.stop].transpose(0, 1)
            seen = F.scaled_dot_product_attention(
                rows[None], k[None], v[None], mask, is_causal=mask is None, scale=self.scale
            )
            out[s.start : s.stop] = seen[0].transpose(0, 1)
        return out
