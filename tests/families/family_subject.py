"""One tiny model of a family with its reference logits, and the ways to compute them from a plan."""

from __future__ import annotations

import zlib
from unittest import mock

import family_interpreter
import msgspec
import numpy as np
from family_models import FAMILIES
from family_reference import Config, random_weights, tensor_shapes, transformers_logits, unchecked
from layout.shapes import Tensor
from proof.tiny import F64, Memory, Weights

from oddrank.checkpoint.config import ConfigView
from oddrank.families import families, family_of
from oddrank.layout.census import take_census
from oddrank.layout.plan import Plan, config_digest
from oddrank.layout.proof import prove
from oddrank.layout.solver import Request
from oddrank.planner import KV_ITEMSIZE, Subject, plan_subject
from oddrank.transform.config import virtual_config
from oddrank.transform.recipe import materialize, recipes

SAME, DIFFERENT = 1e-10, 1e-6
APART = 1e-5
"""Least gap between the last choice of a router and the first that it did not choose: far more than rounding."""


def subject_of(c: Config, weights: Weights) -> Subject:
    """A checkpoint of this config and these tensors, as far as planning needs it."""
    view = ConfigView(c)
    model = family_of(view).build(view, "model.")
    census = take_census(model, {n: Tensor("F64", w.shape) for n, w in weights.items()})
    assert not census.problems, census.problems
    return Subject("tiny", config_digest(c), model, census, KV_ITEMSIZE["float64"])


class Subjected:
    """A model of a random config, or of `config`. Its routers have no near ties on the prompt."""

    def __init__(self, family: str, seed: int, config: Config | None = None, *, tokens: int = 8) -> None:
        self.rng = np.random.default_rng([seed, zlib.crc32(family.encode())])
        self.where = f"{family}, seed {seed}"
        self.config: Config = FAMILIES[family](self.rng) if config is None else config
        shapes = tensor_shapes(self.config)
        while True:
            self.weights: Weights = random_weights(self.config, shapes, self.rng)
            self.prompt: list[int] = self.rng.integers(0, self.config["vocab_size"], tokens).tolist()
            self.subject = subject_of(self.config, self.weights)
            gaps: list[float] = []
            whole = plan_subject(self.subject, Request(tp=1)).plan
            alone = family_interpreter.logits(self.config, whole, self.weights, self.prompt, gaps=gaps)
            if min(gaps, default=1.0) > APART:
                break
        self.reference: F64 = transformers_logits(self.config, self.weights, self.prompt)
        assert distance(alone, self.reference) < SAME, f"{self.where}: the interpreter is not transformers"

    def failed(self, plan: Plan) -> dict[str, str]:
        """Failed checks by name."""
        return {c.name: c.detail for c in prove(plan, self.subject.census) if not c.ok}

    def by_ranks(self, plan: Plan) -> float:
        """How far the logits of all ranks together are from the reference; infinite where one is NaN or missing."""
        return distance(family_interpreter.logits(self.config, plan, self.weights, self.prompt), self.reference)

    def by_transformers(self, plan: Plan) -> float:
        """The same for the virtual checkpoint, in transformers."""
        config, weights = virtual(plan, self.config, self.weights)
        with unchecked(config):
            return distance(transformers_logits(config, weights, self.prompt), self.reference)


def virtual(plan: Plan, config: Config, weights: Weights) -> tuple[Config, Weights]:
    """The virtual checkpoint: its config, as its own class would read it, and its weights."""
    memory = Memory(weights)
    made = {n: materialize(r, memory.array(n)).view(np.float64) for n, r in recipes(plan, plan.virtual()).items()}
    family = families()[plan.model.family]
    as_it_is = msgspec.structs.replace(family, respell=lambda c, reader: c)
    with mock.patch.dict(families(), {family.name: as_it_is}):
        return virtual_config(plan, config, "transformers"), made


def distance(a: F64, b: F64) -> float:
    worst = np.abs(a - b).max()
    return float("inf") if np.isnan(worst) else float(worst)
