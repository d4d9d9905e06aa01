"""Recipes against brute force: every word of the result looked up by who it belongs to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout.shapes import VARIANTS, config, plan, subject, subject_of, toy_model, toy_table
from proof.random_plans import equal_plan, ragged_plan

from oddrank.checkpoint.dtypes import STORAGE
from oddrank.formats import Format, Stored, formats
from oddrank.geometry import Slots
from oddrank.layout.plan import Plan
from oddrank.planner import Subject
from oddrank.transform.recipe import Recipe, apply, apply_rows, materialize, recipes, spans_of

seeds = st.integers(0, 2**32)


def words(shape: tuple[int, ...], dtype: str, rng: np.random.Generator) -> Any:
    """Random raw words, none of them a fill."""
    unsigned = STORAGE[dtype]
    return rng.integers(1, np.iinfo(unsigned).max, shape, dtype=unsigned, endpoint=True)


def some(seed: int, dtype: str = "BF16") -> tuple[Subject, Plan, np.random.Generator]:
    rng = np.random.default_rng(seed)
    variant = sorted(VARIANTS)[rng.integers(len(VARIANTS))]
    q, kv = [(6, 2), (9, 3), (8, 4), (4, 4)][rng.integers(4)]
    s = subject(config(variant, q=q, kv=kv, head_dim=4, mlp=int(rng.integers(9, 30)), vocab=41, layers=1), dtype=dtype)
    maker = equal_plan if rng.random() < 0.5 else ragged_plan
    return s, maker(s, rng), rng


def slots_of(plan_: Plan, rng: np.random.Generator) -> Slots:
    """One rank's, or the virtual checkpoint's."""
    if plan_.executor_facts().equal_ranks and rng.random() < 0.3:
        return plan_.virtual()
    return plan_.slots(int(rng.integers(plan_.tp)))


AXIS_OF = {  # part of the name -> (row axis, column axis), by hand
    "q_proj": ("q_heads", None),
    "k_proj": ("kv_heads", None),
    "v_proj": ("kv_heads", None),
    "o_proj": (None, "q_heads"),
    "gate_proj": ("mlp", None),
    "up_proj": ("mlp", None),
    "down_proj": (None, "mlp"),
    "embed_tokens": ("vocab", None),
    "lm_head": ("vocab", None),
}


def looked_up(name: str, source: Any, slots: Slots, head_dim: int) -> Any:
    """The result of a dense tensor, row by row and column by column, as a person would write it."""
    part = next((p for p in AXIS_OF if f"{p}." in name), None)
    row_axis, column_axis = AXIS_OF[part] if part else (None, None)

    def positions(axis: str | None, length: int) -> list[int]:
        if axis is None:
            return list(range(length))
        width = head_dim if axis.endswith("heads") else 1
        return [-1 if e < 0 else e * width + o for e in slots.source[axis].tolist() for o in range(width)]

    rows = positions(row_axis, source.shape[0])
    if source.ndim == 1:
        return np.array([0 if r < 0 else source[r] for r in rows], dtype=source.dtype)
    columns = positions(column_axis, source.shape[1])
    out = np.zeros((len(rows), len(columns)), dtype=source.dtype)
    for i, r in enumerate(rows):
        for j, c in enumerate(columns):
            if r >= 0 and c >= 0:
                out[i, j] = source[r, c]
    return out


@settings(deadline=None, max_examples=60)
@given(seeds, st.sampled_from(["BF16", "F16", "F32", "F64"]))
def test_dense_tensors(seed: int, dtype: str) -> None:
    _, p, rng = some(seed, dtype)
    slots = slots_of(p, rng)
    for name, recipe in recipes(p, slots).items():
        source = words(recipe.source_shape, dtype, rng)
        expected = looked_up(name, source, slots, 4)
        assert recipe.dtype == dtype
        assert recipe.shape == expected.shape
        got = materialize(recipe, source)
        assert got.dtype == STORAGE[dtype] and np.array_equal(got, expected), name
        same = expected.shape == source.shape and np.array_equal(expected, source)
        assert recipe.unchanged == same
        assert (got is source) == recipe.unchanged


@settings(deadline=None, max_examples=60)
@given(seeds)
def test_rows_in_any_chunking(seed: int) -> None:
    _, p, rng = some(seed)
    for name, recipe in recipes(p, slots_of(p, rng)).items():
        source = words(recipe.source_shape, recipe.dtype, rng)
        whole = np.full(recipe.shape, 0xDEAD, dtype=np.uint16)
        apply(recipe, source, whole)
        assert np.array_equal(whole, np.array(materialize(recipe, source)))
        pieces = np.full(recipe.shape, 0xBEEF, dtype=np.uint16)
        start = 0
        while start < len(pieces):
            stop = min(len(pieces), start + int(rng.integers(1, max(2, len(pieces)))))
            apply_rows(recipe, source, start, pieces[start:stop])
            start = stop
        assert np.array_equal(pieces, whole), name
        empty = pieces[:0]
        apply_rows(recipe, source, 0, empty)


@settings(deadline=None, max_examples=60)
@given(seeds)
def test_into_strided_arrays(seed: int) -> None:
    """Rows of a bigger parameter, every other column, a transposed view: nothing outside them is touched."""
    _, p, rng = some(seed)
    for recipe in recipes(p, slots_of(p, rng)).values():
        source = words(recipe.source_shape, recipe.dtype, rng)
        expected = np.array(materialize(recipe, source))
        big = np.full(tuple(2 * n + 3 for n in recipe.shape), 7, dtype=np.uint16)
        view = big[tuple(slice(1, 1 + 2 * n, 2) for n in recipe.shape)]
        apply(recipe, source, view)
        assert np.array_equal(view, expected)
        view[...] = 7
        assert (big == 7).all()
        if len(recipe.shape) == 2:
            turned = np.full(recipe.shape[::-1], 7, dtype=np.uint16)
            apply(recipe, source, turned.T)
            assert np.array_equal(turned.T, expected)


@settings(deadline=None, max_examples=40)
@given(seeds)
def test_a_source_that_is_read_only_and_strided(seed: int) -> None:
    _, p, rng = some(seed)
    for recipe in recipes(p, slots_of(p, rng)).values():
        source = words(tuple(2 * n for n in recipe.source_shape), recipe.dtype, rng)
        view = source[tuple(slice(None, None, 2) for _ in recipe.source_shape)]
        view.flags.writeable = False
        out = np.empty(recipe.shape, dtype=np.uint16)
        apply(recipe, view, out)
        assert np.array_equal(out, np.array(materialize(recipe, view.copy())))


@given(st.lists(st.integers(-1, 20), max_size=40))
def test_spans_cover_the_target_once(index: list[int]) -> None:
    spans = spans_of(np.asarray(index, dtype=np.int64))
    out = np.full(len(index), -9)
    at = 0
    for target, source, length in spans:
        assert target == at and length > 0
        at += length
        out[target:at] = -1 if source < 0 else np.arange(source, source + length)
    assert at == len(index)
    assert out.tolist() == index


def test_a_recipe_is_made_once_for_all_layers() -> None:
    s = subject(config(q=24, kv=4, layers=40))
    p = plan(s, 3, "vllm").plan
    made = recipes(p, p.virtual())
    first = made["model.layers.0.self_attn.q_proj.weight"]
    assert all(made[f"model.layers.{i}.self_attn.q_proj.weight"] is first for i in range(40))
    assert len(made) == s.census.total


def test_every_stored_tensor_has_a_recipe_in_the_plan() -> None:
    for variant in VARIANTS:
        s = subject(config(variant, q=9, kv=3))
        p = plan(s, 2).plan
        assert len(recipes(p, p.slots(0))) == s.census.total


# -- blocked and packed formats: entries, fills --------------------------------------------------------------------

BLOCK = Format(
    "toy_block",
    stored=(
        Stored(".weight", ("F8_E4M3",)),
        Stored(".scale", ("U8",), block=(4, 4), shared=True, row_fill=0x7F, column_fill=0x01),
    ),
)
PACKED = Format(
    "toy_packed",
    stored=(
        Stored(".weight_packed", ("I32",), block=(1, 8), row_fill=0x88888888, column_fill=0x88888888),
        Stored(".weight_scale", ("F16",), block=(1, 16), shared=True, row_fill=0x3C00, column_fill=0x3C01),
        Stored(".weight_global_scale", ("F32",), block=(0, 0), shared=True, row_fill=5, column_fill=5),
    ),
    zero_word=0x88888888,
)


def _toy(fmt: Format, parts: dict[str, Any], **shape: Any) -> Subject:
    model = toy_model(**shape)
    s = subject_of(model, toy_table(model, parts))
    assert not s.census.problems, s.census.problems
    return s


@pytest.mark.parametrize(("tp", "layout"), [(2, "pad"), (3, "pad"), (3, "replicate"), (5, "pad"), (4, "auto")])
def test_scale_blocks(tp: int, layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A scale follows the block of values it serves; dummy rows and columns get the format's own fills."""
    monkeypatch.setitem(formats(), BLOCK.name, BLOCK)
    s = _toy(
        BLOCK,
        {".weight": ("F8_E4M3", (1, 1)), ".scale": ("U8", (4, 4))},
        followers=6,
        leaders=2,
        head_dim=4,
        hidden=8,
        widths={"mlp": 28},
    )
    rng = np.random.default_rng(tp)
    p = plan(s, tp, "runtime", layout).plan
    for rank in range(tp):
        slots = p.slots(rank)
        made = recipes(p, slots)
        values, scales = made["layers.0.mlp.up.weight"], made["layers.0.mlp.up.scale"]
        _check_rows(values, scales, slots.source["mlp"], rng)
        values, scales = made["layers.0.mlp.down.weight"], made["layers.0.mlp.down.scale"]
        _check_columns(values, scales, slots.source["mlp"], rng)


