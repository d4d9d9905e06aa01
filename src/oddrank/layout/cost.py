"""What a layout costs: bytes of weights, KV bytes per token, multiply-adds per token. The largest rank counts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import msgspec

from oddrank.checkpoint.dtypes import nbytes
from oddrank.geometry import Model
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
    """KV-cache bytes per token and layer: keys and values of every local KV slot."""
    return 0 if model.kv is None else counts[model.kv.axis] * model.kv.width * itemsize


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
    if model.kv is not None:
        follower = next((p.follower for p in model.pairs if p.leader == model.kv.axis), model.kv.axis)
        if axes is None or follower in axes:
            total += context * counts[follower] * model.kv.width * model.kv.layers
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
    kv = 0
    if model.kv is not None and (axes is None or model.kv.axis in axes):
        kv = model.kv.layers * kv_bytes_per_layer(model, counts, kv_itemsize)
    return Cost(weight_bytes(model, uses, counts, axes, refined), kv, macs(model, counts, context, axes), context)
