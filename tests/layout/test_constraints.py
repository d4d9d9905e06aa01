"""What a user may ask of a plan: met, or refused with the nearest that works, which then does work."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout.shapes import config, head_choices, per_rank, plan, subject

from oddrank.errors import OddrankError
from oddrank.layout.executors import Constraints
from oddrank.layout.proof import prove
from oddrank.layout.solver import Request
from oddrank.planner import Subject, plan_subject

BOTH = pytest.mark.parametrize("executor", ["runtime", "vllm"])


def qwen27b() -> Subject:
    """24/4 heads x 256, MLP 17408: a KV head is 1024 bytes a token and layer in bf16."""
    return subject(config(q=24, kv=4, head_dim=256, hidden=5120 // 5 * 3, mlp=17408, vocab=248320, layers=1))


def refusal(s: Subject, tp: int, executor: str = "vllm", **constraints: int) -> str:
    with pytest.raises(OddrankError) as caught:
        plan(s, tp, executor, constraints=constraints)
    assert caught.value.exit_code == 2
    return str(caught.value)


@BOTH
@pytest.mark.parametrize(("gqa", "q", "kv"), [(6, 12, 2), (5, 15, 3), (4, 12, 3), (3, 9, 3), (2, 8, 4), (1, 8, 8)])
def test_gqa(executor: str, gqa: int, q: int, kv: int) -> None:
    p = plan(qwen27b(), 3, executor, constraints={"gqa": gqa})
    assert per_rank(p, "q_heads") == (q,) * 3
    assert per_rank(p, "kv_heads") == (kv,) * 3


@BOTH
def test_gqa_beyond_the_trained_ratio_leaves_room(executor: str) -> None:
    """Eight queries a KV slot hold the trained six and two dummies."""
    p = plan(qwen27b(), 3, executor, constraints={"gqa": 8})
    assert per_rank(p, "q_heads") == (16, 16, 16)
    assert per_rank(p, "kv_heads") == (2, 2, 2)


@BOTH
@pytest.mark.parametrize(
    ("constraints", "per"),
    [
        ({"mlp": 17472}, 5824),
        ({"mlp": 17664}, 5888),
        ({"mlp_multiple": 128}, 5888),
        ({"mlp_multiple": 64}, 5824),
        ({"mlp_multiple": 91}, 5824),
    ],
)
def test_mlp(executor: str, constraints: dict[str, int], per: int) -> None:
    p = plan(qwen27b(), 3, executor, constraints=constraints)
    counts = per_rank(p, "mlp")
    assert max(counts) == per
    multiple = constraints.get("mlp_multiple", 1)
    assert all(n % multiple == 0 for n in counts)
    if executor == "vllm" or "mlp" in constraints or 17408 % multiple:
        assert counts == (per,) * 3
    else:
        assert sum(counts) == 17408  # the runtime has fewer instead of dummies


@BOTH
@pytest.mark.parametrize(("kv_bytes", "q", "kv"), [(2048, 12, 2), (3072, 9, 3), (4096, 8, 4), (5120, 10, 5)])
def test_kv_bytes(executor: str, kv_bytes: int, q: int, kv: int) -> None:
    """Bytes per token, layer and rank: 1024 a KV slot. More slots than needed are copies or dummies."""
    p = plan(qwen27b(), 3, executor, constraints={"kv_bytes": kv_bytes})
    assert per_rank(p, "kv_heads") == (kv,) * 3
    assert max(per_rank(p, "q_heads")) <= 6 * kv
    assert all(c.ok for c in p.checks)


def test_a_drafter_matches_its_target() -> None:
    """Case 14: 32/8 heads x 128 beside a target whose padded rank holds 2 KV heads x 256: 48/12, not 36/9."""
    drafter = subject(config(q=32, kv=8, head_dim=128, mlp=17408, vocab=248320, layers=1))
    p = plan(drafter, 3, "vllm", "pad", constraints={"kv_bytes": 2 * 256 * 2 * 2, "gqa": 4})
    assert (per_rank(p, "q_heads"), per_rank(p, "kv_heads")) == ((16,) * 3, (4,) * 3)
    alone = plan(drafter, 3, "vllm", "pad")
    assert (per_rank(alone, "q_heads"), per_rank(alone, "kv_heads")) == ((12,) * 3, (3,) * 3)


@BOTH
def test_exact_heads(executor: str) -> None:
    p = plan(qwen27b(), 3, executor, "pad" if executor == "runtime" else "auto", constraints={"q_heads": 36})
    assert p.plan.layout("q_heads").total() == 36
    assert p.plan.layout("kv_heads").total() in (6, 12, 18)
    p = plan(qwen27b(), 3, executor, "pad", constraints={"q_heads": 36, "kv_heads": 6})
    assert (p.plan.layout("q_heads").total(), p.plan.layout("kv_heads").total()) == (36, 6)
    p = plan(qwen27b(), 3, executor, "pad", constraints={"kv_heads": 12})
    assert p.plan.layout("kv_heads").total() == 12


@BOTH
def test_heads_multiple(executor: str) -> None:
    p = plan(qwen27b(), 3, executor, "pad", constraints={"q_heads_multiple": 4})
    assert all(n % 4 == 0 for n in per_rank(p, "q_heads"))
    assert {largest[0] % 4 for _, largest in head_choices(p)} == {0}


def test_vocab() -> None:
    s = qwen27b()
    assert plan(s, 3, "vllm", constraints={"vocab": 248448}).plan.layout("vocab").total() == 248448
    assert plan(s, 3, "vllm", constraints={"vocab_multiple": 512}).plan.layout("vocab").counts()[0] % 512 == 0


@BOTH
def test_constraints_together(executor: str) -> None:
    p = plan(qwen27b(), 3, executor, constraints={"gqa": 6, "mlp_multiple": 64, "kv_bytes": 2048})
    assert per_rank(p, "q_heads") == (12, 12, 12)
    assert max(per_rank(p, "mlp")) == 5824


def test_stock_is_kept_only_where_it_meets_the_constraint() -> None:
    """24/4 at 4 ranks is served as it is; asking for three a group regroups it."""
    s = qwen27b()
    assert plan(s, 4, "vllm").plan.kind == "identity"
    p = plan(s, 4, "vllm", constraints={"gqa": 3})
    assert (per_rank(p, "q_heads"), per_rank(p, "kv_heads")) == ((6,) * 4, (2,) * 4)


# -- refusals: the nearest that works, works -----------------------------------------------------------------------


def _nearest(text: str) -> dict[str, int]:
    found = re.search(r"the nearest that works is ([a-z_]+)=(\d+)", text)
    assert found, text
    return {found[1]: int(found[2])}


@BOTH
@pytest.mark.parametrize("asked", [1, 17407, 17410, 17471, 17473, 20000])
def test_an_impossible_width(executor: str, asked: int) -> None:
    s = qwen27b()
    text = refusal(s, 3, executor, mlp=asked)
    assert f"mlp={asked}" in text
    nearest = _nearest(text)
    p = plan(s, 3, executor, constraints=nearest)
    assert p.plan.layout("mlp").total() == nearest["mlp"]
    assert nearest["mlp"] >= 17408


@BOTH
@pytest.mark.parametrize("asked", [1, 1000, 1024, 2047, 2049, 3000, 1025 * 7])
def test_impossible_kv_bytes(executor: str, asked: int) -> None:
    """A rank needs two of four KV heads at least: 2048 bytes; and only whole slots of 1024."""
    s = qwen27b()
    text = refusal(s, 3, executor, kv_bytes=asked)
    assert "A KV slot is 1024 bytes a token, layer and rank" in text
    nearest = _nearest(text)
    assert abs(nearest["kv_bytes"] - asked) <= max(1024, 2048 - asked)
    p = plan(s, 3, executor, constraints=nearest)
    assert per_rank(p, "kv_heads") == (nearest["kv_bytes"] // 1024,) * 3


@settings(deadline=None, max_examples=60)
@given(st.sampled_from([(9, 3), (24, 4), (40, 8), (28, 4), (6, 6)]), st.integers(1, 6), st.integers(1, 20000))
def test_whatever_kv_bytes_are_asked_for(heads: tuple[int, int], tp: int, asked: int) -> None:
    s = subject(config(q=heads[0], kv=heads[1], head_dim=64, layers=1))
    try:
        p = plan(s, tp, "vllm", constraints={"kv_bytes": asked})
    except OddrankError as error:
        p = plan(s, tp, "vllm", constraints=_nearest(str(error)))
        assert all(c.ok for c in p.checks)
    else:
        assert max(per_rank(p, "kv_heads")) * 2 * 64 * 2 == asked


@BOTH
@pytest.mark.parametrize(
    "constraints", [{"q_heads": 25}, {"q_heads": 23}, {"kv_heads": 5}, {"kv_heads": 3}, {"q_heads": 24, "gqa": 6}]
)
def test_impossible_heads(executor: str, constraints: dict[str, int]) -> None:
    """What works without the constraint is listed, and does."""
    s = qwen27b()
    text = refusal(s, 3, executor, **constraints)
    for key, value in constraints.items():
        assert f"{key}={value}" in text
    options = re.findall(r"(\d+) q_heads / (\d+) kv_heads \(kv_bytes=(\d+)\)", text)
    assert ("36", "6", "2048") in options and ("24", "12", "4096") in options
    for q, kv, kv_bytes in options:
        wanted = {"q_heads": int(q), "kv_heads": int(kv), "kv_bytes": int(kv_bytes)}
        p = plan(s, 3, executor, constraints=wanted)
        assert p.plan.layout("q_heads").total() == int(q)


@BOTH
@pytest.mark.parametrize(("multiple", "per"), [(7000, 7000), (8704, 8704), (20000, 20000)])
def test_a_multiple_that_leaves_ranks_idle(executor: str, multiple: int, per: int) -> None:
    """Fewer multiples than ranks: met, with ranks that hold no real channel. The plan says so."""
    p = plan(qwen27b(), 3, executor, constraints={"mlp_multiple": multiple})
    assert per_rank(p, "mlp") == (per,) * 3
    assert (
        p.plan.layout("mlp").real() == {7000: (7000, 7000, 3408), 8704: (8704, 8704, 0), 20000: (17408, 0, 0)}[multiple]
    )


def test_an_impossible_vocabulary() -> None:
    s = qwen27b()
    for asked in (248321, 248322, 100):  # odd; divides by 3 but not by 64; too small
        nearest = _nearest(refusal(s, 3, "vllm", vocab=asked))
        assert plan(s, 3, "vllm", constraints=nearest).plan.layout("vocab").total() == nearest["vocab"]
    nearest = _nearest(refusal(s, 3, "vllm", vocab=248448, vocab_multiple=1000))
    both = {**nearest, "vocab_multiple": 1000}
    assert plan(s, 3, "vllm", constraints=both).plan.layout("vocab").total() == nearest["vocab"]
    assert plan(s, 4, "vllm", constraints={"vocab_multiple": 512}).plan.layout("vocab").counts() == (62464,) * 4


@pytest.mark.parametrize("key", ["moe", "hidden", "gqa_multiple", "kv_bytes_multiple", "", "head_dim", "mlp_multiples"])
def test_a_constraint_this_model_has_not(key: str) -> None:
    text = refusal(qwen27b(), 3, **{key: 4})
    assert f"{key}=4 is not one this model has" in text
    for known in ("gqa", "kv_bytes", "mlp", "mlp_multiple", "q_heads"):
        assert known in text


@pytest.mark.parametrize("key", ["gqa", "mlp", "mlp_multiple", "kv_bytes"])
@pytest.mark.parametrize("value", [0, -3])
def test_a_constraint_that_is_no_number_of_anything(key: str, value: int) -> None:
    assert "positive whole number" in refusal(qwen27b(), 3, **{key: value})


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from([(9, 3), (24, 4), (40, 8), (28, 4)]),
    st.integers(1, 6),
    st.dictionaries(
        st.sampled_from(
            [
                "gqa",
                "kv_bytes",
                "mlp",
                "mlp_multiple",
                "q_heads",
                "kv_heads",
                "q_heads_multiple",
                "vocab",
                "vocab_multiple",
            ]
        ),
        st.one_of(st.integers(1, 12), st.integers(1, 60), st.sampled_from([256, 512, 768, 1024, 96, 120])),
        max_size=3,
    ),
    st.sampled_from(["runtime", "vllm"]),
    st.sampled_from(["auto", "pad", "replicate"]),
)
def test_any_constraints_are_met_or_refused(
    heads: tuple[int, int], tp: int, constraints: dict[str, int], executor: str, layout: str
) -> None:
    s = subject(config(q=heads[0], kv=heads[1], head_dim=64, mlp=96, layers=1))
    try:
        p = plan(s, tp, executor, layout, constraints)
    except OddrankError as error:
        assert error.exit_code == 2 and "this plan cannot be proven" not in str(error)
        return
    _check_met(p, constraints)


def _check_met(p: Any, constraints: dict[str, int]) -> None:
    for key, value in constraints.items():
        if key == "gqa":
            assert all(q == value * kv for q, kv in zip(per_rank(p, "q_heads"), per_rank(p, "kv_heads"), strict=True))
        elif key == "kv_bytes":
            assert max(per_rank(p, "kv_heads")) * 2 * 64 * 2 == value
        elif key.endswith("_multiple"):
            assert all(n % value == 0 for n in per_rank(p, key.removesuffix("_multiple")))
        else:
            assert p.plan.layout(key).total() == value


# -- layouts by name, other sizes --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layout", "q", "kv"),
    [
        ("auto", (8, 8, 8), (2, 2, 2)),
        ("ragged", (8, 8, 8), (2, 2, 2)),
        ("pad", (12, 12, 12), (2, 2, 2)),
        ("replicate", (8, 8, 8), (4, 4, 4)),
    ],
)
def test_layouts_by_name(layout: str, q: tuple[int, ...], kv: tuple[int, ...]) -> None:
    p = plan(qwen27b(), 3, "runtime", layout)
    assert (per_rank(p, "q_heads"), per_rank(p, "kv_heads")) == (q, kv)
    assert p.plan.kind == {"auto": "ragged"}.get(layout, layout)


def test_ragged_is_not_for_vllm() -> None:
    with pytest.raises(OddrankError, match=r"cannot run a ragged layout.*oddrank generate --layout ragged"):
        plan(qwen27b(), 3, "vllm", "ragged")


@pytest.mark.parametrize(("tp", "words"), [(0, "at least 1"), (-2, "at least 1"), (25, "At most --tp 24 works")])
@BOTH
def test_sizes_that_make_no_sense(executor: str, tp: int, words: str) -> None:
    with pytest.raises(OddrankError, match=words):
        plan(qwen27b(), tp, executor)


@BOTH
def test_the_largest_size_that_works_works(executor: str) -> None:
    assert all(c.ok for c in plan(qwen27b(), 24, executor).checks)


@pytest.mark.parametrize("field", [{"executor": "triton"}, {"layout": "diagonal"}])
def test_unknown_names(field: dict[str, str]) -> None:
    with pytest.raises(OddrankError, match="is not one of"):
        plan_subject(qwen27b(), Request(**{"tp": 3, **field}))  # type: ignore[arg-type]


@BOTH
def test_run_tp(executor: str) -> None:
    """A plan for 6 ranks, to be run at 3 or 2 or 1: the same virtual checkpoint."""
    s = qwen27b()
    planned = plan(s, 6, executor, "pad").plan
    for ranks in (1, 2, 3, 6):
        p = plan(s, 6, executor, "pad", run_tp=ranks)
        assert p.plan.tp == ranks
        assert p.plan.layout("q_heads").total() == planned.layout("q_heads").total()
        assert all(c.ok for c in p.checks)
    with pytest.raises(OddrankError, match=r"5 ranks do not divide|does not run at 5"):
        plan(s, 6, executor, "pad", run_tp=5)


def test_run_tp_with_a_width_for_the_other_size() -> None:
    """Planned for 3 ranks with a width that only 4 ranks divide: written for 3, run at 4 or 2 or 1."""
    s = subject(config(q=24, kv=12, mlp=1000, layers=1))
    p = plan(s, 3, "vllm", constraints={"mlp": 1024}, run_tp=4)
    assert per_rank(p, "mlp") == (256,) * 4
    assert all(c.ok for c in p.checks)


def test_constraints_bind_the_planned_size_not_the_run_size() -> None:
    s = qwen27b()
    p = plan(s, 6, "vllm", constraints={"gqa": 6, "kv_bytes": 1024}, run_tp=3)
    assert per_rank(p, "kv_heads") == (2, 2, 2)
    assert p.plan.constraints == Constraints()
    assert all(c.ok for c in prove(p.plan, s.census))


def test_shares_of_unequal_ranks() -> None:
    """Cards of 24 and 16 GB: 3 to 2."""
    p = plan(qwen27b(), 2, shares=(24.0, 16.0))
    assert per_rank(p, "q_heads") == (14, 10)
    assert abs(per_rank(p, "mlp")[0] - 17408 * 0.6) <= 64
    assert all(c.ok for c in p.checks)
