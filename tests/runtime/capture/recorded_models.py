"""Logits of every decode step of an engine that records and of one that does not."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from oddrank.runtime.engine import Engine
from oddrank.runtime.models.llama import Llama
from oddrank.runtime.request import Sampling


class Watched(Engine):
    """Keeps the logits of each decode step."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        steps, self.logits = self.steps, []
        compute = steps.__call__

        class Watch:
            def __call__(_self, *given: Any) -> torch.Tensor:  # noqa: N805
                found = compute(*given)
                self.logits.append(found.clone())
                return found

            def __getattr__(_self, name: str) -> Any:  # noqa: N805
                return getattr(steps, name)

        self.steps = Watch()  # type: ignore[assignment]


def both_ways(
    model: Llama, prompts: Sequence[Sequence[int]], samplings: Sequence[Sampling], **options: Any
) -> dict[str, Any]:
    """The same calls of an engine that records and one that does not: whether steps and tokens agree to the bit."""
    engines = [Watched(model, record=record, **options) for record in (True, False)]
    texts = [[[c.token_ids for c in e.generate(prompts, s)] for s in samplings] for e in engines]
    recorded, plain = (e.logits for e in engines)
    assert all(torch.isfinite(step).all() for step in plain)
    same = [torch.equal(a, b) for a, b in zip(recorded, plain, strict=True)]
    return {
        "steps": len(same),
        "different": same.count(False),
        "replayed": engines[0].steps.replayed,
        "not recorded": engines[1].steps.replayed,
        "refused": sorted(engines[0].steps._refused),
        "texts equal": texts[0] == texts[1],
    }
