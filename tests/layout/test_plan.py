"""The Plan as a value: JSON both ways, at other sizes, the virtual checkpoint."""

from __future__ import annotations

import itertools
import random
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout.shapes import VARIANTS, changed, config, plan, subject

from oddrank.errors import OddrankError
from oddrank.layout.layouts import Run
from oddrank.layout.plan import Plan, config_digest
from oddrank.layout.proof import prove, require

HEADS = [(9, 3), (24, 4), (28, 4), (40, 8), (16, 2), (12, 12), (6, 1)]


def subjects() -> st.SearchStrategy[Any]:
    return st.builds(
        lambda variant, heads, mlp: subject(config(variant, q=heads[0], kv=heads[1], mlp=mlp, vocab=200)),
        st.sampled_from(sorted(VARIANTS)),
        st.sampled_from(HEADS),
        st.sampled_from([48, 64, 100, 1536]),
    )


executors = st.sampled_from(["runtime", "vllm"])


def some_plan(s: Any, tp: int, executor: str, layout: str = "auto") -> Plan | None:
    try:
        return plan(s, tp, executor, layout).plan
    except OddrankError as error:
        assert "more ranks than" in error.short, error
        return None


# -- JSON --------------------------------------------------------------------------------------------------------


@settings(deadline=None)
@given(subjects(), st.integers(1, 9), executors)
def test_json_both_ways(s: Any, tp: int, executor: str) -> None:
    p = some_plan(s, tp, executor)
    if p is None:
        return
    back = Plan.from_json(p.to_json())
    assert back == p
    assert hash(back.layouts) == hash(p.layouts)
    assert Plan.from_json(p.to_json().decode()) == p
    assert back.to_json() == p.to_json()
    assert require(back, s.census)


def test_a_plan_is_immutable() -> None:
    p = plan(subject(config(q=9, kv=3)), 2).plan
    with pytest.raises(AttributeError):
        p.tp = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "null",
        "[]",
        "{}",
        "17",
        '"plan"',
        '{"name": "x"}',
        "{",
        b"\xff\xfe",
        b"\x00" * 10,
        "[" * 100_000,
        '{"tp": 1e999}',
    ],
)
def test_what_is_no_plan(text: str | bytes) -> None:
    with pytest.raises(OddrankError, match="not an oddrank plan"):
        Plan.from_json(text)


def test_another_version() -> None:
    p = plan(subject(config(q=9, kv=3)), 2).plan
    with pytest.raises(OddrankError, match=r"version 99; this oddrank reads version 1"):
        Plan.from_json(changed(p, version=99).to_json())


