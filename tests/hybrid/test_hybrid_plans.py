"""The solver's plans of tiny hybrid models at odd sizes: padded and replicated ones in transformers with the changed
config, ragged and weighted ones rank by rank. All in float64, equal to 1e-10."""

from __future__ import annotations

import numpy as np
import pytest
from hybrid.subjected import DIFFERENT, SAME, Subjected, distance, virtual
from hybrid.tiny import FAMILIES, FULL, LINEAR, Heads, config, is_moe, text_of, transformers_logits

from oddrank.errors import OddrankError
from oddrank.layout.plan import Plan
from oddrank.layout.solver import Request
from oddrank.planner import plan_subject
from oddrank.report import idle_ranks

SIZES = (2, 3, 5, 6, 7, 8)


def busy(tp: int) -> Heads:
    """Heads that fit no rank count evenly and yet, with dummies and the trained ratio, leave something real on every
    rank."""
    return Heads(q=3 * (2 * tp - 1), kv=2 * tp - 1, k=2 * tp - 1, v=2 * (2 * tp - 1))


def copied(tp: int) -> Heads:
    """The same where smaller groups and copies of KV and key heads need fewer query and value heads."""
    return Heads(q=4 * (tp + 1), kv=tp + 1, k=tp + 1, v=4 * (tp + 1))


class Made:
    """Models, made once each."""

    def __init__(self) -> None:
        self.known: dict[object, Subjected] = {}

    def __call__(
        self, family: str, heads: Heads, *, tp: int = 1, wrapped: bool = False, stacked: bool = True
    ) -> Subjected:
        """`tp`: the vocabulary is a few rows short of vLLM's 64 a rank."""
        key = (family, heads, tp, wrapped, stacked)
        if key not in self.known:
            c = config(
                family, heads, layers=(LINEAR, FULL), bias=wrapped, wrapped=wrapped, mlp=37, shared=23,
                vocab=64 * tp - 5,
            )  # fmt: skip
            self.known[key] = Subjected(family, 7, c, stacked=stacked)
        return self.known[key]


@pytest.fixture(scope="module")
def made() -> Made:
    return Made()


def plan_of(
    m: Subjected, tp: int, executor: str, layout: str = "auto", shares: tuple[float, ...] | None = None
) -> Plan:
    return plan_subject(m.subject, Request(tp=tp, executor=executor, layout=layout, shares=shares)).plan


def changed(m: Subjected, plan: Plan) -> bool:
    return any(plan.layout(a.name).total() != a.count for a in m.subject.model.axes if a.kind == "heads")


