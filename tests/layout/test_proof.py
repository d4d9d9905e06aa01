"""Every proof check has mutations that this very check catches, over all families."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
from layout.shapes import (
    VARIANTS,
    Config,
    Tensor,
    changed,
    config,
    plan,
    subject,
    subject_of,
    tensor_table,
    toy_model,
    toy_table,
)

from oddrank.errors import OddrankError
from oddrank.formats import Format, Stored, formats
from oddrank.geometry import Along, Crosstalk, Groups, Role, Whole
from oddrank.layout.census import take_census
from oddrank.layout.executors import Constraints
from oddrank.layout.layouts import Layout, Pairing, even_pairing
from oddrank.layout.plan import Plan
from oddrank.layout.proof import Check, ProofError, prove, require, word_is_finite
from oddrank.layout.storage import units
from oddrank.planner import Subject

CHECKS = ("coverage", "exactly once", "pairing", "silence", "storage", "executor", "no crosstalk")
BOTH = pytest.mark.parametrize("executor", ["runtime", "vllm"])
FAMILIES = pytest.mark.parametrize("variant", VARIANTS)


def shape(variant: str, **more: Any) -> Config:
    return config(variant, q=12, kv=4, mlp=100, vocab=200, **more)


def made(variant: str, executor: str, tp: int = 3, layout: str = "pad") -> tuple[Subject, Plan]:
    s = subject(shape(variant))
    return s, plan(s, tp, executor, layout).plan


def verdict(s: Subject, p: Plan, name: str) -> Check:
    return next(c for c in prove(p, s.census) if c.name == name)


def refused(s: Subject, p: Plan, name: str, *words: str, only: bool = True) -> str:
    """The check's sentence, once it has refused the plan (and, by default, no other check has)."""
    checks = prove(p, s.census)
    assert [c.name for c in checks] == list(CHECKS)
    failed = [c.name for c in checks if not c.ok]
    assert name in failed and (not only or failed == [name]), checks
    detail = next(c.detail for c in checks if c.name == name)
    for word in words:
        assert word in detail
    with pytest.raises(ProofError) as caught:
        require(p, s.census)
    assert f"{name}: {detail}" in str(caught.value)
    assert caught.value.checks == checks
    assert caught.value.exit_code == 2
    return detail


def with_slots(p: Plan, axis: str, edit: Any) -> Plan:
    """The plan with one axis's slots edited; `edit` changes a list of lists in place."""
    old = p.layout(axis)
    ranks = [old.slots(r).tolist() for r in range(p.tp)]
    edit(ranks)
    new = Layout.of(axis, ranks, old.in_engine)
    return changed(p, layouts=tuple(new if la.axis == axis else la for la in p.layouts))


@FAMILIES
@BOTH
@pytest.mark.parametrize("layout", ["auto", "pad", "replicate"])
def test_sound_plans_pass(variant: str, executor: str, layout: str) -> None:
    for tp in (1, 2, 3, 5, 7):
        s, p = made(variant, executor, tp, layout)
        assert [c.name for c in prove(p, s.census)] == list(CHECKS)
        assert all(c.ok and c.detail for c in prove(p, s.census))
        assert [c.name for c in prove(p, None)] == list(CHECKS[1:])


# -- 1 coverage ------------------------------------------------------------------------------------------------------


def _table(variant: str, **edits: Tensor | None) -> dict[str, Tensor]:
    table = tensor_table(shape(variant))
    for name, tensor in edits.items():
        if tensor is None:
            del table[name]
        else:
            table[name] = tensor
    return table


def coverage_problem(variant: str, table: dict[str, Tensor], *words: str, c: Config | None = None) -> None:
    good, p = made(variant, "runtime")
    s = subject(c or shape(variant), table)
    refused(changed(good, census=s.census), p, "coverage", *words)


@FAMILIES
def test_a_missing_tensor(variant: str) -> None:
    for name in tensor_table(shape(variant)):
        coverage_problem(variant, _table(variant, **{name: None}), f"{name} is missing")


