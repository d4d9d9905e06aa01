"""What a model keeps of the tokens seen so far: keys and values, and the states of layers that keep none."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from oddrank.native.pages import Pages
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


class States:
    """What layers of linear attention keep of a sequence, whatever its length.

    inputs: [layers, slots, *shape], the last inputs of a short convolution. memory: [layers, slots, heads, key width,
    value width], in fp32 or wider.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        inputs: tuple[int, int],
        dtype: torch.dtype,
        memory: tuple[int, int, int],
        device: torch.device | str = "cpu",
    ) -> None:
        wide = torch.promote_types(dtype, torch.float32)
        self.inputs = torch.zeros(layers, slots, *inputs, dtype=dtype, device=device)
        self.memory = torch.zeros(layers, slots, *memory, dtype=wide, device=device)

    def nbytes(self) -> int:
        return self.inputs.nbytes + self.memory.nbytes

    def clear(self, slots: list[int]) -> None:
        """Nothing seen yet in these slots."""
        self.inputs[:, slots] = 0
        self.memory[:, slots] = 0

    def move(self, source: int, target: int) -> None:
        self.inputs[:, target] = self.inputs[:, source]
        self.memory[:, target] = self.memory[:, source]


class KVCache:
    """Keys and values of a batch of sequences: [layers, slots, 2 * kv_heads, capacity, head_dim], keys first.

    A slot belongs to one sequence. A head's keys lie together, so that decoding reads them in one sweep.
    What `reserve` asks for beyond what was used costs no memory until it is written to.
    states: of the layers that have no keys and values; `layers` does not count those.
    """

    def __init__(
        self,
        layers: int,
        slots: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
        states: States | None = None,
    ) -> None:
        self.layers, self.slots, self.kv_heads, self.head_dim = layers, slots, kv_heads, head_dim
        self.states = states
        self.half = dtype.itemsize == 2
        self.capacity = 0
        self._buffer = torch.empty(layers, slots, 2 * kv_heads, 0, head_dim, dtype=dtype, device=device)
        self._pages: list[Pages] = []

    @property
    def dtype(self) -> torch.dtype:
        return self._buffer.dtype

    def nbytes(self) -> int:
        return self._buffer.nbytes + (0 if self.states is None else self.states.nbytes())

    def begin(self, step: Step) -> None:
        """Make ready for a step: room for its tokens, and no states left where a sequence starts."""
        self.reserve(step.longest)
        fresh = [s.slot for s in step.segments if s.past == 0]
        if self.states is not None and fresh:
            self.states.clear(fresh)

    def layer(self, index: int) -> Tensor:
        """[slots, 2 * kv_heads, capacity, head_dim]."""
        return self._buffer[index]

    def pages(self, index: int) -> Pages:
        """Where a layer's keys and values lie, for compiled operations: until the cache grows."""
        if not self._pages:
            self._pages = [Pages.of(layer) for layer in self._buffer.unbind(0)]
        return self._pages[index]

    def reserve(self, length: int) -> None:
        """Make room for sequences of `length` tokens."""
        if length <= self.capacity:
            return
        capacity = -(-max(length, self.capacity + self.capacity // 4) // BLOCK) * BLOCK
        # Zeros: a shorter sequence of the batch masks what lies past its end, and masks do not hide NaN.
        new = self._buffer.new_zeros(self.layers, self.slots, 2 * self.kv_heads, capacity, self.head_dim)
        new[..., : self.capacity, :] = self._buffer
        self._buffer, self.capacity, self._pages = new, capacity, []

    def move(self, source: int, target: int, length: int) -> None:
        """Give slot `target` the sequence in slot `source`, of `length` tokens."""
        self._buffer[:, target, :, :length] = self._buffer[:, source, :, :length]
        if self.states is not None:
            self.states.move(source, target)

    def written(self, past: Sequence[int]) -> list[Tensor]:
        """A copy of what a decode step writes: of the sequences in slots 0, 1, ... the keys and values at `past`, their
        lengths before the step, and the states."""
        found = [torch.stack([self._buffer[:, slot, :, at] for slot, at in enumerate(past)])]
        if self.states is not None:
            n = len(past)
            found += [self.states.inputs[:, :n].clone(), self.states.memory[:, :n].clone()]
        return found

    def write(self, past: Sequence[int], values: Sequence[Tensor]) -> None:
        """Put back what `written` copied."""
        for slot, at in enumerate(past):
            self._buffer[:, slot, :, at] = values[0][slot]
        if self.states is not None:
            n = len(past)
            self.states.inputs[:, :n], self.states.memory[:, :n] = values[1], values[2]

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
