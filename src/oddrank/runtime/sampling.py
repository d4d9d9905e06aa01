"""Choosing tokens from logits.

Those of a whole batch at once, by compiled operations where there are any; each as it would be chosen alone. Torch is
the reference for them, and takes what they do not.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from oddrank.errors import OddrankError
from oddrank.native import choosing
from oddrank.native.operations import compiled
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
        (found,) = choose(logits[None], [self])
        if isinstance(found, OddrankError):
            raise found
        return found

    def biased(self, logits: Tensor) -> Tensor:
        """The logits [vocab] with what is added to them; the same tensor where that is nothing."""
        if self._bias is None:
            return logits
        tokens, values = (t.to(logits.device) for t in self._bias)
        return logits.index_put((tokens,), values.to(logits.dtype), accumulate=True)

    def how(self) -> choosing.How:
        """The next draw."""
        s = self.sampling
        if self._generator is None:
            return choosing.How()
        return choosing.How(s.temperature, s.top_p, s.min_p, float(self._point()), s.top_k)

    def with_torch(self, logits: Tensor) -> int:
        """Of biased logits [vocab]."""
        if self._generator is None:
            at = int(logits.argmax())
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
        at = min(int(torch.searchsorted(reached, self._point() * reached[-1], right=True)), len(chances) - 1)
        return at if order is None else int(order[at])

    def _point(self) -> Tensor:
        return torch.rand(1, dtype=torch.float64, generator=self._generator)


def choose(logits: Tensor, samplers: Sequence[Sampler]) -> list[int | OddrankError]:
    """A token for each row of logits [sequences, vocab], any float type; an error for those whose largest logit is no
    finite number."""
    library = compiled(logits)
    biased = [sampler.biased(row) for row, sampler in zip(logits.contiguous().unbind(), samplers, strict=True)]
    if library is not None:
        tokens, largest = choosing.choose(library, biased, [s.how() for s in samplers], torch.get_num_threads())
    elif all(sampler.sampling.temperature == 0 for sampler in samplers):
        scores = torch.stack(biased)
        best = scores.argmax(-1)
        tokens, largest = best.tolist(), scores.gather(1, best[:, None])[:, 0].tolist()
        tokens = [token if math.isfinite(most) else -1 for token, most in zip(tokens, largest, strict=True)]
    else:
        return [_tried(row, sampler) for row, sampler in zip(biased, samplers, strict=True)]
    return [_not_finite(most) if token < 0 else token for token, most in zip(tokens, largest, strict=True)]


def likeliest(logits: Tensor, tokens: Sequence[int], top: int) -> tuple[list[float], list[list[tuple[int, float]]]]:
    """Of each row of logits [rows, vocab]: the logprob of a token, in nats, and the `top` likeliest tokens with theirs,
    the likeliest first."""
    library = compiled(logits)
    if library is not None and len(logits):
        return choosing.likeliest(library, logits.contiguous().unbind(), tokens, top, torch.get_num_threads())
    lines = torch.log_softmax(logits if logits.dtype == torch.float64 else logits.float(), -1)
    told = lines.gather(1, torch.tensor(tokens, dtype=torch.int64, device=lines.device)[:, None])[:, 0].tolist()
    if top == 0:
        return told, [[] for _ in tokens]
    values, ids = lines.topk(min(top, lines.shape[-1]), -1)
    return told, [list(zip(i, v, strict=True)) for i, v in zip(ids.tolist(), values.tolist(), strict=True)]


def _tried(logits: Tensor, sampler: Sampler) -> int | OddrankError:
    try:
        return sampler.with_torch(logits)
    except OddrankError as error:
        return error


def _require_finite(largest: float) -> None:
    if not math.isfinite(largest):
        raise _not_finite(largest)


def _not_finite(largest: float) -> OddrankError:
    """Of NaN the same token would come for ever, as if the model had said so."""
    return OddrankError(
        f"The model's largest logit is {largest}, so there is no token to choose. Some weight or scale of the "
        "checkpoint is not a finite number, or a value exceeds what the run computes in: try --dtype fp32, or "
        "download the checkpoint again."
    )