@FAMILIES
def test_a_tensor_of_another_shape(variant: str) -> None:
    for name, t in tensor_table(shape(variant)).items():
        odd = Tensor("BF16", (t.shape[0] + 1, *t.shape[1:]))
        coverage_problem(variant, _table(variant, **{name: odd}), name, f"{list(odd.shape)}", f"{list(t.shape)}")


@FAMILIES
def test_a_tensor_of_an_unknown_dtype(variant: str) -> None:
    for name in ("model.layers.1.mlp.down_proj.weight", "model.norm.weight"):
        t = tensor_table(shape(variant))[name]
        coverage_problem(variant, _table(variant, **{name: Tensor("I32", t.shape)}), name, "I32", "dense")


@FAMILIES
@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.q_proj.weight_scale_inv",
        "model.layers.2.self_attn.q_proj.weight",  # one layer more than the config says
        "visual.patch_embed.weight",
        "mtp.layers.0.mlp.down_proj.weight",
        "model.layers.00.mlp.up_proj.weight",
    ],
)
def test_a_tensor_too_many(variant: str, name: str) -> None:
    coverage_problem(variant, _table(variant, **{name: Tensor("BF16", (8, 8))}), f"{name} BF16 [8, 8] has no role")


@FAMILIES
def test_biases_that_the_config_does_not_promise(variant: str) -> None:
    name = "model.layers.0.self_attn.q_proj.bias"
    has = name in tensor_table(shape(variant))
    table = _table(variant, **{name: None if has else Tensor("BF16", (96,))})
    coverage_problem(variant, table, name)


@FAMILIES
def test_another_checkpoint_than_the_plan_s(variant: str) -> None:
    s, p = made(variant, "runtime")
    other = subject(shape(variant), tensor_table(shape(variant), "F32"))
    refused(changed(s, census=other.census), p, "coverage", "stored otherwise")


@FAMILIES
def test_rotary_buffers_are_ignored_and_a_tied_copy_is_an_alias(variant: str) -> None:
    c = shape(variant, tied=True)
    table = {
        **tensor_table(c),
        "lm_head.weight": Tensor("BF16", (200, 96)),
        "model.layers.0.self_attn.rotary_emb.inv_freq": Tensor("F32", (4,)),
    }
    s = subject(c, table)
    assert s.census.aliased == ("lm_head.weight",)
    assert s.census.ignored == ("model.layers.0.self_attn.rotary_emb.inv_freq",)
    planned = plan(s, 3)
    assert f"{len(table) - 2} of {len(table)} tensors have a role, 1 are ignored, 1 aliased" in (
        verdict(s, planned.plan, "coverage").detail
    )


def test_only_the_first_problems_are_spelled_out() -> None:
    table = {k: v for k, v in tensor_table(shape("llama")).items() if "mlp" not in k}
    coverage_problem("llama", table, "(and 3 more)")


def test_mixed_dtypes_are_told_apart() -> None:
    """One layer's projection in float32: its own use, with its own bytes."""
    name = "model.layers.1.mlp.up_proj.weight"
    s = subject(shape("llama"), _table("llama", **{name: Tensor("F32", (100, 96))}))
    uses = [u for u in s.census.uses if s.model.roles[u.role].name.endswith("up_proj.weight")]
    assert sorted((u.dtypes, u.instances, u.count) for u in uses) == [(("BF16",), (0,), 1), (("F32",), (1,), 1)]
    assert plan(s, 3).checks[0].ok


# -- 2 exactly once ------------------------------------------------------------------------------------------------


@FAMILIES
@BOTH
@pytest.mark.parametrize("axis", ["q_heads", "mlp"])
def test_an_element_dropped(variant: str, executor: str, axis: str) -> None:
    s, p = made(variant, executor)
    p = with_slots(p, axis, lambda ranks: ranks[1].__setitem__(0, -1))
    refused(s, p, "exactly once", f"{axis} is summed", "sits on 0")


@FAMILIES
@BOTH
@pytest.mark.parametrize("axis", ["q_heads", "mlp"])
def test_an_element_doubled(variant: str, executor: str, axis: str) -> None:
    s, p = made(variant, executor)

    def double(ranks: list[list[int]]) -> None:
        if -1 in ranks[2]:
            ranks[2].remove(-1)
        ranks[2].insert(0, ranks[0][0])

    p = with_slots(p, axis, double)
    refused(s, p, "exactly once", f"{axis} is summed", "element 0 sits on 2", only=axis == "mlp")


