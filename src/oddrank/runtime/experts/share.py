"""What the expert layers of one rank have in common: options, threads, the way to the device."""

import torch

from oddrank.runtime.expert_options import ExpertOptions
from oddrank.runtime.experts.bank import BankLayout, LayerBanks
from oddrank.runtime.experts.cache import Stream
from oddrank.runtime.experts.copier import Copier, copier
from oddrank.runtime.experts.pool import ExpertPool
from oddrank.runtime.parallel.group import Group
from oddrank.runtime.topology import own_cores

_KEPT = 0.15
"""Of the device's free memory, what an automatic cache leaves for keys, values and activations."""

_QUARTER = 4
"""Where the device is the CPU a cache saves nothing; an automatic one then holds this part of the experts."""


class ExpertShare:
    """One for a rank's model. Threads and copies start when a backend first asks for them.

    threads: that compute experts on the CPU, by default as many as torch uses.
    """

    def __init__(self, options: ExpertOptions, group: Group, threads: int | None = None) -> None:
        self.options, self.group, self.device = options, group, group.device
        self.threads = threads or torch.get_num_threads()
        self._pool: ExpertPool | None = None
        self._copier: Copier | None = None
        self._streams: dict[tuple[object, ...], Stream] = {}
        self._layers: list[tuple[BankLayout, ...]] = []
        self._room: int | None = None

    def add(self, layouts: tuple[BankLayout, ...]) -> None:
        """Count a layer in; all are, before the first computes."""
        self._layers.append(layouts)

    @property
    def pool(self) -> ExpertPool:
        """The rank's threads for experts, one a core of the rank's own."""
        if self._pool is None:
            self._pool = ExpertPool(own_cores(self.threads))
        return self._pool

    @property
    def copier(self) -> Copier:
        if self._copier is None:
            self._copier = copier(self.device)
        return self._copier

    def stream(self, banks: LayerBanks) -> Stream:
        """The two places that experts of this size stream through, the same for all layers."""
        key = (*banks.gate_up.layout.key, *banks.down.layout.key)
        if key not in self._streams:
            self._streams[key] = Stream(banks, self.device, self.copier)
        return self._streams[key]

    def nbytes(self) -> int:
        """Bytes on the device that all layers use."""
        return sum(stream.nbytes() for stream in self._streams.values())

    def slots(self, experts: int) -> int:
        """How many of a layer's `experts` its cache holds: the same number on every rank."""
        size = self.options.cache
        if size.count is None and size.rate is None and self._room is None:
            mine = torch.tensor([self._free_experts(experts)], device=self.device)
            self._room = min(int(n) for n in torch.cat(self.group.all_gather_list(mine)).tolist())
        return size.slots(experts, self._room or 1)

    def _free_experts(self, experts: int) -> int:
        """Of every layer, how many experts there is room for."""
        if self.device.type != "cuda":
            return max(1, experts // _QUARTER)
        each = sum(layout.expert_nbytes for layouts in self._layers for layout in layouts)
        free, _ = torch.cuda.mem_get_info(self.device)
        return int(free * (1 - _KEPT)) // max(1, each)

    def close(self) -> None:
        """End the threads. Safe to call twice."""
        if self._pool is not None:
            self._pool.close()