def _leaves(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    found = [path] if path else []
    if isinstance(value, dict):
        for k, v in value.items():
            found += _leaves(v, (*path, k))
    elif isinstance(value, list):
        for i, v in enumerate(value):
            found += _leaves(v, (*path, i))
    return found


def _damage(value: Any, rng: random.Random) -> Any:
    """One place changed, removed or doubled."""
    path = rng.choice(_leaves(value))
    at = value
    for key in path[:-1]:
        at = at[key]
    key = path[-1]
    how = rng.choice(["replace", "replace", "remove", "double", "nudge"])
    if how == "remove":
        del at[key]
    elif how == "double" and isinstance(at, list):
        at.insert(key, msgspec.json.decode(msgspec.json.encode(at[key])))
    elif how == "nudge" and isinstance(at[key], int) and not isinstance(at[key], bool):
        at[key] += rng.choice([-1, 1, 7, -1000])
    else:
        at[key] = rng.choice([None, 0, -1, 5, 2.5, "", "x", "mlp", [], {}, [0], True, 10**30, [[0, 3]]])
    return value


@settings(deadline=None, max_examples=300)
@given(st.integers(0, 2**32), st.integers(1, 3))
def test_a_damaged_plan_is_refused_or_still_sound(seed: int, times: int) -> None:
    """Whatever is changed in a plan's JSON, reading and proving it either works or says no; nothing else."""
    rng = random.Random(seed)
    variant = rng.choice(sorted(VARIANTS))
    s = subject(config(variant, q=9, kv=3, mlp=60, vocab=200, layers=1))
    tree = msgspec.json.decode(plan(s, rng.choice([1, 2, 3]), rng.choice(["vllm", "runtime"])).plan.to_json())
    for _ in range(times):
        tree = _damage(tree, rng)
    try:
        p = Plan.from_json(msgspec.json.encode(tree))
        require(p, s.census)
    except OddrankError as error:
        assert str(error)


# -- other sizes -------------------------------------------------------------------------------------------------


def _virtual(p: Plan) -> dict[str, list[int]]:
    return {name: source.tolist() for name, source in p.virtual().source.items()}


@settings(deadline=None)
@given(subjects(), st.integers(1, 9), executors, st.sampled_from(["auto", "pad", "replicate"]))
def test_a_plan_runs_at_every_divisor(s: Any, tp: int, executor: str, layout: str) -> None:
    p = some_plan(s, tp, executor, layout)
    if p is None:
        return
    engine = any(p.layout(a).in_engine for a in ("q_heads", "kv_heads"))
    for ranks in (m for m in range(1, tp + 1) if tp % m == 0):
        if engine and s.model.axis("kv_heads").count % ranks and ranks % s.model.axis("kv_heads").count:
            with pytest.raises(OddrankError, match="neither"):
                p.at(ranks)
            continue
        at = p.at(ranks)
        assert at.tp == ranks
        assert all(c.ok for c in prove(at, s.census)), prove(at, s.census)
        for axis in s.model.axes:
            if executor == "vllm" and axis.kind == "vocab":
                continue  # cut by the engine's own rule at every size
            if p.layout(axis.name).in_engine:
                continue
            # the same slots in the same order, merged
            joined = [x for r in range(ranks) for x in at.layout(axis.name).slots(r).tolist()]
            assert joined == [x for r in range(tp) for x in p.layout(axis.name).slots(r).tolist()]
        if executor == "vllm":
            assert _virtual(at) == _virtual(p)


@settings(deadline=None)
@given(subjects(), st.integers(1, 9), st.sampled_from(["auto", "pad", "replicate"]))
def test_equal_ranks_run_at_every_size_that_divides_the_planned_counts(s: Any, tp: int, layout: str) -> None:
    p = some_plan(s, tp, "vllm", layout)
    if p is None or p.layout("kv_heads").in_engine:
        return
    totals = [p.layout(a).total() for a in ("q_heads", "kv_heads", "mlp")]
    for ranks in range(1, 13):
        if all(t % ranks == 0 for t in totals):
            at = p.at(ranks)
            assert all(c.ok for c in prove(at, s.census))
            assert _virtual(at) == _virtual(p)
            assert at.layout("q_heads").counts() == (totals[0] // ranks,) * ranks
        elif tp % ranks:
            with pytest.raises(OddrankError, match="do not divide"):
                p.at(ranks)


def test_a_plan_for_24_over_4_at_3_runs_at_6_and_1_too() -> None:
    """36/6 planned: 12/2 at 3 ranks, 6/1 at 6, 36/6 at one."""
    p = plan(subject(config(q=24, kv=4, mlp=1152)), 3, "vllm", "pad").plan
    assert [p.at(m).layout("q_heads").counts() for m in (1, 2, 3, 6)] == [(36,), (18,) * 2, (12,) * 3, (6,) * 6]
    assert [p.at(m).layout("kv_heads").counts() for m in (1, 2, 3, 6)] == [(6,), (3,) * 2, (2,) * 3, (1,) * 6]
    with pytest.raises(OddrankError, match="4 ranks do not divide"):
        p.at(4)


def test_ragged_ranks_only_merge() -> None:
    p = plan(subject(config(q=24, kv=4)), 6).plan
    assert p.at(3).layout("q_heads").counts() == (8, 8, 8)
    assert p.at(1).layout("q_heads").counts() == (24,)
    for ranks in (0, -1, 4, 12):
        with pytest.raises(OddrankError, match=r"1, 2, 3, 6"):
            p.at(ranks)


def test_owners_stay_on_the_rank_that_holds_theirs() -> None:
    s = subject(config("llama+qkv_bias+o_bias+mlp_bias", q=12, kv=4))
    p = plan(s, 6).plan
    p = changed(p, owners=tuple((name, 5) for name, _ in p.owners))
    assert p.owners
    for ranks, rank in ((6, 5), (3, 2), (2, 1), (1, 0)):
        assert {r for _, r in p.at(ranks).owners} == {rank}


def test_engine_copies_merge_into_parts_or_copies() -> None:
    """3 KV heads on 6 ranks, copied by the engine: whole at 1 and 3 ranks, impossible at 2, more copies at 12."""
    s = subject(config(q=12, kv=3, head_dim=8))
    p = plan(s, 6, "vllm").plan
    assert p.layout("kv_heads").in_engine
    assert [p.at(3).layout("kv_heads").slots(r).tolist() for r in range(3)] == [[0], [1], [2]]
    assert p.at(1).layout("kv_heads").slots(0).tolist() == [0, 1, 2]
    assert [p.at(12).layout("kv_heads").slots(r).tolist() for r in range(12)] == [[i // 4] for i in range(12)]
    for ranks in (1, 3, 6, 12):
        assert all(c.ok for c in prove(p.at(ranks), s.census))
    with pytest.raises(OddrankError, match="2 is neither"):
        p.at(2)


# -- identity ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("variant", ["llama", "qwen2"])
@pytest.mark.parametrize(
    ("q", "kv", "mlp", "vocab", "served"),
    [
        (32, 8, 512, 128256, (1, 2, 4, 8, 16)),
        (16, 2, 512, 248320, (1, 2, 4, 8, 16)),
        (9, 3, 1536, 49152, (1, 3)),
        (40, 8, 27392, 152064, (1, 2, 4, 8)),
        (28, 4, 18944, 152064, (1, 2, 4)),
    ],
)
def test_where_stock_vllm_serves_the_plan_is_the_identity(
    variant: str, q: int, kv: int, mlp: int, vocab: int, served: tuple[int, ...]
) -> None:
    """vLLM's rule: heads divide, KV heads divide or are divided, widths divide, the padded vocabulary divides."""
    s = subject(config(variant, q=q, kv=kv, mlp=mlp, vocab=vocab, layers=1))
    for tp in range(1, min(q, 16) + 1):
        p = some_plan(s, tp, "vllm")
        stock = q % tp == 0 and (kv % tp == 0 or tp % kv == 0) and mlp % tp == 0 and (-(-vocab // 64) * 64) % tp == 0
        assert stock == (tp in served)
        if stock:
            assert p is not None and p.kind == "identity" and p.is_identity()
        elif p is not None:
            assert p.kind != "identity"


def test_only_the_engine_s_own_padding_leaves_the_checkpoint_as_it_is() -> None:
    """A vocabulary that does not divide is padded by vLLM itself: no tensor changes, but the plan is no identity."""
    s = subject(config(q=12, kv=3, mlp=96, vocab=64))
    p = plan(s, 3, "vllm").plan
    assert p.is_identity()
    assert p.layout("vocab").total() == 192


def test_digest_tells_configs_apart_and_not_their_order() -> None:
    c = config(q=9, kv=3)
    assert config_digest(c) == config_digest(dict(reversed(c.items())))
    assert config_digest(c) != config_digest({**c, "rope_theta": 1e6})


def test_runs_stay_short_for_a_large_vocabulary() -> None:
    """A layout of 248,320 rows is a few numbers."""
    p = plan(subject(config(q=24, kv=4, vocab=248320, mlp=17408)), 3, "vllm").plan
    assert sum(len(runs) for la in p.layouts for runs in la.ranks) < 60
    assert p.layout("vocab").ranks[2] == (Run(165632, 82688), Run(-1, 128))
    assert len(p.to_json()) < 10_000


def test_slots_of_all_ranks_are_the_virtual_checkpoint() -> None:
    for q, kv in itertools.islice(HEADS, 5):
        p = plan(subject(config(q=q, kv=kv, mlp=100)), 5, "vllm").plan
        for axis in ("q_heads", "kv_heads", "mlp"):
            if p.layout(axis).in_engine:
                continue
            whole = np.concatenate([p.slots(r).source[axis] for r in range(5)])
            assert p.virtual().source[axis].tolist() == whole.tolist()