@FAMILIES
def test_a_vocabulary_row_doubled_or_dropped(variant: str) -> None:
    s, p = made(variant, "runtime")
    refused(s, with_slots(p, "vocab", lambda r: r[0].append(199)), "exactly once", "element 199 sits on 2")
    refused(s, with_slots(p, "vocab", lambda r: r[2].remove(199)), "exactly once", "element 199 sits on 0")


@FAMILIES
def test_a_replicated_axis_that_is_summed(variant: str) -> None:
    """Everything on every rank: TP times the right value."""
    s, p = made(variant, "runtime")
    p = with_slots(p, "mlp", lambda ranks: [r.__setitem__(slice(None), range(100)) for r in ranks])
    refused(s, p, "exactly once", "element 0 sits on 3")


@FAMILIES
def test_an_element_the_model_has_not(variant: str) -> None:
    s, p = made(variant, "runtime")
    refused(s, with_slots(p, "mlp", lambda r: r[0].append(100)), "exactly once", "element 100 of 100")
    refused(s, with_slots(p, "kv_heads", lambda r: r[0].append(4)), "exactly once", "element 4 of 4")


@FAMILIES
def test_a_layout_over_other_ranks(variant: str) -> None:
    s, p = made(variant, "runtime")
    p = with_slots(p, "mlp", lambda ranks: ranks.append([]))
    refused(s, p, "exactly once", "mlp is laid out over 4 ranks, the plan has 3")


@FAMILIES
@BOTH
def test_owners_of_replicated_terms(variant: str, executor: str) -> None:
    s, p = made(variant, executor)
    joining = {r.name for r in s.model.roles if r.joins is not None}
    v = VARIANTS[variant]
    assert len(joining) == v.o_bias + v.mlp_bias
    assert {name for name, _ in p.owners} == joining
    stranger = ("model.layers.{layer}.input_layernorm.weight", 0)
    refused(s, changed(p, owners=(*p.owners, stranger)), "exactly once", "input_layernorm", "no term of a sum")
    for name in joining:
        rest = tuple(o for o in p.owners if o[0] != name)
        refused(s, changed(p, owners=rest), "exactly once", name, "one owner; it has 0")
        refused(s, changed(p, owners=(*p.owners, (name, 1))), "exactly once", name, "one owner; it has 2")
        refused(s, changed(p, owners=(*rest, (name, 3))), "exactly once", name, "rank 3")
        refused(s, changed(p, owners=(*rest, (name, -1))), "exactly once", name, "rank -1")
        assert verdict(s, changed(p, owners=(*rest, (name, 2))), "exactly once").ok


# -- 3 pairing -----------------------------------------------------------------------------------------------------


@FAMILIES
@BOTH
def test_query_heads_of_two_kv_heads_exchanged(variant: str, executor: str) -> None:
    s, p = made(variant, executor)

    def swap(ranks: list[list[int]]) -> None:
        ranks[0][0], ranks[1][0] = ranks[1][0], ranks[0][0]

    p = with_slots(p, "q_heads", swap)
    refused(s, p, "pairing", "rank 0, slot 0: q_heads 6 belongs to kv_heads 2, but the slot it reads holds 0")


@FAMILIES
@BOTH
@pytest.mark.parametrize(("instead", "words"), [(3, "holds 3"), (-1, "is a dummy")])
def test_a_kv_slot_that_holds_something_else(variant: str, executor: str, instead: int, words: str) -> None:
    s, p = made(variant, executor)
    p = with_slots(p, "kv_heads", lambda ranks: ranks[0].__setitem__(1, instead))
    refused(s, p, "pairing", "rank 0, slot 3: q_heads 3 belongs to kv_heads 1", words)


@FAMILIES
def test_one_entry_of_the_map_changed(variant: str) -> None:
    s, p = made(variant, "runtime", layout="auto")
    maps = [list(m) for m in p.pairings[0].ranks]
    maps[2][0] = 1 - maps[2][0]
    p = changed(p, pairings=(Pairing("q_heads", "kv_heads", tuple(map(tuple, maps))),))
    refused(s, p, "pairing", "rank 2, slot 0")


