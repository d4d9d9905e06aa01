"""Offload: experts are in host memory; the device computes them out of its cache, or as they stream by."""

from collections.abc import Sequence

from oddrank.runtime.experts.backend import Backend, Layer, Terms
from oddrank.runtime.experts.cache import ExpertCache
from oddrank.runtime.experts.kernel import Batch
from oddrank.runtime.experts.share import ExpertShare


class Offload(Backend):
    """A batch that needs no more experts than the cache has room for (decoding) gets all of them into it. One that
    needs more (prefill) fills what is still free, computes with what is there, and streams the rest through two
    buffers, so that it puts nothing out of the cache that the next token will want."""

    name = "offload"
    caches = True

    def __init__(self, layer: Layer, share: ExpertShare) -> None:
        self._layer = layer
        self.cache = ExpertCache(
            layer.banks, share.slots(layer.banks.gate_up.layout.experts), layer.device, share.copier
        )
        self._stream = share.stream(layer.banks)

    def nbytes(self) -> int:
        return self.cache.nbytes()

    def terms(self, batch: Batch) -> Terms:
        needed = [routed.expert for routed in batch.routed]
        missing = [expert for expert in needed if not self.cache.touch(expert)]
        streamed = self._admit(missing, needed)
        flow = self._stream.run(self._layer.banks, streamed)
        kernel, passing = self._layer.kernel, set(streamed)
        for routed in batch.routed:
            stored = next(flow) if routed.expert in passing else self.cache.get(routed.expert)
            yield routed, kernel.term(batch, routed, *stored)

    def _admit(self, missing: Sequence[int], needed: Sequence[int]) -> list[int]:
        """Take missing experts in; those for which there is no room."""
        room = len(missing) if len(needed) <= self.cache.slots else self.cache.free
        for expert in missing[:room]:
            self.cache.admit(expert, needed)
        return list(missing[room:])
