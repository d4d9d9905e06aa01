"""Integers in 32-bit words: the moved matrix is the matrix moved, for every packing, with dummies that decode to zero.

With zero points a weight of zero is the code of its own zero point, whatever that is in its group.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from formats.codec import Parts, Raw
from formats.integers import PACKINGS, Packed, ct_scheme, sample, skewed, stored
from formats.moves import Move, bare_plan, census_of, moved, named, slots_of
from formats.test_stored_forms import MOVES, dummies, run

from oddrank.errors import OddrankError
from oddrank.formats import format_named
from oddrank.layout.index import StorageError
from oddrank.layout.proof import word_is_finite
from oddrank.layout.storage import storage_problem, units
from oddrank.transform.recipe import apply_rows, recipes


def storable(packing: Packed, move: Move) -> bool:
    """compressed-tensors has whole groups only; so has AWQ."""
    k = move.shape()[1]
    return not packing.group or "gptq" in packing.format or k % packing.group == 0


CASES = [(name, what) for name, p in PACKINGS.items() for what, move in MOVES.items() if storable(p, move)]


def gathered(move: Move, before: npt.NDArray[Any]) -> npt.NDArray[Any]:
    rows, columns = move.where()
    real = (rows[:, None] >= 0) & (columns[None, :] >= 0)
    return np.where(real, before[rows][:, columns], 0.0)


@pytest.mark.parametrize(("name", "what"), CASES)
def test_the_moved_matrix_is_the_matrix_moved(name: str, what: str) -> None:
    packing, move = PACKINGS[name], MOVES[what]
    source = sample(name, move.shape())
    found, result = moved(move, source, packing.config)
    assert found == packing.format
    before = packing.decode(source)
    assert np.array_equal(packing.decode(result), gathered(move, before))
    # and that is the matrix that was quantized
    assert np.corrcoef(before.ravel(), skewed(*move.shape()).ravel())[0, 1] > 0.93


IN_PARTS = ("dummies on both", "heads permuted on columns", "a short last block of columns", "sections of rows")


@pytest.mark.parametrize(("name", "what"), [case for case in CASES if case[1] in IN_PARTS])
def test_rows_of_the_result_are_made_one_by_one_as_together(name: str, what: str) -> None:
    """As `pad` does, a few rows at a time, and as a rank slice's reader may ask."""
    packing, move = PACKINGS[name], MOVES[what]
    source = sample(name, move.shape())
    model, tensors = move.model(), named(source)
    census = census_of(model, tensors, packing.config)
    whole = named(moved(move, source, packing.config)[1])
    for key, recipe in recipes(bare_plan(model, census), slots_of(model, move.slots)).items():
        beside = recipe.beside(key)
        made = np.full(recipe.shape, 0x55, dtype=whole[key].words.dtype)
        for start in range(0, len(made), 7):
            points = None if beside is None else tensors[beside].words
            apply_rows(recipe, tensors[key].words, start, made[start : start + 7], points)
        assert np.array_equal(made, whole[key].words)


def test_what_is_dummy_throughout_holds_the_design_s_words() -> None:
    """Rows and columns of dummies, a group and a word away from anything real."""
    move = MOVES["dummies on both"]
    rows, columns = move.where()
    wanted = {
        "GPTQ": (".qweight", 0x88888888, ".qzeros", 0x77777777),
        "GPTQ, version 2": (".qweight", 0x88888888, ".qzeros", 0x88888888),
        "AWQ, 64 columns": (".qweight", 0x88888888, ".qzeros", 0x88888888),
        "GPTQ, version 2, 8 bits": (".qweight", 0x80808080, ".qzeros", 0x80808080),
        "compressed-tensors int4, channels": (".weight_packed", 0x88888888, None, None),
        "compressed-tensors int8, channels": (".weight_packed", 0x80808080, None, None),
    }
    for name, (values, zero, points, point) in wanted.items():
        form = format_named(PACKINGS[name].format)
        _, result = moved(move, sample(name, move.shape()), PACKINGS[name].config)
        for suffix, word in ((values, zero), (points, point)):
            if suffix is None:
                continue
            bn, bk = form.at(suffix).block
            words = result[suffix].words if form.at(suffix).shape == "nk" else result[suffix].words.T
            dead_rows = [not (rows[i : i + bn] >= 0).any() for i in range(0, len(rows), bn)]
            dead_columns = [not (columns[i : i + bk] >= 0).any() for i in range(0, len(columns), bk or len(columns))]
            assert any(dead_rows) and (words[dead_rows] == word).all()
            assert any(dead_columns) and (words[:, dead_columns] == word).all()
        scale = next(s for s in result if s.endswith(("scales", "weight_scale")))
        assert all(word_is_finite("F16", int(w)) for w in result[scale].words.flat)


