"""What a layout costs: bytes of weights, KV bytes per token, multiply-adds per token. The largest rank counts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

from oddrank.checkpoint.dtypes import nbytes
from oddrank.geometry import KVCache, Model
from oddrank.layout.census import Use, stored_shape, use_parts
from oddrank.layout.storage import Refined, target_part


class Cost(msgspec.Struct, frozen=True):
    """One rank's price.

    weight_bytes: bytes of weights. kv_bytes: bytes of KV cache per token over all layers.
    macs: multiply-adds per decoded token at `context` tokens of context.
    """

    weight_bytes: int
    kv_bytes: int
    macs: int
    context: int

    def bytes_per_token(self) -> int:
        """Bytes a rank reads to decode one token of one sequence: its weights and its KV cache. Decoding is
        bound by memory bandwidth, so this is the time."""
        return self.weight_bytes + self.context * self.kv_bytes


def weight_bytes(
    model: Model,
    uses: Iterable[Use],
    counts: Mapping[str, int],
    axes: set[str] | None = None,
    refined: Refined | None = None,
) -> int:
    """Bytes of the stored tensors at these axis counts; with `axes`, of the roles that touch them."""
    total = 0
    for use in uses:
        role = model.roles[use.role]
        if axes is not None and not axes & role.axes():
            continue
        logical = tuple(d.size(counts) for d in role.dims)
        for part, dtype in use_parts(model, use):
            total += use.count * nbytes(dtype, stored_shape(logical, target_part(role, part, refined or {})))
    return total


def kv_bytes_per_layer(model: Model, counts: Mapping[str, int], itemsize: int) -> int:
    """KV-cache bytes per token and layer, of the layer that keeps most: keys and values of every local KV slot. Caches
    of axes that `counts` leaves out are left out."""
    return max((_elements(c, counts) * itemsize for c in model.kv if c.axis is None or c.axis in counts), default=0)


def kv_bytes(model: Model, counts: Mapping[str, int], itemsize: int, axes: set[str] | None = None) -> int:
    """KV-cache bytes per token over all layers; with `axes`, of theirs."""
    return sum(c.layers * _elements(c, counts) * itemsize for c in model.kv if axes is None or c.axis in axes)


def _elements(cache: KVCache, counts: Mapping[str, int]) -> int:
    return cache.width * (1 if cache.axis is None else counts[cache.axis])


def state_bytes(model: Model, counts: Mapping[str, int]) -> int:
    """Bytes of recurrent state a request holds."""
    return sum(s.layers * s.nbytes * counts[s.axis] for s in model.states)


def macs(model: Model, counts: Mapping[str, int], context: int, axes: set[str] | None = None) -> int:
    """Multiply-adds per token: each linear layer's weights once, and attention over `context` keys and values."""
    total = 0.0
    for role in model.roles:
        if axes is not None and not axes & role.axes():
            continue
        total += role.work * role.count() * math.prod(d.size(counts) for d in role.dims)
    for cache in model.kv:
        if axes is None or cache.readers in axes:
            total += context * counts[cache.readers] * cache.width * cache.layers
    return int(total)


def rank_cost(
    model: Model,
    uses: Iterable[Use],
    counts: Mapping[str, int],
    *,
    context: int,
    kv_itemsize: int,
    axes: set[str] | None = None,
    refined: Refined | None = None,
) -> Cost:
    """The price of one rank with these slot counts; with `axes`, only what those axes are responsible for."""
    kv = kv_bytes(model, counts, kv_itemsize, axes)
    return Cost(weight_bytes(model, uses, counts, axes, refined), kv, macs(model, counts, context, axes), context)