@pytest.mark.parametrize("layout", ["pad", "replicate"])
@pytest.mark.parametrize("tp", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_padded_with_something_real_on_every_rank(family: str, tp: int, layout: str, made: Made) -> None:
    heads = busy(tp) if layout == "pad" else copied(tp)
    m = made(family, heads, tp=tp, wrapped=tp % 2 == 0, stacked=tp % 3 == 0)
    plan = plan_of(m, tp, "vllm", layout)
    assert changed(m, plan)
    assert not idle_ranks(plan)
    c, weights = virtual(plan, m.config, m.weights)
    t, stock = text_of(c), text_of(m.config)
    for key in ("num_attention_heads", "num_key_value_heads", "linear_num_key_heads", "linear_num_value_heads"):
        assert t[key] % tp == 0 and t[key] >= stock[key]
    ratios = (
        t["num_attention_heads"] / t["num_key_value_heads"], t["linear_num_value_heads"] / t["linear_num_key_heads"]
    )  # fmt: skip
    assert ratios == (3, 2) if layout == "pad" else max(ratios) < 4
    assert distance(transformers_logits(c, weights, m.prompt), m.reference) < SAME
    assert m.by_ranks(plan) < SAME


@pytest.mark.parametrize("heads", [Heads(6, 2, 4, 8), Heads(8, 2, 2, 6), Heads(8, 2, 5, 10), Heads(9, 3, 3, 9)])
@pytest.mark.parametrize("family", FAMILIES)
def test_every_layout_at_every_size(family: str, heads: Heads, made: Made) -> None:
    """Few heads at many ranks: fewer heads than ranks are refused, and nothing else is."""
    m = made(family, heads, wrapped=heads.k == 5)
    planned = 0
    for tp in SIZES:
        for executor, layouts in (("vllm", ("auto", "pad", "replicate")), ("runtime", ("auto", "ragged"))):
            for layout in layouts:
                where = f"{m.where}, {heads}, {executor}, tp {tp}, {layout}"
                try:
                    plan = plan_of(m, tp, executor, layout)
                except OddrankError as error:
                    assert tp > min(heads.q, heads.v) and "more ranks than" in error.short, where
                    continue
                assert tp <= min(heads.q, heads.v), where
                assert m.by_ranks(plan) < SAME, where
                if executor == "vllm":
                    assert m.by_transformers(plan) < SAME, where
                planned += 1
    assert planned >= 4 * 5


@pytest.mark.parametrize("tp", SIZES)
@pytest.mark.parametrize("family", FAMILIES)
def test_ragged_and_weighted(family: str, tp: int, made: Made) -> None:
    m = made(family, busy(tp), tp=tp, stacked=tp % 2 == 0)
    even = plan_of(m, tp, "runtime", "ragged")
    assert not idle_ranks(even) and sum(even.layout("q_heads").counts()) == m.config["num_attention_heads"]
    assert m.by_ranks(even) < SAME
    shares = tuple(float(1 + i % 3) for i in range(tp))
    weighted = plan_of(m, tp, "runtime", shares=shares)
    for name in ("q_heads", "gdn_v_heads"):
        counts = weighted.layout(name).counts()
        assert counts[1] > counts[0], f"{name}: a card of twice the memory takes more, not {counts}"
    assert m.by_ranks(weighted) < SAME


@pytest.mark.parametrize("family", FAMILIES)
def test_a_plan_at_other_sizes(family: str, made: Made) -> None:
    """A plan for six equal ranks at its divisors and at every size that divides the planned counts."""
    m = made(family, busy(6), tp=6)
    plan = plan_of(m, 6, "vllm", "pad")
    totals = [plan.layout(a.name).total() for a in m.subject.model.axes if a.kind in ("heads", "width")]
    sizes = [n for n in range(1, 13) if 6 % n == 0 or all(t % n == 0 for t in totals)]
    assert {1, 2, 3, 6} <= set(sizes)
    for n in sizes:
        assert m.by_ranks(plan.at(n)) < SAME, n
    ragged = plan_of(m, 6, "runtime", "ragged")
    for n in (1, 2, 3):
        assert m.by_ranks(ragged.at(n)) < SAME, n


@pytest.mark.parametrize("family", FAMILIES)
def test_the_oracle_tells_families_apart(family: str, made: Made) -> None:
    """The interpreter is no rubber stamp: without the output gate's halves, the shared gate or the decay it differs."""
    from hybrid import interpreter

    m = made(family, Heads(6, 2, 4, 8))
    plan = plan_of(m, 3, "runtime")

    def off(part: str) -> float:
        def cut(rank: int, name: str, local: np.ndarray) -> np.ndarray:
            return np.zeros_like(local) if part in name else local

        return distance(interpreter.logits(m.config, plan, m.weights, m.prompt, cut=cut), m.reference)

    parts = ["in_proj_a", "in_proj_b", "in_proj_z", "dt_bias", "A_log", "conv1d", "linear_attn.norm", "q_norm"]
    parts += ["shared_expert_gate", "mlp.gate.", "experts.down"] if is_moe(m.config) else ["mlp.down"]
    assert off("nothing") < SAME
    for part in parts:
        assert off(part) > DIFFERENT, part
