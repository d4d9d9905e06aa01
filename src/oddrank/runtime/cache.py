"""The keys and values of the tokens seen so far."""

from typing import NamedTuple

import torch
from torch import Tensor

from oddrank.runtime.step import Step

BLOCK = 256
"""Tokens by which a cache grows at least."""


class LayerView(NamedTuple):
    """One layer's cache as the decode step of a single sequence needs it.

    target: where the step's keys and values go, [2 * kv_heads, head_dim]. keys: [kv_heads, head_dim, tokens].
    values: [kv_heads, tokens, head_dim].
    """

    target: Tensor
    keys: Tensor
    values: Tensor


class KVCache:
    """Keys and values of a batch of sequences: [layers, slots, 2 * kv_heads, capacity, head_dim], keys first.

    A slot belongs to one sequence. A head's keys lie together, so that decoding reads them in one sweep.
    What `reserve` asks for beyond what was used costs no memory until it is written to.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self.layers, self.slots, self.kv_heads, self.head_dim = layers, slots, kv_heads, head_dim
        self.half = dtype.itemsize == 2
        self.capacity = 0
        self._buffer = torch.empty(layers, slots, 2 * kv_heads, 0, head_dim, dtype=dtype, device=device)

    @property
    def dtype(self) -> torch.dtype:
        return self._buffer.dtype

    def nbytes(self) -> int:
        return self._buffer.nbytes

    def layer(self, index: int) -> Tensor:
        """[slots, 2 * kv_heads, capacity, head_dim]."""
        return self._buffer[index]

    def reserve(self, length: int) -> None:
        """Make room for sequences of `length` tokens."""
        if length <= self.capacity:
            return
        capacity = -(-max(length, self.capacity + self.capacity // 4) // BLOCK) * BLOCK
        # Zeros: a shorter sequence of the batch masks what lies past its end, and masks do not hide NaN.
        new = self._buffer.new_zeros(self.layers, self.slots, 2 * self.kv_heads, capacity, self.head_dim)
        new[..., : self.capacity, :] = self._buffer
        self._buffer, self.capacity = new, capacity

    def move(self, source: int, target: int, length: int) -> None:
        """Give slot `target` the first `length` tokens of slot `source`."""
        self._buffer[:, target, :, :length] = self._buffer[:, source, :, :length]

    def views(self, step: Step, window: int | None) -> list[LayerView]:
        """Every layer's view for a decode step of one sequence: made for all layers at once, and once a step."""
        made: list[LayerView] | None = step.views.get(window)
        if made is None:
            first, end = step.first_key(window), step.longest
            whole = self._buffer[:, 0]
            targets = whole[:, :, end - 1].unbind(0)
            keys = whole[:, : self.kv_heads, first:end].transpose(2, 3).unbind(0)
            values = whole[:, self.kv_heads :, first:end].unbind(0)
            made = step.views[window] = [LayerView(*t) for t in zip(targets, keys, values, strict=True)]
        return made