@FAMILIES
def test_a_map_of_the_wrong_length_or_range(variant: str) -> None:
    s, p = made(variant, "runtime", layout="auto")
    ranks = p.pairings[0].ranks
    for bad, words in (
        (((*ranks[0], 0), *ranks[1:]), "4 q_heads slots and a map for 5"),
        (((*ranks[0][:-1], 9), *ranks[1:]), "reads kv_heads slot 9 of 2"),
        (((*ranks[0][:-1], -1), *ranks[1:]), "reads kv_heads slot"),
    ):
        refused(s, changed(p, pairings=(Pairing("q_heads", "kv_heads", bad),)), "pairing", words)
    few = changed(p, pairings=(Pairing("q_heads", "kv_heads", ranks[:-1]),))
    refused(s, few, "pairing", "no map to kv_heads for each of 3 ranks", only=False)
    refused(s, changed(p, pairings=()), "pairing", "no map")
    refused(s, changed(p, pairings=(Pairing("q_heads", "mlp", ranks),)), "pairing", "no map")


def test_a_plan_whose_parts_do_not_fit_together_fails_every_check_that_needs_them() -> None:
    s, p = made("llama", "runtime")
    checks = prove(changed(p, layouts=p.layouts[1:]), s.census)
    assert [c.name for c in checks] == list(CHECKS)
    assert not any(c.ok for c in checks if c.name in ("exactly once", "pairing"))
    assert "cannot be checked: it lays out kv_heads, mlp, vocab; the model has q_heads" in checks[1].detail


@FAMILIES
def test_dummies_at_the_tail_only(variant: str) -> None:
    """Trap 1: 12 heads padded to 16 at the tail and read four to a KV head; shapes are valid, the ratio is not."""
    s = subject(shape(variant))
    p = plan(s, 1, "vllm").plan
    follow, lead = Layout.of("q_heads", [[*range(12), -1, -1, -1, -1]]), p.layout("kv_heads")
    layouts = tuple(follow if la.axis == "q_heads" else la for la in p.layouts)
    p = changed(p, layouts=layouts, pairings=(even_pairing(follow, lead),))
    refused(s, p, "pairing", "rank 0, slot 3: q_heads 3 belongs to kv_heads 1, but the slot it reads holds 0")


# -- 4 silence -----------------------------------------------------------------------------------------------------


def _dense(**fills: int) -> Format:
    dense = formats()["dense"]
    return msgspec.structs.replace(dense, stored=(msgspec.structs.replace(dense.stored[0], **fills),))


