"""A cache of pages: sequences take them as they grow and give them back, and may share those of a common beginning."""

from collections.abc import Sequence

import torch
from torch import Tensor

from oddrank.native.pages import Pages
from oddrank.runtime.cache import KVCache
from oddrank.runtime.pages import untouched_zeros
from oddrank.runtime.step import Step


class PagedCache(KVCache):
    """[layers, pages, 2 * kv_heads, page size, head_dim], keys first, and for each slot the pages of its sequence.

    Memory is taken from the system as pages are first written to. States, where the model has some, are one a slot, and
    `snapshots` more, to which and from which slots' can be copied.
    """

    paged = True

    def __init__(self, plain: KVCache, slots: int, count: int, size: int, length: int, snapshots: int = 0) -> None:
        """plain: of the model, for slots + snapshots sequences, and empty: what is kept of a token. count, size: of the
        pages. length: of the longest sequence."""
        super().__init__(plain.layers, slots, plain.kv_heads, plain.head_dim, plain.dtype, plain.device, plain.states)
        assert plain.states is None or plain.states.inputs.shape[1] == slots + snapshots
        self.size, self.count, self.snapshots = size, count, snapshots
        shape = (plain.layers, count, 2 * plain.kv_heads, size, plain.head_dim)
        self._buffer = untouched_zeros(shape, plain.dtype, plain.device)  # masks do not hide NaN
        self.table = torch.zeros(slots, -(-length // size), dtype=torch.int64, device=plain.device)
        self.capacity = self.table.shape[1] * size

    @staticmethod
    def token_nbytes(plain: KVCache) -> int:
        """Bytes of a token, over all layers."""
        return plain.layers * 2 * plain.kv_heads * plain.head_dim * plain.dtype.itemsize

    def give(self, slot: int, pages: Sequence[int], start: int = 0) -> None:
        """The slot's pages from the `start`-th on."""
        self.table[slot, start : start + len(pages)] = torch.tensor(pages, dtype=torch.int64)

    def begin(self, step: Step) -> None:
        """Make ready for a step: the states of its sequences are where `start` left them."""

    def start(self, slot: int, snapshot: int | None) -> None:
        """The slot's state is a snapshot's from now on, or nothing seen."""
        if self.states is None:
            return
        if snapshot is None:
            self.states.clear([slot])
        else:
            self.states.move(self.slots + snapshot, slot)

    def keep(self, slot: int, snapshot: int) -> None:
        """Copy the slot's state."""
        if self.states is not None:
            self.states.move(slot, self.slots + snapshot)

    def reserve(self, length: int) -> None:
        assert length <= self.capacity

    def pages(self, index: int) -> Pages:
        if not self._pages:
            self._pages = [Pages.of(layer, self.table) for layer in self._buffer.unbind(0)]
        return self._pages[index]

    def store(self, index: int, slot: int, past: int, kv: Tensor) -> None:
        size, layer, done = self.size, self._buffer[index], 0
        while done < kv.shape[1]:
            page, within = int(self.table[slot, (past + done) // size]), (past + done) % size
            count = min(size - within, kv.shape[1] - done)
            layer[page, :, within : within + count] = kv[:, done : done + count]
            done += count

    def load(self, index: int, slot: int, length: int) -> Tensor:
        pages = self.table[slot, : -(-length // self.size)]
        whole = self._buffer[index].index_select(0, pages).transpose(0, 1)
        return whole.reshape(whole.shape[0], -1, whole.shape[-1])[:, :length]

    def written(self, past: Sequence[int], slots: Sequence[int]) -> list[Tensor]:
        found = [self._buffer[:, page, :, within] for page, within in self._places(past, slots)]
        return [torch.stack(found), *self._states_of(slots)]

    def write(self, past: Sequence[int], slots: Sequence[int], values: Sequence[Tensor]) -> None:
        for i, (page, within) in enumerate(self._places(past, slots)):
            self._buffer[:, page, :, within] = values[0][i]
        self._set_states(slots, values[1:])

    def _places(self, past: Sequence[int], slots: Sequence[int]) -> list[tuple[int, int]]:
        """(page, place in it) of the token after `past` of each sequence."""
        size = self.size
        return [(int(self.table[slot, at // size]), at % size) for slot, at in zip(slots, past, strict=True)]
