"""Oddrank's own models of the mixtures of experts, every rank in one process, against transformers' float64 logits.

The runtime keeps rotary angles in float32 as transformers does; here both keep them in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from family_models import FAMILIES
from family_reference import transformers_logits
from family_subject import DIFFERENT, SAME, Subjected, distance
from hybrid.mutations import mutations
from hybrid.random_plans import equal_plan, ragged_plan
from msgspec import structs
from proof.tiny import F64, Memory

from oddrank.errors import OddrankError
from oddrank.layout.executors import RUNTIME
from oddrank.layout.layouts import Layout
from oddrank.layout.plan import Plan
from oddrank.layout.solver import Request
from oddrank.planner import plan_subject
from oddrank.runtime.experts import Experts
from oddrank.runtime.layers.attention import RotaryAttention
from oddrank.runtime.models import Llama
from oddrank.runtime.models.glm4_moe import GroupRouter
from oddrank.runtime.models.gpt_oss import ClampedUnit
from oddrank.runtime.models.llama import full_logits
from oddrank.runtime.models.mixtral import Router
from oddrank.runtime.parallel import Group, LocalGroup
from oddrank.runtime.precision import Precision
from oddrank.runtime.step import Step
from oddrank.runtime.worker import load_rank

RUN = [family for family in FAMILIES if family in RUNTIME.families]


class InMemory(Memory):
    """A checkpoint as the runtime's loader sees one."""

    def __init__(self, m: Subjected) -> None:
        super().__init__(m.weights)
        self.config, self.tensors = m.config, dict.fromkeys(m.weights)

    def release(self, names: Sequence[str]) -> None:
        pass


def on_ranks(m: Subjected, plan: Plan, work: Callable[[Llama], Any], dtype: str = "fp64") -> list[Any]:
    """work(the rank's model) as every rank, in lockstep."""
    checkpoint: Any = InMemory(m)

    def rank(group: Group) -> Any:
        return work(load_rank(plan, checkpoint, group, Precision.of(dtype))[0])

    angles = torch.Tensor.double if dtype == "fp64" else torch.Tensor.float
    with torch.inference_mode(), mock.patch.object(torch.Tensor, "float", angles):
        return LocalGroup.run(plan.tp, rank)


def logits(m: Subjected, plan: Plan) -> F64:
    """The same on every rank."""
    each = on_ranks(m, plan, lambda model: full_logits(model, m.prompt))
    assert all(torch.equal(one, each[0]) for one in each)
    return each[0].numpy()  # type: ignore[no-any-return]


def solved(m: Subjected, tp: int, layout: str = "auto", **more: Any) -> Plan:
    return plan_subject(m.subject, Request(tp=tp, layout=layout, **more)).plan


@pytest.fixture(scope="module")
def made() -> Iterator[Callable[[str], Subjected]]:
    known: dict[str, Subjected] = {}

    def of(family: str) -> Subjected:
        if family not in known:
            known[family] = Subjected(family, 3)
        return known[family]

    yield of


@pytest.mark.parametrize("tp", [1, 2, 3])
@pytest.mark.parametrize("family", RUN)
def test_the_solver_s_plans(family: str, tp: int, made: Callable[[str], Subjected]) -> None:
    m = made(family)
    for layout in ("ragged", "pad", "replicate"):
        assert distance(logits(m, solved(m, tp, layout)), m.reference) < SAME, layout
    if tp > 1:
        shares = tuple(range(tp, 0, -1))
        assert distance(logits(m, solved(m, tp, shares=shares)), m.reference) < SAME


@pytest.mark.parametrize("seed", range(20, 24))
@pytest.mark.parametrize("family", RUN)
def test_random_layouts_and_what_the_proof_refuses(family: str, seed: int) -> None:
    """Other configs of the family: their switches, windows, groups of experts."""
    m = Subjected(family, seed)
    for number in range(4):
        plan = (ragged_plan, equal_plan)[number % 2](m.subject, m.rng, 1 + number % 3)
        assert not m.failed(plan)
        assert distance(logits(m, plan), m.reference) < SAME, (m.where, number)
        kinds = list(mutations(m.subject.model).values())
        broken = kinds[int(m.rng.integers(len(kinds)))](plan, m.rng, m.prompt)
        if broken is None or broken.check not in m.failed(broken.plan):
            continue
        if broken.plan.owners != plan.owners and {*broken.plan.owners} == {*plan.owners}:
            continue  # an owner named twice: a rank of the runtime asks whether it owns a term, and adds it once
        try:
            far = distance(logits(m, broken.plan), m.reference)
        except (OddrankError, KeyError):  # a vocabulary row, an owner or an expert that is not once among the ranks
            continue
        assert far > DIFFERENT, (m.where, number, broken.check)


def by_steps(m: Subjected, counts: Sequence[int]) -> Callable[[Llama], torch.Tensor]:
    """Logits of the prompt, so many tokens of it at a time."""

    def work(model: Llama) -> torch.Tensor:
        cache, rows, at = model.new_cache(1), [], 0
        for count in counts:
            step = Step.of([(0, m.prompt[at : at + count], at)], "cpu")
            rows.append(model.logits(model(step, cache)))
            at += count
        return torch.cat(rows)

    return work


@pytest.mark.parametrize("family", RUN)
def test_prompts_in_chunks_and_cached_steps(family: str, made: Callable[[str], Subjected]) -> None:
    m = made(family)
    for tp in (1, 3):
        rows = on_ranks(m, solved(m, tp), by_steps(m, [3, 2, 1, 1, 1]))[0]
        assert distance(rows.numpy(), m.reference) < SAME


