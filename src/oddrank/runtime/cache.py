"""The keys and values of the tokens seen so far."""

import torch
from torch import Tensor

BLOCK = 256
"""Tokens by which a cache grows at least."""


class KVCache:
    """Keys and values of a batch of sequences, one buffer a layer: [2, slots, kv_heads, capacity, head_dim].

    A slot belongs to one sequence. The head's keys lie together, so that decoding reads them in one sweep.
    `reserve` grows the capacity layer by layer, in blocks: at most one layer is held twice, once.
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
        self.slots, self.kv_heads, self.head_dim = slots, kv_heads, head_dim
        self.capacity = 0
        self._layers = [
            torch.empty(2, slots, kv_heads, 0, head_dim, dtype=dtype, device=device) for _ in range(layers)
        ]

    @property
    def dtype(self) -> torch.dtype:
        return self._layers[0].dtype

    def nbytes(self) -> int:
        return sum(layer.nbytes for layer in self._layers)

    def layer(self, index: int) -> Tensor:
        return self._layers[index]

    def reserve(self, length: int) -> None:
        """Make room for sequences of `length` tokens."""
        if length <= self.capacity:
            return
        # A quarter more each time, so that what is copied over a whole generation stays a few times its size.
        wanted = max(length, self.capacity + self.capacity // 4)
        capacity = -(-wanted // BLOCK) * BLOCK
        for i, old in enumerate(self._layers):
            # Zeros: a shorter sequence of the batch masks what lies past its end, and masks do not hide NaN.
            new = old.new_zeros(2, self.slots, self.kv_heads, capacity, self.head_dim)
            new[:, :, :, : self.capacity] = old
            self._layers[i] = new
        self.capacity = capacity

    def move(self, source: int, target: int, length: int) -> None:
        """Give slot `target` the first `length` tokens of slot `source`."""
        for layer in self._layers:
            layer[:, target, :, :length] = layer[:, source, :, :length]
