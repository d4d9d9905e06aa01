"""The proof, proven on the hybrid families: over random layouts of both pairs of heads, of widths and vocabulary, what
it accepts computes what transformers computes, and what it refuses does not.

Accepted: float64 logits equal transformers' on the stock checkpoint to 1e-10, rank by rank and, with equal ranks, as
the virtual checkpoint in transformers. Refused: the logits differ by more than 1e-6, unless only the storage or the
executor check refused.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hybrid.mutations import dummy_experts, mutations, random_edit, without_inert_followers
from hybrid.random_plans import equal_plan, ragged_plan
from hybrid.subjected import DIFFERENT, SAME, Subjected
from hybrid.tiny import FAMILIES, SHAPES, config

from oddrank.layout.plan import Plan

BYSTANDERS = {"storage", "executor"}


def accepted(m: Subjected, plan: Plan, where: str) -> None:
    failed = m.failed(plan)
    assert not failed, f"{where}: a sound plan was refused: {failed}"
    far = m.by_ranks(plan)
    assert far < SAME, f"{where}: accepted, and the ranks' logits differ by {far}"
    if plan.executor_facts().equal_ranks:
        far = m.by_transformers(plan)
        assert far < SAME, f"{where}: accepted, and the virtual checkpoint's logits differ by {far}"


def mutated(m: Subjected, plan: Plan, where: str, tally: dict[str, int], count: int) -> None:
    """Mutations, some at random, are each refused by their own check and change the logits."""
    through_transformers = plan.executor == "vllm"
    known = list(mutations(m.subject.model).items())
    for number in m.rng.permutation(len(known))[:count]:
        name, mutate = known[number]
        broken = mutate(plan, m.rng, m.prompt)
        if broken is None:
            continue
        at = f"{where}, {name}"
        failed = m.failed(broken.plan)
        assert broken.check in failed, f"{at}: not refused by {broken.check}, only by {failed}"
        assert m.by_ranks(broken.plan) > DIFFERENT, f"{at}: refused, and the logits are the same"
        if through_transformers and not broken.across_ranks:
            through_transformers = False  # one of them is enough
            assert m.by_transformers(broken.plan) > DIFFERENT, f"{at}: refused, and transformers agrees"
        tally[name] = tally.get(name, 0) + 1


def edited(m: Subjected, plan: Plan, where: str) -> bool:
    """One to three random changes: accepted exactly if the logits are the same. True if accepted.

    The one exception is a query or value head too many in a slot that reads a dummy KV or key slot: it adds nothing,
    and the proof refuses it nevertheless. Such slots are taken for the dummies they are.
    """
    for _ in range(int(m.rng.integers(1, 4))):
        plan = random_edit(plan, m.rng, m.prompt)
    failed = m.failed(plan)
    if failed and set(failed) <= BYSTANDERS:
        return False
    wrong = {k: v for k, v in m.failed(without_inert_followers(plan)).items() if k not in BYSTANDERS}
    far = m.by_ranks(plan)
    if wrong:
        assert failed, f"{where}: accepted with inert heads, refused without: {wrong}"
        assert far > DIFFERENT, f"{where}: refused ({failed}), and the logits are the same"
    else:
        assert far < SAME, f"{where}: accepted, and the logits differ by {far}"
    return not failed


def experiment(family: str, seed: int, layouts: int, *, mutants: int, edits: int) -> None:
    """On each of `layouts` random plans of one model: so many mutations and random edits."""
    m = Subjected(family, seed)
    makers: tuple[Callable[..., Plan], ...] = (equal_plan, ragged_plan)
    for number in range(layouts):
        plan = makers[number % 2](m.subject, m.rng)
        where = f"{m.where}, layout {number} ({plan.executor}, {plan.tp} ranks)"
        accepted(m, plan, where)
        mutated(m, plan, where, {}, mutants)
        for _ in range(edits):
            edited(m, plan, where)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("family", FAMILIES)
def test_random_layouts(family: str, seed: int) -> None:
    experiment(family, seed, 10, mutants=3, edits=1)


@pytest.mark.long
@pytest.mark.parametrize("block", range(40))
@pytest.mark.parametrize("family", FAMILIES)
def test_thousands_of_random_layouts(family: str, block: int) -> None:
    for seed in range(1000 + 5 * block, 1005 + 5 * block):
        experiment(family, seed, 10, mutants=6, edits=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_mutation_and_both_verdicts_on_edits_occur(family: str) -> None:
    """The experiment is no formality: each mutation finds its place, and random edits are accepted and refused."""
    m = Subjected(family, 0, config(family, SHAPES[0], bias=True))
    tally: dict[str, int] = {}
    verdicts = []
    for number in range(4):
        plan = (equal_plan, ragged_plan)[number % 2](m.subject, m.rng, 3)
        mutated(m, plan, m.where, tally, 99)
        verdicts += [edited(m, plan, m.where) for _ in range(6)]
    assert set(tally) == set(mutations(m.subject.model))
    assert 1 <= sum(verdicts) <= len(verdicts) - 1


def test_dummy_experts_would_be_chosen() -> None:
    for stacked in (True, False):
        m = Subjected("qwen3_5_moe", 0, config("qwen3_5_moe", SHAPES[1]), stacked=stacked)
        plan = ragged_plan(m.subject, m.rng, 2)
        assert m.by_ranks(plan) < SAME
        broken = dummy_experts(plan, m.rng, m.prompt)
        assert "silence" in m.failed(broken.plan)
        assert m.by_ranks(broken.plan) > DIFFERENT
