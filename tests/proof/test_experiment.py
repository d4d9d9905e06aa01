"""The proof, proven: over random layouts of every family, what it accepts computes what transformers computes, and
what it refuses does not.

Accepted: float64 logits equal transformers' on the stock checkpoint to 1e-10, both as the virtual checkpoint in
transformers and rank by rank. Refused: the logits differ by more than 1e-6, unless only the storage or the executor
check refused. docs/proof.md says what this establishes.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from layout.shapes import VARIANTS, Config, tensor_table
from proof import interpreter
from proof.mutations import MUTATIONS, partners, random_edit, slots, with_slots
from proof.random_plans import equal_plan, ragged_plan, tiny_subject
from proof.tiny import F64, Memory, Weights, random_config, random_weights, transformers_logits

from oddrank.errors import OddrankError
from oddrank.formats import formats
from oddrank.geometry import Along, Concat, Dim, Role
from oddrank.layout.census import take_census
from oddrank.layout.plan import Plan
from oddrank.layout.proof import prove
from oddrank.layout.solver import Request
from oddrank.planner import Subject, plan_subject
from oddrank.transform.config import virtual_config
from oddrank.transform.recipe import materialize, recipes

SAME, DIFFERENT = 1e-10, 1e-6
PER_LAYOUT = 6  # mutations tried on each layout
Rng = np.random.Generator


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Tiny matrices: threads only get in each other's way."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Subjected:
    """One tiny model with its reference logits."""

    def __init__(self, variant: str, seed: int) -> None:
        self.rng = np.random.default_rng([seed, zlib.crc32(variant.encode())])
        self.where = f"variant {variant}, seed {seed}"
        self.config: Config = random_config(variant, self.rng)
        self.weights: Weights = random_weights(self.config, self.rng)
        self.subject: Subject = tiny_subject(self.config)
        self.prompt: list[int] = self.rng.integers(0, self.config["vocab_size"], 7).tolist()
        self.reference: F64 = transformers_logits(self.config, self.weights, self.prompt)
        assert not self.subject.census.problems

    def failed(self, plan: Plan) -> dict[str, str]:
        """Failed checks by name."""
        return {c.name: c.detail for c in prove(plan, self.subject.census) if not c.ok}

    def by_ranks(self, plan: Plan) -> float:
        """How far the logits of all ranks together are from the reference; infinite where a row is missing."""
        got = interpreter.logits(self.config, plan, self.weights, self.prompt)
        return distance(got, self.reference)

    def by_transformers(self, plan: Plan) -> float:
        """The same for the virtual checkpoint, in transformers."""
        config, weights = virtual(plan, self.config, self.weights)
        return distance(transformers_logits(config, weights, self.prompt), self.reference)


def virtual(plan: Plan, config: Config, weights: Weights, reader: str = "transformers") -> tuple[Config, Weights]:
    """The virtual checkpoint: its config and its weights."""
    memory = Memory(weights)
    made = {
        name: materialize(recipe, memory.array(name)).view(np.float64)
        for name, recipe in recipes(plan, plan.virtual()).items()
    }
    return virtual_config(plan, config, reader), made


def distance(a: F64, b: F64) -> float:
    worst = np.abs(a - b).max()
    return float("inf") if np.isnan(worst) else float(worst)


def accepted(m: Subjected, plan: Plan, where: str) -> None:
    failed = m.failed(plan)
    assert not failed, f"{where}: a sound plan was refused: {failed}"
    assert m.by_ranks(plan) < SAME, f"{where}: accepted, and the ranks' logits differ"
    if plan.executor_facts().equal_ranks:
        assert m.by_transformers(plan) < SAME, f"{where}: accepted, and the virtual checkpoint's logits differ"


def mutated(m: Subjected, plan: Plan, where: str, tally: dict[str, int]) -> None:
    """Mutations, some at random, are each refused by their own check and change the logits."""
    through_transformers = plan.executor == "vllm"
    for number in m.rng.permutation(len(MUTATIONS))[:PER_LAYOUT]:
        mutate = MUTATIONS[number]
        broken = mutate(plan, m.rng, m.prompt)
        if broken is None:
            continue
        at = f"{where}, {mutate.__name__}"
        failed = m.failed(broken.plan)
        assert broken.check in failed, f"{at}: not refused by {broken.check}, only by {failed}"
        assert m.by_ranks(broken.plan) > DIFFERENT, f"{at}: refused, and the logits are the same"
        if through_transformers and not broken.across_ranks:
            through_transformers = False  # one of them is enough
            assert m.by_transformers(broken.plan) > DIFFERENT, f"{at}: refused, and transformers agrees"
        tally[mutate.__name__] = tally.get(mutate.__name__, 0) + 1


def edited(m: Subjected, plan: Plan, where: str) -> bool:
    """One to three random changes: accepted exactly if the logits are the same. True if accepted.

    The one exception is a query head too many in a slot that reads a dummy KV slot: its values are zero, so it
    adds nothing. The proof refuses it nevertheless. Such slots are taken for the dummies they are.
    """
    for _ in range(int(m.rng.integers(1, 4))):
        plan = random_edit(plan, m.rng, m.prompt)
    failed = m.failed(plan)
    if failed and set(failed) <= {"storage", "executor"}:
        return False
    inert = without_inert_queries(plan)
    wrong = {k: v for k, v in m.failed(inert).items() if k not in ("storage", "executor")}
    far = m.by_ranks(plan)
    if wrong:
        assert failed, f"{where}: accepted with inert queries, refused without: {wrong}"
        assert far > DIFFERENT, f"{where}: refused ({failed}), and the logits are the same"
    else:
        assert far < SAME, f"{where}: accepted, and the logits differ by {far}"
    return not failed


def without_inert_queries(plan: Plan) -> Plan:
    """The same plan with a dummy for every query that reads a dummy KV slot."""
    q, kv, maps = slots(plan, "q_heads"), slots(plan, "kv_heads"), partners(plan)
    return with_slots(
        plan,
        "q_heads",
        [[x if kv[r][at] >= 0 else -1 for x, at in zip(held, maps[r], strict=True)] for r, held in enumerate(q)],
    )


def experiment(variant: str, seed: int, layouts: int, tally: dict[str, int]) -> None:
    m = Subjected(variant, seed)
    makers: tuple[Callable[..., Plan], ...] = (equal_plan, ragged_plan)
    for number in range(layouts):
        plan = makers[number % 2](m.subject, m.rng)
        where = f"{m.where}, layout {number} ({plan.executor}, {plan.tp} ranks)"
        accepted(m, plan, where)
        mutated(m, plan, where, tally)
        for _ in range(2):
            edited(m, plan, where)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("variant", VARIANTS)
def test_random_layouts(variant: str, seed: int) -> None:
    experiment(variant, seed, 8, {})


@pytest.mark.long
@pytest.mark.parametrize("block", range(12))
@pytest.mark.parametrize("variant", VARIANTS)
def test_thousands_of_random_layouts(variant: str, block: int) -> None:
    for seed in range(1000 + 5 * block, 1005 + 5 * block):
        experiment(variant, seed, 10, {})


def test_every_mutation_and_both_verdicts_on_edits_occur() -> None:
    """The experiment is no formality: each mutation finds its place, and random edits are accepted and refused."""
    tally: dict[str, int] = {}
    for seed in range(100, 103):
        experiment("llama+qkv_bias+o_bias+mlp_bias", seed, 10, tally)
    assert set(tally) == {mutate.__name__ for mutate in MUTATIONS}
    m = Subjected("qwen2", 100)
    verdicts = [edited(m, ragged_plan(m.subject, m.rng), m.where) for _ in range(40)]
    assert 3 <= sum(verdicts) <= 37


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_dummy_that_is_not_silent(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dummies filled with ones are refused by silence, and change the logits."""
    m = Subjected(variant, 0)
    plans = [maker(m.subject, m.rng) for maker in (equal_plan, ragged_plan) for _ in range(6)]
    plans = [p for p in plans if p.layout("mlp").total() > sum(p.layout("mlp").real())]
    assert plans
    dense = formats()["dense"]
    one = int(np.float64(1.0).view(np.uint64))
    loud = msgspec.structs.replace(
        dense, stored=(msgspec.structs.replace(dense.stored[0], row_fill=one, column_fill=one),)
    )
    for plan in plans:
        assert m.by_ranks(plan) < SAME
    monkeypatch.setitem(formats(), "dense", loud)
    for plan in plans:
        assert "silence" in m.failed(plan)
        assert m.by_ranks(plan) > DIFFERENT
    equal = next(p for p in plans if p.executor == "vllm")
    assert m.by_transformers(equal) > DIFFERENT


