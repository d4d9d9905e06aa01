"""Choosing a token from logits."""

import math

import torch
from torch import Tensor

from oddrank.errors import OddrankError
from oddrank.runtime.request import Sampling

_LIKELIEST = 1024
"""Candidates looked at first where top_p or min_p cuts: sorting a whole vocabulary takes far longer than a step may."""


class Sampler:
    """Chooses one sequence's tokens. Ranks that see the same logits choose the same tokens."""

    def __init__(self, sampling: Sampling, seed: int) -> None:
        self.sampling = sampling
        self._generator: torch.Generator | None = None
        if sampling.temperature > 0:
            self._generator = torch.Generator()
            self._generator.manual_seed(seed % (1 << 63))
        self._bias: tuple[Tensor, Tensor] | None = None
        if sampling.logit_bias:
            tokens, values = zip(*sampling.logit_bias, strict=True)
            self._bias = torch.tensor(tokens), torch.tensor(values, dtype=torch.float64)

    def __call__(self, logits: Tensor) -> int:
        """logits [vocab] of one position, any float type. OddrankError where the largest is no number."""
        if self._bias is not None:
            tokens, values = (t.to(logits.device) for t in self._bias)
            logits = logits.index_put((tokens,), values.to(logits.dtype), accumulate=True)
        if self._generator is None:
            # numpy's search is several times faster than torch's on a CPU; both take the first of equals, and NaN
            # before any number
            at = int(logits.numpy().argmax() if logits.device.type == "cpu" else logits.argmax())
            _require_finite(float(logits[at]))
            return at
        scores = logits.double().cpu() / self.sampling.temperature
        _require_finite(float(scores.max()))
        return self._draw(*self._candidates(scores))

    def _candidates(self, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        """Tokens that may come, as probabilities that need not sum to one, and which those are (None: all in order)."""
        s = self.sampling
        cut = s.top_p < 1 or s.min_p > 0
        if 0 < s.top_k < len(scores):
            values, order = scores.topk(s.top_k)
            chances = values.softmax(-1)
            return (chances[: self._kept(chances)], order) if cut else (chances, order)
        if not cut:
            return scores.softmax(-1), None
        total = scores.logsumexp(-1)
        for count in (_LIKELIEST, len(scores)):
            if count < len(scores):
                values, order = scores.topk(count)
            else:
                values, order = scores.sort(descending=True, stable=True)
            chances = (values - total).exp()
            kept = self._kept(chances)
            if kept < count or count >= len(scores):
                break
        return chances[:kept], order

    def _kept(self, chances: Tensor) -> int:
        """How many of the likeliest may come. At least the first: nothing lies before it."""
        kept = chances >= self.sampling.min_p * chances[0]
        if self.sampling.top_p < 1:
            kept &= chances.cumsum(-1) - chances < self.sampling.top_p
        return max(1, int(kept.sum()))

    def _draw(self, chances: Tensor, order: Tensor | None) -> int:
        reached = chances.cumsum(-1)
        point = torch.rand(1, dtype=torch.float64, generator=self._generator) * reached[-1]
        at = min(int(torch.searchsorted(reached, point, right=True)), len(chances) - 1)
        return at if order is None else int(order[at])


def _require_finite(largest: float) -> None:
    """Of NaN the same token would come for ever, as if the model had said so."""
    if not math.isfinite(largest):
        raise OddrankError(
            f"The model's largest logit is {largest}, so there is no token to choose. Some weight or scale of the "
            "checkpoint is not a finite number, or a value exceeds what the run computes in: try --dtype fp32, or "
            "download the checkpoint again."
        )
