"""One tiny hybrid model with its reference logits, and the ways to compute them from a plan."""

from __future__ import annotations

import zlib

import numpy as np
from hybrid import interpreter
from hybrid.tiny import (
    Config,
    is_moe,
    random_config,
    random_weights,
    tensor_shapes,
    text_of,
    tiny_subject,
    transformers_logits,
)
from proof.tiny import F64, Memory, Weights

from oddrank.layout.plan import Plan
from oddrank.layout.proof import prove
from oddrank.layout.solver import Request
from oddrank.planner import plan_subject
from oddrank.transform.config import virtual_config
from oddrank.transform.recipe import materialize, recipes

SAME, DIFFERENT = 1e-10, 1e-6
APART = 1e-5
"""Least relative gap between the last expert chosen and the first that is not: far more than rounding."""


class Subjected:
    """A model of a random config, or of `config`. Its router has no near ties on the prompt."""

    def __init__(
        self, family: str, seed: int, config: Config | None = None, *, stacked: bool | None = None, tokens: int = 8
    ) -> None:
        self.rng = np.random.default_rng([seed, zlib.crc32(family.encode())])
        self.where = f"{family}, seed {seed}"
        self.config: Config = random_config(family, self.rng) if config is None else config
        stacked = bool(self.rng.random() < 0.5) if stacked is None else stacked
        shapes = tensor_shapes(self.config, stacked=stacked)
        vocab = text_of(self.config)["vocab_size"] - 6  # the last few stand for images
        while True:
            self.weights: Weights = random_weights(shapes, self.rng)
            self.prompt: list[int] = self.rng.integers(0, vocab, tokens).tolist()
            self.subject = tiny_subject(self.config, self.weights)
            assert not self.subject.census.problems
            gaps: list[float] = []
            whole = plan_subject(self.subject, Request(tp=1)).plan
            alone = interpreter.logits(self.config, whole, self.weights, self.prompt, gaps=gaps)
            if min(gaps, default=1.0) > APART:
                break
        assert bool(gaps) == is_moe(self.config)
        self.reference: F64 = transformers_logits(self.config, self.weights, self.prompt)
        assert distance(alone, self.reference) < SAME, f"{self.where}: the interpreter is not transformers"

    def failed(self, plan: Plan) -> dict[str, str]:
        """Failed checks by name."""
        return {c.name: c.detail for c in prove(plan, self.subject.census) if not c.ok}

    def by_ranks(self, plan: Plan) -> float:
        """How far the logits of all ranks together are from the reference; infinite where one is NaN or missing."""
        return distance(interpreter.logits(self.config, plan, self.weights, self.prompt), self.reference)

    def by_transformers(self, plan: Plan) -> float:
        """The same for the virtual checkpoint, in transformers."""
        config, weights = virtual(plan, self.config, self.weights)
        return distance(transformers_logits(config, weights, self.prompt), self.reference)


def virtual(plan: Plan, config: Config, weights: Weights) -> tuple[Config, Weights]:
    """The virtual checkpoint: its config and its weights."""
    memory = Memory(weights)
    made = {n: materialize(r, memory.array(n)).view(np.float64) for n, r in recipes(plan, plan.virtual()).items()}
    return virtual_config(plan, config, "transformers"), made


def distance(a: F64, b: F64) -> float:
    worst = np.abs(a - b).max()
    return float("inf") if np.isnan(worst) else float(worst)
