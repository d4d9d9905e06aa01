"""The proof, proven on every other family: over random layouts of its heads, widths and vocabulary, what it accepts
computes what transformers computes, and what it refuses does not.

Accepted: float64 logits equal transformers' on the stock checkpoint to 1e-10, rank by rank and, with equal ranks, as
the virtual checkpoint in transformers. Refused: the logits differ by more than 1e-6, unless only the storage or the
executor check refused.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from family_models import FAMILIES, MIXTURES
from family_subject import DIFFERENT, SAME, Subjected
from hybrid.mutations import dummy_experts, mutations
from hybrid.random_plans import equal_plan, ragged_plan
from hybrid.test_hybrid_experiment import accepted, edited, mutated

from oddrank.layout.plan import Plan


def experiment(family: str, seed: int, layouts: int, *, mutants: int, edits: int) -> None:
    """On each of `layouts` random plans of one model: so many mutations and random edits."""
    m = Subjected(family, seed)
    makers: tuple[Callable[..., Plan], ...] = (equal_plan, ragged_plan)
    for number in range(layouts):
        plan = makers[number % 2](m.subject, m.rng)
        where = f"{m.where}, layout {number} ({plan.executor}, {plan.tp} ranks)"
        if "no crosstalk" in m.failed(plan):  # sound for an executor that handles it, which this one does not
            assert m.by_ranks(plan) > DIFFERENT and m.by_transformers(plan) > DIFFERENT, where
            continue
        accepted(m, plan, where)
        mutated(m, plan, where, {}, mutants)
        for _ in range(edits):
            edited(m, plan, where)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("family", FAMILIES)
def test_random_layouts(family: str, seed: int) -> None:
    experiment(family, seed, 8, mutants=3, edits=1)


@pytest.mark.long
@pytest.mark.parametrize("block", range(10))
@pytest.mark.parametrize("family", FAMILIES)
def test_thousands_of_random_layouts(family: str, block: int) -> None:
    for seed in range(1000 + 5 * block, 1005 + 5 * block):
        experiment(family, seed, 10, mutants=6, edits=2)


@pytest.mark.parametrize("family", FAMILIES)
def test_every_mutation_and_both_verdicts_on_edits_occur(family: str) -> None:
    """The experiment is no formality: each mutation finds its place, and random edits are accepted and refused."""
    m = Subjected(family, 50)
    tally: dict[str, int] = {}
    verdicts: list[bool] = []
    for number in range(40):
        plan = (equal_plan, ragged_plan)[number % 2](m.subject, m.rng, 3)
        if m.failed(plan):
            continue
        mutated(m, plan, m.where, tally, 99)
        verdicts += [edited(m, plan, m.where) for _ in range(6)]
        expected = {n for n in mutations(m.subject.model) if plan.owners or "owner" not in n}
        expected -= {n for n in expected if m.subject.model.pairs and "repeat" in n and _alone(m, n)}
        if number >= 3 and set(tally) >= expected and len(set(verdicts)) == 2:
            return
    raise AssertionError(f"{set(mutations(m.subject.model)) - set(tally)} found no place; edits: {verdicts}")


def _alone(m: Subjected, mutation: str) -> bool:
    """Is a mutation of a pair without a place in this model: no head has a mate of its group?"""
    return any(m.subject.model.ratio(p) == 1 for p in m.subject.model.pairs if mutation.endswith(p.follower))


@pytest.mark.parametrize("family", MIXTURES)
def test_dummy_experts_would_be_chosen(family: str) -> None:
    """In one of a few models, that is: where all scores of a prompt are positive, zero is no rival."""
    far = []
    for seed in range(60, 66):
        m = Subjected(family, seed)
        plan = ragged_plan(m.subject, m.rng, 2)
        assert m.by_ranks(plan) < SAME
        broken = dummy_experts(plan, m.rng, m.prompt)
        assert "silence" in m.failed(broken.plan)
        far.append(m.by_ranks(broken.plan))
    assert max(far) > DIFFERENT