@pytest.mark.parametrize("name", [n for n in PACKINGS if "asymmetric" in n or n.endswith("whole rows")])
def test_columns_beside_real_ones_hold_the_zero_point_of_their_row(name: str) -> None:
    """What 8 would be in a group whose zero point is 5: three scales off, on every dummy column."""
    packing = PACKINGS[name]
    move = Move({"mlp": 256}, 64, (("mlp", 1),), {"mlp": [*run(0, 256), *dummies(64)]})
    source = sample(name, move.shape())
    _, result = moved(move, source, packing.config)
    after = packing.decode(result)
    assert np.array_equal(after[:, :256], packing.decode(source)) and not after[:, 256:].any()
    words = next(r.words for s, r in result.items() if s in (".qweight", ".weight_packed"))
    fill = words[-1] if "pack" not in packing.format else words[:, -1]
    if not packing.group:
        assert len(np.unique(fill)) > 3  # one code would be wrong for most rows
    else:
        assert len(np.unique(fill)) == 1  # a group of its own


@pytest.mark.parametrize("name", [n for n in PACKINGS if n.startswith("compressed-tensors")])
def test_compressed_tensors_reads_the_result(name: str) -> None:
    """Its own decoder on the padded form gives the padded matrix, bit for bit."""
    packing = PACKINGS[name]
    move = Move(
        {"q": 3, "mlp": 384}, (("q", 64),), (("mlp", 1),),
        {"q": [2, -1, 0, 1], "mlp": [*run(0, 128), *dummies(128), *run(128, 384)]},
    )  # fmt: skip
    source = sample(name, move.shape())
    _, result = moved(move, source, packing.config)
    bits = 8 if packing.format.startswith("int8") else 4
    scheme = ct_scheme(bits, packing.group, "asym" not in packing.format)

    def decompressed(parts: Parts) -> npt.NDArray[np.float32]:
        state = {s[1:]: tensor(raw) for s, raw in parts.items() if s != ".weight_g_idx"}
        return PackedQuantizationCompressor.decompress(state, scheme)["weight"].float().numpy()

    before = decompressed(source)
    assert np.array_equal(decompressed(result), gathered(move, before).astype(np.float32))
    # and the tests' decoder agrees, but for fp16, in which compressed-tensors computes
    assert np.allclose(before, packing.decode(source), rtol=2**-10, atol=0)


def tensor(raw: Raw) -> torch.Tensor:
    kind = {"I32": torch.int32, "I64": torch.int64, "F16": torch.float16}[raw.dtype]
    return torch.from_numpy(raw.words.copy().view(f"i{raw.words.itemsize}")).view(kind)


@pytest.mark.parametrize("name", [n for n, p in PACKINGS.items() if storable(p, MOVES["dummies on both"])])
def test_quantizing_the_padded_matrix_gives_the_same_words_where_it_is_real(name: str) -> None:
    """Whoever pads the bf16 matrix by whole groups and quantizes it gets the words that we move."""
    packing, move = PACKINGS[name], Move(
        {"q": 3, "mlp": 384}, (("q", 64),), (("mlp", 1),), {"q": [0, 1, 2, -1], "mlp": [*run(0, 384), *dummies(128)]}
    )
    _, result = moved(move, sample(name, move.shape()), packing.config)
    x = skewed(*move.shape())
    again = stored(packing, np.pad(x, ((0, 64), (0, 128))))
    if packing.group:
        assert np.array_equal(packing.decode(result)[:192, :384], packing.decode(again)[:192, :384])
    assert {s: r.words.shape for s, r in result.items()} == {s: r.words.shape for s, r in again.items()}
    for suffix in {".weight_shape", ".g_idx", ".weight_g_idx"} & result.keys():
        assert np.array_equal(result[suffix].words, again[suffix].words)


# -- where storage allows no cut -------------------------------------------------------------------------------------


def channels(along: str, slots: list[int]) -> Move:
    cut, whole = (("mlp", 1),), 128
    return Move({"mlp": 256}, *((cut, whole) if along == "rows" else (whole, cut)), {"mlp": slots})


