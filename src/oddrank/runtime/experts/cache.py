"""A layer's cache of experts on the device, least recently used out first; and the pipeline of those that stream by."""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence

import torch

from oddrank.runtime.experts.bank import LayerBanks
from oddrank.runtime.experts.copier import Copier, Ready
from oddrank.runtime.experts.kernel import Stored


class ExpertCache:
    """`slots` experts of one layer on the device.

    hits, misses: how often `touch` found an expert, and did not. evictions: experts put out for others.
    """

    def __init__(self, banks: LayerBanks, slots: int, device: torch.device, copier: Copier) -> None:
        self.slots = slots
        self.hits = self.misses = self.evictions = 0
        self._source, self._copier = banks, copier
        self._held = LayerBanks(*(bank.layout.allocate(slots, device) for bank in banks))
        self._slot: OrderedDict[int, int] = OrderedDict()  # expert -> slot, the least recently used first
        self._copies: dict[int, Ready] = {}  # expert -> its copy, until somebody has waited for it

    def __contains__(self, expert: int) -> bool:
        return expert in self._slot

    @property
    def experts(self) -> list[int]:
        """What it holds, the least recently used first."""
        return list(self._slot)

    @property
    def free(self) -> int:
        return self.slots - len(self._slot)

    def nbytes(self) -> int:
        return self._held.nbytes()

    def touch(self, expert: int) -> bool:
        """Whether `expert` is held, which makes it the most recently used."""
        if expert not in self._slot:
            self.misses += 1
            return False
        self.hits += 1
        self._slot.move_to_end(expert)
        return True

    def admit(self, expert: int, needed: Iterable[int] = ()) -> bool:
        """Start copying `expert` in, as the most recently used, in place of the least recently used one that is not in
        `needed`. False where all are."""
        if self.free:
            slot = len(self._slot)
        else:
            kept = set(needed)
            out = next((e for e in self._slot if e not in kept), None)
            if out is None:
                return False
            slot = self._slot.pop(out)
            self._copies.pop(out, None)
            self.evictions += 1
        self._slot[expert] = slot
        pairs = list(zip(self._source.expert(expert), self._held.expert(slot), strict=True))
        self._copies[expert] = self._copier.start(pairs)
        return True

    def get(self, expert: int) -> tuple[Stored, Stored]:
        """The stored parts of an expert that is held, once they have been copied."""
        ready = self._copies.pop(expert, None)
        if ready is not None:
            ready()
        return self._held.expert(self._slot[expert])


class Stream:
    """Two places on the device that experts are copied into in turn: one is computed with while the other is filled."""

    def __init__(self, banks: LayerBanks, device: torch.device, copier: Copier) -> None:
        self._buffers = LayerBanks(*(bank.layout.allocate(2, device) for bank in banks))
        self._copier = copier

    def nbytes(self) -> int:
        return self._buffers.nbytes()

    def run(self, banks: LayerBanks, experts: Sequence[int]) -> Iterator[tuple[Stored, Stored]]:
        """The stored parts of `experts`, in order. What one yields is valid until the next is asked for."""
        copies = [self._fill(banks, expert, place) for place, expert in enumerate(experts[:2])]
        for number in range(len(experts)):
            copies[number % 2]()
            yield self._buffers.expert(number % 2)
            if number + 2 < len(experts):  # what computes with this place was asked for before the copy is
                copies[number % 2] = self._fill(banks, experts[number + 2], number % 2)

    def _fill(self, banks: LayerBanks, expert: int, place: int) -> Ready:
        return self._copier.start(list(zip(banks.expert(expert), self._buffers.expert(place), strict=True)))
