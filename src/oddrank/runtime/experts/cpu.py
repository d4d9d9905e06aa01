"""CPU: experts are in host memory and the rank's CPU threads compute them: by the compiled kernel, or one expert a
thread at a time."""

from functools import partial

from torch import Tensor

from oddrank.runtime.experts.backend import Backend, Compiled, Layer, Terms
from oddrank.runtime.experts.kernel import Batch, Routed
from oddrank.runtime.experts.pool import Job
from oddrank.runtime.experts.share import ExpertShare


class Cpu(Backend):
    """A batch's terms wait in host memory for their turn in the sum: tokens x k x hidden numbers."""

    name = "cpu"

    def __init__(self, layer: Layer, share: ExpertShare) -> None:
        self._layer, self._share = layer, share
        self._compiled = Compiled(layer, share)

    def whole(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor | None:
        return self._compiled(x, weights, ids)

    def terms(self, batch: Batch) -> Terms:
        host = batch.to("cpu")
        jobs = [self.start(host, routed) for routed in host.routed]
        for routed, job in zip(batch.routed, jobs, strict=True):
            yield routed, job.result().to(self._layer.device)

    def start(self, host: Batch, routed: Routed) -> Job[Tensor]:
        """Have one expert's term computed; `host`: the batch in host memory."""
        banks, kernel = self._layer.banks, self._layer.kernel
        return self._share.pool.start(partial(kernel.term, host, routed, *banks.expert(routed.expert)))