@pytest.mark.parametrize("family", RUN)
def test_sequences_of_different_lengths_in_one_step(family: str, made: Callable[[str], Subjected]) -> None:
    m = made(family)
    texts = [m.prompt, m.prompt[2:6]]
    wanted = [m.reference, transformers_logits(m.config, m.weights, texts[1])]

    def work(model: Llama) -> list[torch.Tensor]:
        cache = model.new_cache(2)
        rows = [model.logits(model(Step.of([(i, t[:-2], 0) for i, t in enumerate(texts)], "cpu"), cache)[[-3, -1]])]
        for back in (2, 1):
            step = Step.of([(i, [t[-back]], len(t) - back) for i, t in enumerate(texts)], "cpu")
            assert step.decode
            rows.append(model.logits(model(step, cache)))
        return rows

    for tp in (1, 2):
        rows = on_ranks(m, solved(m, tp), work)[0][1:]
        for i, want in enumerate(wanted):
            assert distance(torch.stack([r[i] for r in rows]).numpy(), want[-2:]) < SAME


@pytest.mark.parametrize("family", RUN)
def test_compiled_operations_in_fp32(family: str, made: Callable[[str], Subjected]) -> None:
    m = made(family)
    for tp in (1, 2):
        for counts in ([len(m.prompt)], [3, 2, 1, 1, 1]):
            rows = on_ranks(m, solved(m, tp), by_steps(m, counts), "fp32")[0]
            assert distance(rows.double().numpy(), m.reference) < 1e-4 * np.abs(m.reference).max()


@pytest.mark.parametrize("family", RUN)
def test_two_sums_a_layer_and_one_for_the_embedding(family: str, made: Callable[[str], Subjected]) -> None:
    m = made(family)

    def work(model: Llama) -> int:
        before = model.group.counts.all_reduce
        full_logits(model, m.prompt)
        return model.group.counts.all_reduce - before

    assert set(on_ranks(m, solved(m, 3), work)) == {2 * m.config["num_hidden_layers"] + 1}


# -- faults that keep every shape --------------------------------------------------------------------------------------


def _of(kind: type, do: Callable[[Any], None]) -> Callable[[Llama], None]:
    def change(model: Llama) -> None:
        for module in model.modules():
            if isinstance(module, kind):
                do(module)

    return change


def _replaced(**fields: Any) -> Callable[[Experts], None]:
    def change(experts: Experts) -> None:
        experts._kernel = experts._kernel._replace(**fields)
        experts._backend = None

    return change


def _halves(both: torch.Tensor) -> torch.Tensor:
    """gpt-oss's unit where gate and up were one after another."""
    order = torch.cat(both.chunk(2, -1), -1).unflatten(-1, (2, -1)).transpose(-1, -2).flatten(-2)
    return ClampedUnit(1.702, 7.0)(order)


def _blind(attention: RotaryAttention) -> None:
    attention.sinks = None


def _far(attention: RotaryAttention) -> None:
    attention.attention.window = None


def _router(**fields: Any) -> Callable[[Any], None]:
    def change(router: Any) -> None:
        if "config" in vars(router):
            router.config = structs.replace(router.config, **fields)
        else:
            vars(router).update(fields)

    return change


def _uncorrected(router: GroupRouter) -> None:
    router.correction.data.zero_()


FAULTS = {
    "every rank adds the experts' biases": ("gpt_oss", _of(Experts, _replaced(adds_bias=True))),
    "no rank adds them": ("gpt_oss", _of(Experts, _replaced(adds_bias=False))),
    "gate and up in halves": ("gpt_oss", _of(Experts, _replaced(unit=_halves))),
    "the usual unit": ("gpt_oss", _of(Experts, _replaced(unit=None))),
    "another limit": ("gpt_oss", _of(Experts, _replaced(unit=ClampedUnit(1.702, 0.1)))),
    "no sinks": ("gpt_oss", _of(RotaryAttention, _blind)),
    "no windows": ("gpt_oss", _of(RotaryAttention, _far)),
    "no scale": ("glm4_moe", _of(GroupRouter, _router(scale=1.0))),
    "weights as they are, or not": ("glm4_moe", _of(GroupRouter, lambda r: _router(normed=not r.config.normed)(r))),
    "no correction": ("glm4_moe", _of(GroupRouter, _uncorrected)),
    "weights made to sum to one, or not": ("qwen3_moe", _of(Router, lambda r: _router(normed=not r.normed)(r))),
    "one expert fewer": ("mixtral", _of(Router, _router(chosen=1))),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_faults_are_seen(fault: str) -> None:
    family, change = FAULTS[fault]
    drawn = (FAMILIES[family](np.random.default_rng(seed)) for seed in range(99))
    m = Subjected(family, 5, next(c for c in drawn if c["num_experts_per_tok"] > 1))

    def work(model: Llama) -> torch.Tensor:
        change(model)
        return full_logits(model, m.prompt)

    assert distance(on_ranks(m, solved(m, 2), work)[0].numpy(), m.reference) > DIFFERENT


def test_a_rank_without_channels_may_own_the_biases() -> None:
    m = Subjected("gpt_oss", 3)
    plan = solved(m, 2)
    width = m.config["intermediate_size"]
    everything = Layout.of("moe", [list(range(width)), []])
    layouts = tuple(everything if la.axis == "moe" else la for la in plan.layouts)
    owners = tuple((name, 1) for name, _ in plan.owners)
    plan = structs.replace(plan, layouts=layouts, owners=owners)
    assert distance(logits(m, plan), m.reference) < SAME