@FAMILIES
@BOTH
@pytest.mark.parametrize("fills", [{"row_fill": 1}, {"column_fill": 1}, {"row_fill": 0x3F80, "column_fill": 0x3F80}])
def test_a_fill_that_is_not_zero(
    variant: str, executor: str, fills: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    s, p = made(variant, executor)
    monkeypatch.setitem(formats(), "dense", _dense(**fills))
    refused(s, p, "silence", "format dense", "not its word for zero")


def _scaled(name: str = "scaled", **scale: int) -> Format:
    """Values in bytes, a bf16 scale for every row: as compressed-tensors' per-channel fp8."""
    return Format(
        name,
        stored=(
            Stored(".weight", ("F8_E4M3",)),
            Stored(".weight_rowscale", ("BF16",), block=(1, 0), shared=True, **{"row_fill": 0x3F80, **scale}),
        ),
    )


@pytest.mark.parametrize("fills", [{"row_fill": 0x7F80}, {"column_fill": 0x7FC0}, {"row_fill": 0xFF80}])
@BOTH
def test_a_scale_filled_with_infinity_or_nan(
    executor: str, fills: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """0 x infinity is NaN: a zero weight under such a scale is not silent."""
    monkeypatch.setitem(formats(), "scaled", _scaled())
    model = toy_model(followers=6, leaders=2, widths={"mlp": 30})
    # a scale [N, 1] for every matrix [N, K]
    table = dict(toy_table(model, {".weight": ("F8_E4M3", (1, 1))}))
    table |= {f"{n}_rowscale": Tensor("BF16", (t.shape[0], 1)) for n, t in list(table.items())}
    s = subject_of(model, table)
    assert not s.census.problems
    p = plan(s, 4, executor, "pad").plan
    assert verdict(s, p, "silence").ok
    monkeypatch.setitem(formats(), "scaled", _scaled(**fills))
    refused(s, p, "silence", ".weight_rowscale", "not finite")


def test_finite_words_are_told_from_the_others() -> None:
    """Against the number formats' own decoding by numpy and ml_dtypes."""
    ml = pytest.importorskip("ml_dtypes")
    words8, words16 = np.arange(256, dtype=np.uint8), np.arange(65536, dtype=np.uint16)
    for name, words, dtype in (
        ("F16", words16, np.float16),
        ("BF16", words16, ml.bfloat16),
        ("F8_E5M2", words8, ml.float8_e5m2),
        ("F8_E4M3", words8, ml.float8_e4m3fn),
        ("F8_E8M0", words8, ml.float8_e8m0fnu),
    ):
        with np.errstate(invalid="ignore"):
            finite = np.isfinite(words.view(dtype).astype(np.float64))
        assert [word_is_finite(name, int(w)) for w in words] == finite.tolist(), name
    rng = np.random.default_rng(0)
    for name, unsigned, dtype in (("F32", np.uint32, np.float32), ("F64", np.uint64, np.float64)):
        special = np.array([0.0, -0.0, np.inf, -np.inf, np.nan, 1.0, np.finfo(dtype).max], dtype).view(unsigned)
        words = np.concatenate([special, rng.integers(0, np.iinfo(unsigned).max, 2000, dtype=unsigned)])
        finite = np.isfinite(words.view(dtype))
        assert [word_is_finite(name, int(w)) for w in words] == finite.tolist(), name
    assert all(word_is_finite(name, 0xFF) for name in ("U8", "I32", "I8"))


def test_dummies_that_no_zero_column_silences() -> None:
    """A summed axis with dummies needs a row-parallel tensor whose columns are zero."""
    model = toy_model(followers=6, leaders=2, widths={"mlp": 30})
    deaf = msgspec.structs.replace(model, roles=tuple(r for r in model.roles if not r.name.endswith("down.weight")))
    s = subject_of(deaf, toy_table(deaf))
    p = plan(s, 3).plan
    padded = with_slots(p, "mlp", lambda ranks: ranks[0].append(-1))
    refused(s, padded, "silence", "mlp has dummies, but no row-parallel tensor")
    assert verdict(s, p, "silence").ok


def test_a_dummy_expert() -> None:
    model = toy_model(followers=6, leaders=2, experts=8)
    s = subject_of(model, toy_table(model))
    p = plan(s, 3).plan
    assert p.layout("experts").counts() == (8, 8, 8)
    refused(s, with_slots(p, "experts", lambda ranks: ranks[0].append(-1)), "silence", "router")


# -- 5 storage -----------------------------------------------------------------------------------------------------


BLOCK = Format(
    "block8",
    stored=(
        Stored(".weight", ("F8_E4M3",)),
        Stored(".weight_scale_inv", ("F32",), block=(8, 8), shared=True, row_fill=0x3F800000, column_fill=0x3F800000),
    ),
)
PACKED = Format("packed4", stored=(Stored(".weight_packed", ("U8",), block=(1, 2)),))


def blocked(monkeypatch: pytest.MonkeyPatch, **shape_: Any) -> Subject:
    monkeypatch.setitem(formats(), "block8", BLOCK)
    model = toy_model(**shape_)
    return subject_of(model, toy_table(model, {".weight": ("F8_E4M3", (1, 1)), ".weight_scale_inv": ("F32", (8, 8))}))


@BOTH
def test_a_scale_block_that_would_mix_two(executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    s = blocked(monkeypatch, followers=6, leaders=2, head_dim=8, widths={"mlp": 48})
    assert not s.census.problems
    assert units(s.model, s.census.uses) == {"q_heads": 1, "kv_heads": 1, "mlp": 8}
    p = plan(s, 2, executor).plan
    cut = with_slots(p, "mlp", lambda ranks: ranks.__setitem__(slice(None), [[*range(20)], [*range(20, 48)]]))
    if executor == "vllm":
        cut = with_slots(cut, "mlp", lambda r: r.__setitem__(slice(None), [[*range(20), *[-1] * 8], [*range(20, 48)]]))
    refused(s, cut, "storage", "rank 1", "layers.{layer}.mlp.up.weight_scale_inv", "entries 2 and 3")
    swapped = with_slots(p, "mlp", lambda ranks: ranks[0].__setitem__(slice(6, 10), [8, 9, 6, 7]))
    refused(s, swapped, "storage", "rank 0", "entry 0 (elements 0 to 7) would mix source entries 0 and 1")
    # within a block, order does not matter to a scale
    inside = with_slots(p, "mlp", lambda ranks: ranks[0].__setitem__(slice(0, 2), [1, 0]))
    assert verdict(s, inside, "storage").ok


def test_heads_that_are_not_whole_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trap 10a in small: 12 rows a head in blocks of 8 are one and a half, so two heads are a unit."""
    s = blocked(monkeypatch, followers=12, leaders=12, head_dim=12)
    assert units(s.model, s.census.uses)["q_heads"] == 2
    p = plan(s, 4).plan
    assert set(p.layout("q_heads").counts()) <= {2, 4}
    odd = [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]
    bad = with_slots(p, "q_heads", lambda ranks: ranks.__setitem__(slice(None), odd))
    bad = with_slots(bad, "kv_heads", lambda ranks: ranks.__setitem__(slice(None), odd))
    bad = changed(bad, pairings=(Pairing("q_heads", "kv_heads", ((0, 1, 2),) * 4),))
    refused(s, bad, "storage", "rank 1", "would mix source entries 4 and 5")


@BOTH
def test_a_packed_word_that_would_straddle(executor: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two values a byte along K: the columns of down are cut in twos, and stay in their places."""
    monkeypatch.setitem(formats(), "packed4", PACKED)
    model = toy_model(followers=4, leaders=2, widths={"mlp": 12})
    s = subject_of(model, toy_table(model, {".weight_packed": ("U8", (1, 2))}))
    assert not s.census.problems
    p = plan(s, 2, executor).plan
    swapped = with_slots(p, "mlp", lambda ranks: ranks[0].__setitem__(slice(0, 2), [1, 0]))
    refused(s, swapped, "storage", "mlp.down.weight_packed", "packed entry 0")
    apart = with_slots(p, "mlp", lambda ranks: ranks[0].__setitem__(slice(0, 4), [0, 2, 1, 3]))
    refused(s, apart, "storage", "would mix source entries 0 and 1")
    moved = with_slots(p, "mlp", lambda ranks: ranks[0].__setitem__(slice(0, 4), [2, 3, 0, 1]))
    assert verdict(s, moved, "storage").ok


def test_an_interleaved_tensor_whose_slots_are_not_uniform() -> None:
    """Per key head [q, v, v]: three v slots on two k slots have no interleaved form."""
    model = toy_model(followers=4, leaders=2)
    packed = Role(
        "qv.weight", (Groups("kv_heads", (Along("kv_heads", 8), Along("q_heads", 8))), Whole(32)), "column", matrix=True
    )
    model = msgspec.structs.replace(model, roles=(*model.roles, packed))
    s = subject_of(model, toy_table(model))
    p = plan(s, 1, "vllm").plan
    bad = with_slots(p, "q_heads", lambda ranks: ranks[0].append(-1))
    bad = changed(bad, pairings=(Pairing("q_heads", "kv_heads", ((0, 0, 1, 1, 1),)),))
    refused(s, bad, "storage", "qv.weight", "5 q_heads slots do not group by 2 kv_heads", only=False)


# -- 6 executor ----------------------------------------------------------------------------------------------------


@FAMILIES
def test_unequal_ranks_for_vllm(variant: str) -> None:
    s, p = made(variant, "runtime", tp=5, layout="auto")
    detail = refused(s, changed(p, executor="vllm"), "executor", only=False)
    assert "vllm" in detail
    p = plan(s, 3, "vllm").plan
    uneven = with_slots(p, "mlp", lambda ranks: ranks[0].append(-1))
    refused(s, uneven, "executor", "same number of mlp", "runtime executor runs such a plan")
    assert all(c.ok for c in prove(changed(uneven, executor="runtime"), None) if c.name == "storage")


@FAMILIES
def test_a_map_that_vllm_cannot_express(variant: str) -> None:
    """Two queries of different KV slots exchanged together with their map entries: right, but not slot i // g."""
    s, p = made(variant, "vllm")

    def swap(ranks: list[list[int]]) -> None:
        ranks[0][0], ranks[0][3] = ranks[0][3], ranks[0][0]

    bad = with_slots(p, "q_heads", swap)
    maps = [list(m) for m in p.pairings[0].ranks]
    maps[0][0], maps[0][3] = maps[0][3], maps[0][0]
    bad = changed(bad, pairings=(Pairing("q_heads", "kv_heads", tuple(map(tuple, maps))),))
    refused(s, bad, "executor", "slot i // g", "runtime executor")


@FAMILIES
def test_axes_that_the_engine_lays_out_itself(variant: str) -> None:
    """The virtual checkpoint keeps them as trained, so another order in the plan would not be what runs."""
    s = subject(config(variant, q=12, kv=3, mlp=96, vocab=200))
    p = plan(s, 6, "vllm").plan
    assert p.layout("kv_heads").in_engine and p.layout("vocab").in_engine

    def back(ranks: list[list[int]]) -> None:
        ranks.reverse()

    turned = with_slots(with_slots(p, "kv_heads", back), "q_heads", back)
    assert verdict(s, turned, "pairing").ok
    refused(s, turned, "executor", "kv_heads by its own rule")
    refused(s, with_slots(p, "vocab", back), "executor", "vocab by its own rule")
    own = changed(p, layouts=tuple(changed(la, in_engine=False) if la.axis == "vocab" else la for la in p.layouts))
    refused(s, own, "executor", "vocab by its own rule")
    ours = plan(s, 3, "runtime").plan
    theirs = tuple(changed(la, in_engine=True) if la.axis == "vocab" else la for la in ours.layouts)
    refused(s, changed(ours, layouts=theirs), "executor", "vocab is left to runtime")


@FAMILIES
@BOTH
@pytest.mark.parametrize(
    ("constraints", "words"),
    [
        (Constraints(exact={"mlp": 120}), "mlp=120 was asked for; the plan has"),
        (Constraints(multiple={"mlp": 50}), "mlp_multiple=50 was asked for; a rank has"),
        (Constraints(kv_bytes=1), "kv_bytes=1 was asked for; the plan needs"),
        (Constraints(gqa=2), "gqa=2 was asked for; a rank has 6 q_heads on 2"),
    ],
)
def test_the_user_s_constraints(variant: str, executor: str, constraints: Constraints, words: str) -> None:
    s, p = made(variant, executor)
    refused(s, changed(p, constraints=constraints), "executor", words)


def test_interleaved_tensors_of_ragged_ranks() -> None:
    """Per KV head [its own 2 rows, 2 for each of its 2 query heads]: interleaved where ranks are equal; section by
    section where three ranks have 2, 1 and 1 query heads."""
    model = toy_model(followers=4, leaders=2)
    dim = Groups("kv_heads", (Along("kv_heads", 2), Along("q_heads", 2)))
    packed = Role("qv.weight", (dim, Whole(32)), "column", matrix=True)
    model = msgspec.structs.replace(model, roles=(*model.roles, packed))
    s = subject_of(model, toy_table(model))
    stock = model.stock()
    equal = plan(s, 2, "vllm").plan
    assert dim.index(stock, equal.slots(1)).tolist() == [6, 7, 8, 9, 10, 11]
    p = plan(s, 3, "runtime").plan
    assert p.layout("q_heads").counts() == (2, 1, 1) and p.layout("kv_heads").counts() == (1, 1, 1)
    rows = [dim.index(stock, p.slots(rank)).tolist() for rank in range(3)]
    assert rows == [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9], [6, 7, 10, 11]]
    both = plan(s, 1, "runtime").plan
    assert dim.index(stock, both.slots(0)).tolist() == [0, 1, 6, 7, 2, 3, 4, 5, 8, 9, 10, 11]


# -- 7 no crosstalk ------------------------------------------------------------------------------------------------


NORM = Crosstalk("q_heads", "rms_norm", "layers.{layer}.q_norm")


def crossed(monkeypatch: pytest.MonkeyPatch | None = None) -> Subject:
    model = toy_model(followers=12, leaders=4, widths={"mlp": 96}, crosstalk=(NORM,))
    return subject_of(model, toy_table(model))


def test_a_norm_across_heads_over_dummies() -> None:
    s = crossed()
    with pytest.raises(OddrankError, match=r"no crosstalk: .*q_norm computes rms_norm across all 12 q_heads"):
        plan(s, 3, "vllm", "pad")
    p = plan(s, 3, "runtime", "pad").plan
    assert p.layout("q_heads").total() == 18
    p = changed(p, executor="vllm", constraints=Constraints())
    refused(s, p, "no crosstalk", "vllm would include dummies", "Other sizes may leave it as it was")
    ours = changed(p, model=msgspec.structs.replace(p.model, family="llama"))  # which our runtime has a model of
    refused(s, ours, "no crosstalk", "vllm would include dummies", "runtime executor computes it over the real ones")


def test_a_norm_across_heads_where_nothing_is_added() -> None:
    s = crossed()
    for tp in (1, 2, 4):
        assert verdict(s, plan(s, tp, "vllm").plan, "no crosstalk").ok
    regrouped = plan(s, 3, "vllm", "replicate").plan  # 12 / 12: every KV head equally often, no dummy
    assert regrouped.layout("q_heads").total() == 12
    assert verdict(s, regrouped, "no crosstalk").ok
    for tp in (1, 3, 5, 7):
        assert verdict(s, plan(s, tp, "runtime").plan, "no crosstalk").ok


def test_a_norm_across_copied_heads() -> None:
    """Equal copies leave a mean as it was, unequal ones do not."""
    model = toy_model(
        followers=12, leaders=4, widths={"mlp": 96}, crosstalk=(Crosstalk("kv_heads", "rms_norm", "k_norm"),)
    )
    s = subject_of(model, toy_table(model))
    regrouped = plan(s, 3, "vllm", "replicate").plan
    assert regrouped.layout("kv_heads").total() == 12
    assert verdict(s, regrouped, "no crosstalk").ok
    # one copy more of KV head 0, in a slot that only dummies read
    lead = Layout.of("kv_heads", [[0, 1], [2, 3], [0, -1]])
    p = plan(s, 3, "runtime", "pad").plan
    layouts = tuple(lead if la.axis == "kv_heads" else la for la in p.layouts)
    bad = changed(p, layouts=layouts, executor="vllm")
    refused(s, bad, "no crosstalk", "k_norm", "unequal copies")


@pytest.mark.parametrize("operation", ["slopes", "top_k"])
def test_other_operations_across_units(operation: Any) -> None:
    model = toy_model(
        followers=12, leaders=4, widths={"mlp": 96}, crosstalk=(Crosstalk("q_heads", operation, "layers.*.alibi"),)
    )
    s = subject_of(model, toy_table(model))
    p = plan(s, 3, "runtime", "pad").plan
    assert verdict(s, p, "no crosstalk").detail == f"{operation} across units handled"
    refused(s, changed(p, executor="vllm"), "no crosstalk", operation)
    # what goes by an element's number minds their order, even where each is there once
    p = plan(s, 3, "vllm", "replicate").plan
    assert verdict(s, p, "no crosstalk").ok
    turned = with_slots(with_slots(p, "q_heads", lambda r: r.reverse()), "kv_heads", lambda r: r.reverse())
    refused(s, turned, "no crosstalk", operation, "number them anew")
    normed = changed(turned.model, crosstalk=(NORM,))
    assert verdict(s, changed(turned, model=normed), "no crosstalk").ok


def test_census_of_an_unknown_format_names_what_it_found() -> None:
    s = subject(shape("llama"))
    census = take_census(s.model, {**tensor_table(shape("llama")), "model.norm.weight": Tensor("U8", (96,))})
    assert any("model.norm.weight is U8 [96]" in p for p in census.problems)