@pytest.mark.parametrize("variant", VARIANTS)
def test_zero_columns_are_what_silences_a_dummy_query(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With zero rows and non-zero outgoing columns, a dummy query beside a real KV head adds mean(V)."""
    m = Subjected(variant, 1)
    dense = formats()["dense"]
    one = int(np.float64(1.0).view(np.uint64))
    leaky = msgspec.structs.replace(dense, stored=(msgspec.structs.replace(dense.stored[0], column_fill=one),))
    checked = 0
    while checked < 4:
        plan = equal_plan(m.subject, m.rng)
        read = [
            (q, kv[p])
            for r in range(plan.tp)
            for kv in [plan.layout("kv_heads").slots(r)]
            for q, p in zip(plan.layout("q_heads").slots(r), plan.pairings[0].ranks[r], strict=True)
        ]
        if not any(q < 0 <= kv for q, kv in read):
            continue
        checked += 1
        assert m.by_ranks(plan) < SAME
        with monkeypatch.context() as patch:
            patch.setitem(formats(), "dense", leaky)
            assert "silence" in m.failed(plan)
            assert m.by_ranks(plan) > DIFFERENT
            assert m.by_transformers(plan) > DIFFERENT


@pytest.mark.parametrize("executor", ["vllm", "runtime"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_plan_the_solver_makes(variant: str, executor: str) -> None:
    """All layouts at all sizes up to 8, as a plan's virtual checkpoint and rank by rank."""
    m = Subjected(variant, 2)
    made = 0
    for tp in range(1, 9):
        for layout in ("auto", "pad", "replicate", *(("ragged",) if executor == "runtime" else ())):
            try:
                planned = plan_subject(m.subject, Request(tp=tp, executor=executor, layout=layout))
            except OddrankError as error:
                assert "more ranks than" in error.short or "fewer units" in str(error), error
                continue
            where = f"{m.where}, {executor}, tp {tp}, {layout}"
            assert m.by_ranks(planned.plan) < SAME, where
            if executor == "vllm" and layout == "auto":
                assert m.by_transformers(planned.plan) < SAME, where
            made += 1
    assert made >= 6


def test_the_oracle_tells_families_apart() -> None:
    """The interpreter is no rubber stamp: with another family's arithmetic it does not give these logits."""
    m = Subjected("qwen3", 3)
    plan = ragged_plan(m.subject, m.rng)
    assert m.by_ranks(plan) < SAME
    other: dict[str, Any] = {**m.config, "rope_theta": 9000.0}
    assert distance(interpreter.logits(other, plan, m.weights, m.prompt), m.reference) > DIFFERENT
    other = {**m.config, "model_type": "llama"}
    assert distance(interpreter.logits(other, plan, m.weights, m.prompt), m.reference) > DIFFERENT


LIES: dict[str, Callable[[Role], Role]] = {
    # halves of all heads, one after another, instead of head by head: the shape is the same
    "q_proj rows in halves": lambda r: _dims(r, "q_proj.weight", 0, _halves),
    "o_proj columns in halves": lambda r: _dims(r, "o_proj.weight", 1, _halves),
    # no lie: a concatenation of one section is that section
    "up_proj as one section": lambda r: _dims(r, "up_proj.weight", 0, lambda d: Concat((Along("mlp"),))),
}


def _halves(dim: Dim) -> Dim:
    assert isinstance(dim, Along)
    return Concat((Along(dim.axis, dim.width // 2), Along(dim.axis, dim.width // 2)))


def _dims(role: Role, end: str, at: int, change: Callable[[Dim], Dim]) -> Role:
    if not role.name.endswith(end):
        return role
    dims = tuple(change(d) if i == at else d for i, d in enumerate(role.dims))
    return msgspec.structs.replace(role, dims=dims)


@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_family_file_that_lies_is_found_out(variant: str, lie: str) -> None:
    """The proof trusts what the family says of a tensor. Where that is wrong, a plan is proven and the logits differ;
    where it only says the same in other words, they do not."""
    m = Subjected(variant, 5)
    roles = tuple(LIES[lie](r) for r in m.subject.model.roles)
    assert roles != m.subject.model.roles
    model = msgspec.structs.replace(m.subject.model, roles=roles)
    census = take_census(model, tensor_table(m.config, "F64"))
    m.subject = msgspec.structs.replace(m.subject, model=model, census=census)
    for _ in range(5):
        plan = ragged_plan(m.subject, m.rng, tp=int(m.rng.integers(2, 5)))
        assert not m.failed(plan)
        far = m.by_ranks(plan)
        assert far < SAME if lie == "up_proj as one section" else far > DIFFERENT