@pytest.mark.parametrize("along", ["rows", "columns"])
@pytest.mark.parametrize("name", PACKINGS)
def test_cuts_are_as_fine_as_words_and_groups_and_no_finer(name: str, along: str) -> None:
    packing = PACKINGS[name]
    unit = packing.cut[along == "columns"]
    if packing.format.startswith("int8-gptq") and along == "rows":
        unit = 4  # zero points: four a word
    move = channels(along, [*run(256 - unit, 256), *run(0, unit), *dummies(unit)])
    source = sample(name, move.shape())
    census = census_of(move.model(), named(source), packing.config)
    assert units(move.model(), census.uses)["mlp"] == unit
    _, result = moved(move, source, packing.config)
    assert np.array_equal(packing.decode(result), gathered(move, packing.decode(source)))
    if unit == 1:
        return
    half = channels(along, [*run(256 - unit // 2, 256), *run(0, unit // 2), *dummies(unit)])
    slots = slots_of(half.model(), half.slots)
    problem = storage_problem(half.model(), census.uses, slots)
    assert problem is not None and problem.startswith("layers.0.proj.")
    with pytest.raises(StorageError):
        recipes(bare_plan(half.model(), census), slots)


@pytest.mark.parametrize(("symmetric", "along"), [(True, "columns"), (False, "rows")])
def test_the_unused_places_of_a_short_last_word_do_not_become_dummies(symmetric: bool, along: str) -> None:
    """20 columns in words of eight, or 20 rows' zero points: compressed-tensors leaves zeros in the last word, which
    mean -8 there, and not zero."""
    name = "compressed-tensors int4, channels" if symmetric else "compressed-tensors int4, asymmetric, channels"

    def laid_out(slots: list[int]) -> Move:
        cut = (("mlp", 1),)
        return Move({"mlp": 20}, *((64, cut) if along == "columns" else (cut, 64)), {"mlp": slots})

    shape = laid_out([]).shape()
    source = stored(PACKINGS[name], skewed(*shape))
    census = census_of(laid_out([]).model(), named(source), PACKINGS[name].config)

    def problem(slots: list[int]) -> str | None:
        move = laid_out(slots)
        return storage_problem(move.model(), census.uses, slots_of(move.model(), move.slots))

    found = problem([*run(0, 20), *dummies(4)])
    assert found is not None and "split" in found
    assert ("weight_packed" if symmetric else "weight_zero_point") in found
    # as it is, and after whole words of dummies, it may be moved
    assert problem(run(0, 20)) is None and problem([*dummies(8), *run(0, 20)]) is None


# -- zero points that no code equals ---------------------------------------------------------------------------------


def test_a_first_version_zero_point_of_16_is_refused_only_where_columns_need_it() -> None:
    """GPTQ's first version stores 15 for it, and for the zero point 0 of a row whose weights are all positive: readers
    disagree on which. Moving such words is right either way; making a dummy column out of them is not."""
    packing = PACKINGS["GPTQ, whole rows"]
    source = dict(sample("GPTQ, whole rows", (64, 256)))
    points = source[".qzeros"].words.copy()
    points[0, 2] |= 0xF000
    source[".qzeros"] = Raw("I32", points)
    _, result = moved(Move({"mlp": 256}, 64, (("mlp", 1),), {"mlp": run(128, 256)}), source, packing.config)
    assert np.array_equal(packing.decode(result), packing.decode(source)[:, 128:])
    with pytest.raises(OddrankError, match=r"layers.0.proj.qzeros has a zero point of 16, which no code of 4 bits"):
        moved(Move({"mlp": 256}, 64, (("mlp", 1),), {"mlp": [*run(0, 256), *dummies(8)]}), source, packing.config)


# -- index metadata --------------------------------------------------------------------------------------------------


def test_metadata_that_contradicts_the_shape_is_refused() -> None:
    move = Move({"mlp": 256}, 64, (("mlp", 1),), {"mlp": run(128, 256)})
    wrong = dict(sample("compressed-tensors int4", (64, 256)))
    wrong[".weight_shape"] = Raw("I64", np.array([64, 512], dtype=np.uint64))
    with pytest.raises(OddrankError, match=r"weight_shape says 512 at \[1\] where .* imply 256"):
        moved(move, wrong, PACKINGS["compressed-tensors int4"].config)
    wrong = dict(sample("GPTQ", (64, 256)))
    index = wrong[".g_idx"].words.copy()
    index[[3, 200]] = index[[200, 3]]
    wrong[".g_idx"] = Raw("I32", index)
    with pytest.raises(OddrankError, match=r"g_idx says 1 at \[3\] where .* imply 0.*activation order"):
        moved(move, wrong, PACKINGS["GPTQ"].config)
    # where no column moves, whatever it says is passed on
    rows = Move({"q": 4}, (("q", 16),), 256, {"q": [0, 2, -1]})
    _, result = moved(rows, wrong, PACKINGS["GPTQ"].config)
    assert np.array_equal(result[".g_idx"].words, index)
    assert np.array_equal(PACKINGS["GPTQ"].decode(result), gathered(rows, PACKINGS["GPTQ"].decode(wrong)))
