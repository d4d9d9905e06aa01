"""The same experiment through oddrank's own runtime: every rank in one process, in lockstep, in float64.

The runtime keeps rotary angles in float32 as transformers does; here both keep them in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, ClassVar
from unittest import mock

import pytest
import torch
from layout.shapes import VARIANTS
from proof.mutations import MUTATIONS
from proof.random_plans import equal_plan, ragged_plan
from proof.test_experiment import DIFFERENT, SAME, Subjected, distance
from proof.tiny import Memory

from oddrank.layout.plan import Plan
from oddrank.layout.solver import Request
from oddrank.planner import plan_subject
from oddrank.runtime.worker import local_logits

# The runtime asks each rank whether it is the owner, and refuses a vocabulary row that is not on one rank.
UNSPEAKABLE = ("no_owner", "two_owners", "owner_beyond", "drop_row", "duplicate_row")


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class _Loaded(Memory):
    """A checkpoint in memory, as the runtime's loader sees one."""

    tensors: ClassVar[dict[str, object]] = {}  # no stored copy of a tied head

    def __init__(self, m: Subjected) -> None:
        super().__init__(m.weights)
        self.config = m.config

    def release(self, names: list[str]) -> None:
        pass


def by_runtime(m: Subjected, plan: Plan) -> float:
    checkpoint: Any = _Loaded(m)
    with mock.patch.object(torch.Tensor, "float", torch.Tensor.double):
        got = local_logits(plan, checkpoint, m.prompt, "fp64")
    return distance(got.numpy(), m.reference)


def experiment(variant: str, seed: int, layouts: int) -> None:
    m = Subjected(variant, seed)
    for number in range(layouts):
        plan = (ragged_plan, equal_plan)[number % 2](m.subject, m.rng)
        where = f"{m.where}, layout {number} ({plan.executor}, {plan.tp} ranks)"
        assert not m.failed(plan), where
        assert by_runtime(m, plan) < SAME, f"{where}: accepted, and the runtime's logits differ"
        mutate = MUTATIONS[int(m.rng.integers(len(MUTATIONS)))]
        broken = mutate(plan, m.rng, m.prompt)
        if broken is None or mutate.__name__ in UNSPEAKABLE:
            continue
        assert broken.check in m.failed(broken.plan), f"{where}, {mutate.__name__}"
        assert by_runtime(m, broken.plan) > DIFFERENT, f"{where}, {mutate.__name__}: the runtime agrees"


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("variant", VARIANTS)
def test_random_layouts_in_the_runtime(variant: str, seed: int) -> None:
    experiment(variant, seed, 5)


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
def test_many_random_layouts_in_the_runtime(variant: str) -> None:
    for seed in range(1000, 1020):
        experiment(variant, seed, 10)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_solver_s_plans_in_the_runtime(variant: str) -> None:
    m = Subjected(variant, 4)
    for tp in range(1, 9):
        for layout in ("ragged", "pad", "replicate"):
            if tp > m.config["num_attention_heads"]:
                continue
            planned = plan_subject(m.subject, Request(tp=tp, layout=layout))
            assert by_runtime(m, planned.plan) < SAME, (variant, tp, layout)
