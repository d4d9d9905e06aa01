"""Resident: every expert is on the device and computed there."""

from torch import Tensor

from oddrank.runtime.experts.backend import Backend, Compiled, Layer, Terms
from oddrank.runtime.experts.kernel import Batch
from oddrank.runtime.experts.share import ExpertShare


class Resident(Backend):
    name = "resident"
    on_device = True

    def __init__(self, layer: Layer, share: ExpertShare) -> None:
        self._layer = layer
        self._compiled = Compiled(layer, share)

    def whole(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor | None:
        return self._compiled(x, weights, ids)

    def terms(self, batch: Batch) -> Terms:
        banks, kernel = self._layer.banks, self._layer.kernel
        for routed in batch.routed:
            yield routed, kernel.term(batch, routed, *banks.expert(routed.expert))
