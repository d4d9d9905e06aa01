"""Two sets of logits side by side: how far apart, and does it matter."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

Logits = npt.NDArray[np.float64]


class Divergence(msgspec.Struct, frozen=True):
    """The first position whose greedy token differs. margin: the reference's logit of its own choice less that of
    the other's choice; next to the difference of the logits it tells a near tie from a fault."""

    prompt: int
    position: int
    reference_token: int
    other_token: int
    margin: float


class Comparison(msgspec.Struct, frozen=True):
    """max_abs: largest |other - reference| over all prompts, positions and tokens, in logits. max_rel: that over the
    largest |reference| of the same prompt. kl_mean, kl_max: KL(reference || other) per position, in nats.
    greedy_agreement: share of positions with the same argmax. positions: how many were compared."""

    max_abs: float
    max_rel: float
    kl_mean: float
    kl_max: float
    greedy_agreement: float
    positions: int
    first_divergence: Divergence | None


def log_softmax(logits: Logits) -> Logits:
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)), dtype=np.float64)


def compare(reference: Sequence[Logits], other: Sequence[Logits]) -> Comparison:
    """One [tokens, vocab] array a prompt on each side. Raises ValueError where shapes differ or a logit of either
    side is not a number."""
    max_abs = max_rel = kl_max = kl_sum = 0.0
    agreed = positions = 0
    first: Divergence | None = None
    for number, (r, o) in enumerate(zip(reference, other, strict=True)):
        if r.shape != o.shape:
            raise ValueError(f"prompt {number}: logits {list(o.shape)} against {list(r.shape)}")
        for logits, whose in ((o, ""), (r, " of the reference")):  # max() below would pass over a NaN
            if not np.isfinite(logits).all():
                raise ValueError(f"prompt {number}: {int((~np.isfinite(logits)).sum())} logits{whose} are not finite")
        difference = float(np.abs(o - r).max())
        max_abs = max(max_abs, difference)
        max_rel = max(max_rel, difference / max(float(np.abs(r).max()), 1e-300))
        lr, lo = log_softmax(r), log_softmax(o)
        kl = (np.exp(lr) * (lr - lo)).sum(axis=-1)
        kl_sum, kl_max = kl_sum + float(kl.sum()), max(kl_max, float(kl.max()))
        mine, theirs = r.argmax(axis=-1), o.argmax(axis=-1)
        agreed += int((mine == theirs).sum())
        positions += len(mine)
        if first is None and (mine != theirs).any():
            at = int(np.flatnonzero(mine != theirs)[0])
            a, b = int(mine[at]), int(theirs[at])
            first = Divergence(number, at, a, b, float(r[at, a] - r[at, b]))
    return Comparison(max_abs, max_rel, kl_sum / positions, kl_max, agreed / positions, positions, first)
