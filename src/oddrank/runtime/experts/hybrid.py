"""Hybrid: the device computes the experts that are in its cache while CPU threads compute the others."""

from oddrank.runtime.experts.backend import Backend, Layer, Terms
from oddrank.runtime.experts.bank import BankLayout
from oddrank.runtime.experts.cpu import Cpu
from oddrank.runtime.experts.kernel import Batch
from oddrank.runtime.experts.offload import Offload
from oddrank.runtime.experts.share import ExpertShare

_STREAMED_TOKENS = 64
"""From this many tokens on, an expert has enough of them that copying it costs less than computing it on the CPU."""

_ADMITTED = 2
"""Experts copied into a layer's cache at most in a step. They are not waited for, but they take bandwidth of the host's
memory from the threads."""


class Hybrid(Backend):
    name = "hybrid"
    caches = True

    def __init__(self, layer: Layer, share: ExpertShare) -> None:
        self._layer = layer
        self._cpu, self._offload = Cpu(layer, share), Offload(layer, share)
        self.cache = self._offload.cache

    def nbytes(self) -> int:
        return self.cache.nbytes()

    @classmethod
    def takes(cls, layouts: tuple[BankLayout, ...]) -> bool:
        return Cpu.takes(layouts) and Offload.takes(layouts)

    def terms(self, batch: Batch) -> Terms:
        if len(batch.x) >= _STREAMED_TOKENS:
            yield from self._offload.terms(batch)
            return
        hits = {routed.expert for routed in batch.routed if self.cache.touch(routed.expert)}
        if len(hits) == len(batch.routed):
            jobs = {}
        else:
            host = batch.to("cpu")
            jobs = {r.expert: self._cpu.start(host, r) for r in host.routed if r.expert not in hits}
            heaviest = sorted(jobs, key={r.expert: -float(r.weights.sum()) for r in host.routed}.__getitem__)
        kernel = self._layer.kernel
        done = {r.expert: kernel.term(batch, r, *self.cache.get(r.expert)) for r in batch.routed if r.expert in hits}
        if jobs:  # only now: what the device had to compute is not behind the copies
            for expert in heaviest[:_ADMITTED]:
                self.cache.admit(expert, hits)
        for routed in batch.routed:
            if routed.expert in jobs:
                yield routed, jobs[routed.expert].result().to(self._layer.device)
            else:
                yield routed, done[routed.expert]
