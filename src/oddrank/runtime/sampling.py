"""Choosing a token from logits."""

import math

import torch
from torch import Tensor

from oddrank.errors import OddrankError
from oddrank.runtime.request import Sampling


class Sampler:
    """Chooses one sequence's tokens. Ranks that see the same logits choose the same tokens."""

    def __init__(self, sampling: Sampling, seed: int) -> None:
        self.sampling = sampling
        self._generator: torch.Generator | None = None
        if sampling.temperature > 0:
            self._generator = torch.Generator()
            self._generator.manual_seed(seed % (1 << 63))

    def __call__(self, logits: Tensor) -> int:
        """logits [vocab] of one position, any float type. OddrankError where the largest is no number."""
        if self._generator is None:
            # numpy's search is several times faster than torch's on a CPU; both take the first of equals, and NaN
            # before any number
            at = int(logits.numpy().argmax() if logits.device.type == "cpu" else logits.argmax())
            _require_finite(float(logits[at]))
            return at
        scores = logits.double().cpu() / self.sampling.temperature
        _require_finite(float(scores.max()))
        order: Tensor | None = None
        if 0 < self.sampling.top_k < len(scores):
            scores, order = scores.topk(self.sampling.top_k)
        elif self.sampling.top_p < 1:
            scores, order = scores.sort(descending=True, stable=True)
        chances = scores.softmax(-1)
        if self.sampling.top_p < 1:
            before = chances.cumsum(-1) - chances
            chances[before >= self.sampling.top_p] = 0  # the likeliest stays: nothing lies before it
        at = int(torch.multinomial(chances, 1, generator=self._generator))
        return at if order is None else int(order[at])


def _require_finite(largest: float) -> None:
    """Of NaN the same token would come for ever, as if the model had said so."""
    if not math.isfinite(largest):
        raise OddrankError(
            f"The model's largest logit is {largest}, so there is no token to choose. Some weight or scale of the "
            "checkpoint is not a finite number, or a value exceeds what the run computes in: try --dtype fp32, or "
            "download the checkpoint again."
        )
