"""Traps of gated delta nets and gated attention, each simulated: shapes stay valid and the logits change, or the proof
refuses. A family file that says the wrong thing is noticed by the experiment, not by the proof."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import numpy as np
import pytest
from hybrid import interpreter
from hybrid.random_plans import equal_plan, ragged_plan
from hybrid.subjected import DIFFERENT, SAME, Subjected, distance, virtual
from hybrid.tiny import FAMILIES, FULL, LINEAR, Heads, config, transformers_logits
from proof.tiny import F64

from oddrank.formats import formats
from oddrank.geometry import Along, Concat, Role
from oddrank.layout.plan import Plan
from oddrank.layout.proof import prove
from oddrank.layout.solver import Request
from oddrank.planner import plan_subject

HEADS = Heads(6, 2, 4, 8)


@pytest.fixture(scope="module", params=FAMILIES)
def m(request: pytest.FixtureRequest) -> Subjected:
    family = str(request.param)
    # key and value heads of different widths, so that nothing fits by accident
    return Subjected(family, 11, config(family, HEADS, layers=(LINEAR, FULL), widths=(4, 6)), stacked=True)


def wrong(m: Subjected, plan: Plan, cut: interpreter.Cut) -> float:
    return distance(interpreter.logits(m.config, plan, m.weights, m.prompt, cut=cut), m.reference)


@pytest.mark.parametrize("tensors", [("in_proj_qkv", "conv1d"), ("in_proj_qkv",), ("conv1d",)])
def test_packed_sections_cut_as_one_block(m: Subjected, tensors: tuple[str, ...]) -> None:
    """Trap 2: q|k|v and the convolution over it cut in equal consecutive parts at TP=2. Every shape is right."""
    plan = plan_subject(m.subject, Request(tp=2, executor="vllm")).plan
    assert plan.is_identity() and m.by_ranks(plan) < SAME

    def one_block(rank: int, name: str, local: F64) -> F64:
        if not any(t in name for t in tensors):
            return local
        part = np.split(m.weights[name], 2)[rank]
        assert part.shape == local.shape
        return part

    def sections(rank: int, name: str, local: F64) -> F64:
        if not any(t in name for t in tensors):
            return local
        k, v = HEADS.k * 4, HEADS.v * 6
        parts = np.split(m.weights[name], [k, 2 * k])
        assert len(parts[2]) == v
        return np.concatenate([np.split(p, 2)[rank] for p in parts])

    assert wrong(m, plan, sections) < SAME
    assert wrong(m, plan, one_block) > DIFFERENT


def test_query_and_gate_rows_cut_as_two_halves(m: Subjected) -> None:
    """q_proj is per head [query | gate], not all queries before all gates."""
    plan = plan_subject(m.subject, Request(tp=2, executor="vllm")).plan

    def halves(rank: int, name: str, local: F64) -> F64:
        if "q_proj.weight" not in name:
            return local
        queries, gates = np.split(m.weights[name], 2)
        part = np.concatenate([np.split(queries, 2)[rank], np.split(gates, 2)[rank]])
        assert part.shape == local.shape
        return part

    assert wrong(m, plan, halves) > DIFFERENT


def with_dims(role: Role, at: int, dim: Concat | Along) -> Role:
    return msgspec.structs.replace(role, dims=(*role.dims[:at], dim, *role.dims[at + 1 :]))


K, V = Along("gdn_k_heads", 4), Along("gdn_v_heads", 6)
FALSEHOODS: dict[str, tuple[str, Callable[[Role], Role]]] = {
    "value before keys": ("in_proj_qkv.weight", lambda r: with_dims(r, 0, Concat((V, K, K)))),
    "key, value, key": ("in_proj_qkv.weight", lambda r: with_dims(r, 0, Concat((K, V, K)))),
    "convolution in another order": ("conv1d.weight", lambda r: with_dims(r, 0, Concat((V, K, K)))),
    "gates after queries": (
        "q_proj.weight",
        lambda r: with_dims(r, 0, Concat((Along("q_heads", 4), Along("q_heads", 4)))),
    ),
    "value rows follow the key heads": ("in_proj_z.weight", lambda r: with_dims(r, 0, Along("gdn_k_heads", 12))),
    "gate and up interleaved": ("gate_up_proj", lambda r: with_dims(r, 1, Along("moe", 2))),
}  # fmt: skip


@pytest.mark.parametrize("falsehood", FALSEHOODS)
def test_a_family_that_says_the_wrong_thing(m: Subjected, falsehood: str) -> None:
    """The proof trusts the family, so it accepts; the shapes agree; the experiment does not."""
    suffix, change = FALSEHOODS[falsehood]
    model = m.subject.model
    if not any(r.name.endswith(suffix) for r in model.roles):
        pytest.skip(f"this family has no {suffix}")
    roles = tuple(change(r) if r.name.endswith(suffix) and "mtp" not in r.name else r for r in model.roles)
    stock = model.stock()
    for old, new in zip(model.roles, roles, strict=True):
        assert [d.size(stock) for d in old.dims] == [d.size(stock) for d in new.dims]
    # permuted heads at the trained ratio, so that every shape is still right
    plan = plan_with(m, lambda p: p.tp > 1 and total(p, "gdn_v_heads") * HEADS.k == total(p, "gdn_k_heads") * HEADS.v)
    assert m.by_ranks(plan) < SAME
    false = msgspec.structs.replace(plan, model=msgspec.structs.replace(model, roles=roles))
    assert all(c.ok for c in prove(false, m.subject.census))
    assert m.by_ranks(false) > DIFFERENT


def plan_with(m: Subjected, wanted: Callable[[Plan], bool], maker: Callable[..., Plan] = equal_plan) -> Plan:
    rng = np.random.default_rng(3)
    while True:
        plan = maker(m.subject, rng)
        if wanted(plan):
            return plan


def total(plan: Plan, axis: str) -> int:
    return plan.layout(axis).total()


def dummies(plan: Plan, axis: str) -> int:
    return total(plan, axis) - sum(plan.layout(axis).real())


def test_what_dummy_heads_are_filled_with(m: Subjected) -> None:
    """A_log, dt_bias, the convolution and every projection of a dummy head are zero; of a real one, as trained."""
    plan = plan_with(m, lambda p: dummies(p, "gdn_v_heads") > 0 and dummies(p, "gdn_k_heads") > 0)
    _, made = virtual(plan, m.config, m.weights)
    v, k = (plan.virtual().source[a] for a in ("gdn_v_heads", "gdn_k_heads"))
    at = "model.layers.0.linear_attn."
    for name in ("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight"):
        assert (made[at + name][v < 0] == 0.0).all()
        np.testing.assert_array_equal(made[at + name][v >= 0], m.weights[at + name][v[v >= 0]])
    for name in ("in_proj_qkv.weight", "conv1d.weight"):
        q_part, k_part, v_part = np.split(made[at + name], [4 * len(k), 8 * len(k)])
        trained = np.split(m.weights[at + name], [4 * HEADS.k, 8 * HEADS.k])
        for part, source, slots, width in zip((q_part, k_part, v_part), trained, (k, k, v), (4, 4, 6), strict=True):
            rows = part.reshape(len(slots), width, -1)
            assert (rows[slots < 0] == 0.0).all()
            np.testing.assert_array_equal(rows[slots >= 0], source.reshape(-1, *rows.shape[1:])[slots[slots >= 0]])
    out = made[at + "out_proj.weight"].reshape(-1, len(v), 6)
    assert (out[:, v < 0] == 0.0).all()
    np.testing.assert_array_equal(made[at + "norm.weight"], m.weights[at + "norm.weight"])


def test_a_decay_that_is_not_finite(m: Subjected, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fill of A_log or dt_bias that is no number reaches every logit through a dummy's zero columns."""
    plan = plan_with(m, lambda p: dummies(p, "gdn_v_heads") > 0)
    assert m.by_ranks(plan) < SAME
    a_log = "model.layers.0.linear_attn.A_log"

    def no_number(rank: int, name: str, local: F64) -> F64:
        return np.where(local == 0.0, np.nan, local) if name == a_log else local

    assert wrong(m, plan, no_number) == float("inf")
    dense = formats()["dense"]
    nan = int(np.float64(np.nan).view(np.uint64))
    filled = msgspec.structs.replace(dense, stored=(msgspec.structs.replace(dense.stored[0], row_fill=nan),))
    monkeypatch.setitem(formats(), "dense", filled)
    assert "silence" in m.failed(plan)
    assert m.by_ranks(plan) == m.by_transformers(plan) == float("inf")


