"""The solver's plans of tiny models of every other family at odd sizes: padded and replicated ones in transformers with
the changed config, ragged and weighted ones rank by rank. All in float64, equal to 1e-10."""

from __future__ import annotations

import pytest
from family_models import FAMILIES, busy
from family_subject import SAME, Subjected, distance, virtual

from oddrank.errors import OddrankError
from oddrank.layout.plan import Plan
from oddrank.layout.proof import ProofError
from oddrank.layout.solver import Request
from oddrank.planner import plan_subject
from oddrank.report import idle_ranks

SIZES = (2, 3, 5, 6, 7, 8)


class Made:
    """Models, made once each."""

    def __init__(self) -> None:
        self.known: dict[tuple[str, int], Subjected] = {}

    def __call__(self, family: str, tp: int) -> Subjected:
        """Of so many heads, fitting no multiple of `tp`, that with dummies and the trained ratio something real is
        left on every rank; the vocabulary is a few rows short of vLLM's 64 a rank."""
        if (family, tp) not in self.known:
            self.known[family, tp] = Subjected(family, 7, busy(family, tp), tokens=6)
        return self.known[family, tp]


@pytest.fixture(scope="module")
def made() -> Made:
    return Made()


def plan_of(m: Subjected, tp: int, executor: str, layout: str = "auto", **more: object) -> Plan:
    return plan_subject(m.subject, Request(tp=tp, executor=executor, layout=layout, **more)).plan  # type: ignore[arg-type]


@pytest.mark.parametrize("layout", ["pad", "replicate", "auto"])
@pytest.mark.parametrize("tp", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_padded_with_something_real_on_every_rank(family: str, tp: int, layout: str, made: Made) -> None:
    m = made(family, tp)
    if layout == "pad" and m.subject.model.crosstalk:
        with pytest.raises(ProofError, match=r"no crosstalk: .*q_norm computes rms_norm across all .* q_heads"):
            plan_of(m, tp, "vllm", layout)
        return
    plan = plan_of(m, tp, "vllm", layout)
    stock = m.subject.model.stock()
    changed = {la.axis for la in plan.layouts if not la.in_engine and la.total() != stock[la.axis]}
    assert changed & {a.name for a in m.subject.model.axes if a.kind == "heads"}
    assert changed & {a.name for a in m.subject.model.axes if a.kind == "width"}
    if layout == "pad":
        assert not idle_ranks(plan)
        for pair in m.subject.model.pairs:  # the trained ratio is kept
            totals = plan.layout(pair.follower).total(), plan.layout(pair.leader).total()
            assert totals[0] == totals[1] * m.subject.model.ratio(pair)
    config, _ = virtual(plan, m.config, m.weights)
    assert config["num_attention_heads"] % tp == 0 and config["num_attention_heads"] >= stock["q_heads"]
    assert config.get("num_key_value_heads", tp) % tp == 0
    assert m.by_transformers(plan) < SAME
    assert m.by_ranks(plan) < SAME


@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_at_every_size(family: str) -> None:
    """Few heads at many ranks: fewer heads than ranks are refused, and nothing else is."""
    m = Subjected(family, 3)
    heads, planned = m.config["num_attention_heads"], 0
    for tp in SIZES:
        for executor, layouts in (("vllm", ("auto", "pad", "replicate")), ("runtime", ("auto", "ragged"))):
            for layout in layouts:
                where = f"{m.where}, {heads} heads, {executor}, tp {tp}, {layout}"
                try:
                    plan = plan_of(m, tp, executor, layout)
                except OddrankError as error:
                    crossed = executor == "vllm" and "no crosstalk" in str(error) and m.subject.model.crosstalk
                    assert crossed or (tp > heads and "more ranks than" in error.short), f"{where}: {error}"
                    continue
                assert tp <= heads, where
                assert m.by_ranks(plan) < SAME, where
                planned += 1
    assert planned >= (8 if m.subject.model.crosstalk else 14)


@pytest.mark.parametrize("tp", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_and_weighted(family: str, tp: int, made: Made) -> None:
    m = made(family, tp)
    even = plan_of(m, tp, "runtime", "ragged")
    assert not idle_ranks(even) and sum(even.layout("q_heads").counts()) == m.config["num_attention_heads"]
    assert m.by_ranks(even) < SAME
    weighted = plan_of(m, tp, "runtime", shares=tuple(float(1 + i % 3) for i in range(tp)))
    counts = weighted.layout("q_heads").counts()
    assert counts[1] > counts[0], f"a card of twice the memory takes more, not {counts}"
    assert m.by_ranks(weighted) < SAME


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_at_other_sizes(family: str, made: Made) -> None:
    """A plan for six equal ranks at its divisors and at every size that divides the planned counts."""
    m = made(family, 6)
    plan = plan_of(m, 6, "vllm", "auto")
    totals = [plan.layout(a.name).total() for a in m.subject.model.axes if a.kind in ("heads", "width")]
    sizes = [n for n in range(1, 13) if 6 % n == 0 or all(t % n == 0 for t in totals)]
    for n in sizes:
        assert m.by_ranks(plan.at(n)) < SAME, n
    ragged = plan_of(m, 6, "runtime", "ragged")
    for n in (1, 2, 3):
        assert m.by_ranks(ragged.at(n)) < SAME, n


@pytest.mark.parametrize("family", FAMILIES)
def test_the_oracle_is_no_rubber_stamp(family: str, made: Made) -> None:
    """Every tensor of a layer matters to it: with any of them zeroed it does not give these logits."""
    import family_interpreter
    import numpy as np

    m = made(family, 3)
    plan = plan_of(m, 3, "runtime")
    for name in m.weights:
        changed = {**m.weights, name: np.zeros_like(m.weights[name])}
        far = distance(family_interpreter.logits(m.config, plan, changed, m.prompt), m.reference)
        assert far > 1e-6 or ".experts." in name, name  # an expert that no token of the prompt chose