def _check_rows(values: Recipe, scales: Recipe, held: Any, rng: np.random.Generator) -> None:
    v = materialize(values, words(values.source_shape, "F8_E4M3", rng))
    source = words(scales.source_shape, "U8", rng)
    out = materialize(scales, source)
    assert scales.shape == (-(-len(held) // 4), 2)
    for block in range(scales.shape[0]):
        real = [e for e in held[block * 4 : block * 4 + 4].tolist() if e >= 0]
        expected = source[real[0] // 4] if real else np.full(2, 0x7F, dtype=np.uint8)
        assert np.array_equal(out[block], expected)
    assert (v[held < 0] == 0).all() and (v[held >= 0] != 0).all()


def _check_columns(values: Recipe, scales: Recipe, held: Any, rng: np.random.Generator) -> None:
    v = materialize(values, words(values.source_shape, "F8_E4M3", rng))
    source = words(scales.source_shape, "U8", rng)
    out = materialize(scales, source)
    assert scales.shape == (2, -(-len(held) // 4))
    for block in range(scales.shape[1]):
        real = [e for e in held[block * 4 : block * 4 + 4].tolist() if e >= 0]
        expected = source[:, real[0] // 4] if real else np.full(2, 0x01, dtype=np.uint8)
        assert np.array_equal(out[:, block], expected)
    assert (v[:, held < 0] == 0).all() and (v[:, held >= 0] != 0).all()


def test_packed_words_and_their_fills(monkeypatch: pytest.MonkeyPatch) -> None:
    """int4 words hold eight values of K; a dummy's word is not zero but eight zero codes."""
    monkeypatch.setitem(formats(), PACKED.name, PACKED)
    model = toy_model(followers=6, leaders=2, head_dim=16, hidden=16, widths={"mlp": 80})
    table = toy_table(model, {".weight_packed": ("I32", (1, 8)), ".weight_scale": ("F16", (1, 16))})
    stems = [n.removesuffix(".weight_packed") for n in table if n.endswith(".weight_packed")]
    from layout.shapes import Tensor

    table |= {f"{n}.weight_global_scale": Tensor("F32", (1, 1)) for n in stems}
    s = subject_of(model, table)
    assert not s.census.problems, s.census.problems
    p = plan(s, 3, "vllm", constraints={"mlp_multiple": 32}).plan
    assert p.layout("mlp").counts() == (32, 32, 32)
    made = recipes(p, p.slots(2))
    rng = np.random.default_rng(0)
    down, scale = made["layers.0.mlp.down.weight_packed"], made["layers.0.mlp.down.weight_scale"]
    source, source_scale = words((16, 10), "I32", rng), words((16, 5), "F16", rng)
    assert (down.source_shape, down.shape) == ((16, 10), (16, 4))
    assert p.layout("mlp").real() == (32, 32, 16)
    assert np.array_equal(materialize(down, source)[:, :2], source[:, 8:])
    assert (materialize(down, source)[:, 2:] == 0x88888888).all()
    assert materialize(scale, source_scale)[:, 0].tolist() == source_scale[:, 4].tolist()
    assert (materialize(scale, source_scale)[:, 1] == 0x3C01).all()
    up = made["layers.0.mlp.up.weight_packed"]
    got = materialize(up, words((80, 2), "I32", rng))
    assert up.shape == (32, 2) and (got[16:] == 0x88888888).all() and (got[:16] != 0x88888888).any()
    # dummy rows get the row fill, also in the scale; one value for the whole tensor stays as it is
    assert (materialize(made["layers.0.mlp.up.weight_scale"], words((80, 1), "F16", rng))[16:] == 0x3C00).all()
    assert made["layers.0.mlp.up.weight_global_scale"].unchanged