def test_a_dummy_key_head_has_no_length(m: Subjected) -> None:
    """l2norm of a zero vector is finite, in transformers too, because of its eps. Without it every logit is NaN."""
    plan = plan_with(m, lambda p: dummies(p, "gdn_k_heads") > 0)
    assert m.by_transformers(plan) < SAME and m.by_ranks(plan) < SAME
    bare = interpreter.logits(m.config, plan, m.weights, m.prompt, l2_eps=0.0)
    assert np.isnan(bare).all()


@pytest.mark.parametrize("maker", [equal_plan, ragged_plan])
def test_zero_columns_are_what_silences_a_dummy(
    m: Subjected, maker: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A dummy query beside a real KV head puts out half of mean(V), its gate being sigmoid(0): the zero columns of
    o_proj silence it."""

    def reads_a_real_head(plan: Plan) -> bool:
        pairing = next(p for p in plan.pairings if p.follower == "q_heads")
        return any(
            q < 0 <= plan.layout("kv_heads").slots(r)[at]
            for r in range(plan.tp)
            for q, at in zip(plan.layout("q_heads").slots(r), pairing.ranks[r], strict=True)
        )

    plan = plan_with(m, reads_a_real_head, maker)
    assert m.by_ranks(plan) < SAME
    dense = formats()["dense"]
    one = int(np.float64(1.0).view(np.uint64))
    leaky = msgspec.structs.replace(dense, stored=(msgspec.structs.replace(dense.stored[0], column_fill=one),))
    monkeypatch.setitem(formats(), "dense", leaky)
    assert "silence" in m.failed(plan)
    assert m.by_ranks(plan) > DIFFERENT


def test_value_heads_moved_away_from_their_key_head(m: Subjected) -> None:
    """GDN 4 key / 8 value heads padded to 6 / 12 at the tail and left in place: head 2 would read key head 1 // 1."""
    stock = m.subject.model.stock()
    plan = plan_subject(m.subject, Request(tp=3, executor="vllm", layout="pad")).plan
    c, made = virtual(plan, m.config, m.weights)
    assert (c["linear_num_key_heads"], c["linear_num_value_heads"]) == (6, 12)
    assert distance(transformers_logits(c, made, m.prompt), m.reference) < SAME
    # the same tensors with the tail's dummies spread otherwise: 8 value heads on 3 key heads each
    at, v = "model.layers.0.linear_attn.", stock["gdn_v_heads"]
    order = np.concatenate([np.arange(v).reshape(4, 2).T.reshape(-1), np.full(4, -1)])
    source = plan.virtual().source["gdn_v_heads"]
    np.testing.assert_array_equal(source, [*range(v), -1, -1, -1, -1])
    for name in ("A_log", "dt_bias", "in_proj_a.weight", "in_proj_b.weight", "in_proj_z.weight"):
        rows = made[at + name].reshape(12, -1)
        made[at + name] = rows[np.where(order < 0, 11, order)].reshape(made[at + name].shape)
    for name in ("in_proj_qkv.weight", "conv1d.weight"):
        keys, values = np.split(made[at + name], [2 * 6 * 4])
        heads = values.reshape(12, 6, -1)[np.where(order < 0, 11, order)]
        made[at + name] = np.concatenate([keys, heads.reshape(values.shape)])
    out = made[at + "out_proj.weight"]
    made[at + "out_proj.weight"] = out.reshape(-1, 12, 6)[:, np.where(order < 0, 11, order)].reshape(out.shape)
    assert distance(transformers_logits(c, made, m.prompt), m.reference) > DIFFERENT
