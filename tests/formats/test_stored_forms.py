"""Padding, cutting and permuting what is stored does to the logical matrix what it says, and nothing else.

For every dialect: quantize a matrix, move the stored form, decode. That equals the moved decoded matrix, exactly; the
words of real elements are those of the source; every fill is the design's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.mxfp8.base import MXFP8QuantizationCompressor
from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor, IntQuantizationCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from formats.codec import Parts, Raw, codes, spread
from formats.dialects import DIALECTS, DTYPES, Dialect, matrix, sample, scheme, stored
from formats.moves import Move, bare_plan, census_of, moved, named, slots_of

from oddrank.layout.index import StorageError
from oddrank.layout.storage import storage_problem, units
from oddrank.transform.recipe import recipes

DUMMY = -1


def run(start: int, stop: int) -> list[int]:
    return list(range(start, stop))


def dummies(count: int) -> list[int]:
    return [DUMMY] * count


# multiples of 128 that no dialect splits
MOVES = {
    "dummy heads on rows": Move({"q": 4}, (("q", 128),), 64, {"q": [0, 1, 2, 3, DUMMY, DUMMY]}),
    "heads permuted and repeated on rows": Move({"q": 4}, (("q", 128),), 64, {"q": [3, DUMMY, 1, 1, 0]}),
    "two heads of 64 rows a unit": Move({"q": 6}, (("q", 64),), 64, {"q": [4, 5, DUMMY, DUMMY, 0, 1, 2, 3]}),
    "two heads of 192 rows a unit": Move({"q": 4}, (("q", 192),), 64, {"q": [2, 3, DUMMY, DUMMY, 0, 1]}),
    "channels on rows": Move({"mlp": 384}, (("mlp", 1),), 64, {"mlp": [*run(256, 384), *dummies(128), *run(0, 128)]}),
    "a short last block of rows": Move(
        {"mlp": 320}, (("mlp", 1),), 64, {"mlp": [*run(256, 320), *dummies(64), *run(128, 256)]}
    ),
    "a rank with the short last block of rows": Move({"mlp": 320}, (("mlp", 1),), 64, {"mlp": run(256, 320)}),
    "a rank without real rows": Move({"mlp": 320}, (("mlp", 1),), 64, {"mlp": dummies(128)}),
    "sections of rows": Move(
        {"k": 2, "v": 4}, (("k", 128), ("k", 128), ("v", 128)), 96,
        {"k": [0, DUMMY, 1], "v": [0, 1, DUMMY, 2, 3, DUMMY]},
    ),
    "dummy heads on columns": Move({"q": 3}, 64, (("q", 128),), {"q": [0, 1, 2, DUMMY]}),
    "heads permuted on columns": Move({"q": 4}, 64, (("q", 128),), {"q": [3, DUMMY, 1, 2, 0]}),
    "two heads of 64 columns a unit": Move({"q": 6}, 64, (("q", 64),), {"q": [4, 5, DUMMY, DUMMY, 0, 1, 2, 3]}),
    "channels on columns": Move(
        {"mlp": 384}, 64, (("mlp", 1),), {"mlp": [*run(128, 384), *dummies(128), *run(0, 128)]}
    ),
    "a short last block of columns": Move(
        {"mlp": 320}, 64, (("mlp", 1),), {"mlp": [*run(256, 320), *dummies(64), *run(128, 256)]}
    ),
    "a rank with the short last block of columns": Move({"mlp": 320}, 64, (("mlp", 1),), {"mlp": run(256, 320)}),
    "a ragged rank's columns": Move({"mlp": 384}, 64, (("mlp", 1),), {"mlp": run(128, 384)}),
    "a rank without real columns": Move({"mlp": 320}, 64, (("mlp", 1),), {"mlp": dummies(128)}),
    "dummies on both": Move(
        {"q": 3, "mlp": 320}, (("q", 128),), (("mlp", 1),),
        {"q": [2, DUMMY, 0, 1], "mlp": [*run(0, 128), *dummies(128), *run(128, 320)]},
    ),
    "nothing moves": Move({"q": 3, "mlp": 320}, (("q", 128),), (("mlp", 1),), {}),
}  # fmt: skip

ROW_FILLS = {"F8_E4M3": 0x38, "F32": 0x3F800000, "BF16": 0x3F80, "U8": 0x7F}
COLUMN_FILLS = ROW_FILLS | {"U8": 0x00}
"""Words of scales on dummy rows, and on dummy columns of real rows: 1.0 in each dtype; e8m0 2^0 and 2^-127."""


def is_values(suffix: str) -> bool:
    return suffix in (".weight", ".weight_packed")


def is_constant(dialect: Dialect, suffix: str) -> bool:
    """One value for the whole tensor: it stays as it is, whatever is cut or added."""
    whole = (".input_scale", ".input_zero_point", ".input_global_scale", ".weight_scale_2", ".weight_global_scale")
    return suffix in whole or (dialect.block == (0, 0) and not is_values(suffix))


def check(dialect: Dialect, move: Move, source: Parts, result: Parts, block: tuple[int, int]) -> None:
    """Everything a moved stored matrix must satisfy. block: the scale's footprint in the result."""
    rows, columns = move.where()
    real = (rows[:, None] >= 0) & (columns[None, :] >= 0)
    before, after = dialect.decode(source), dialect.decode(result, block)
    assert np.isfinite(after).all()
    assert np.array_equal(after, np.where(real, before[rows][:, columns], 0.0))
    for suffix, raw in result.items():
        origin = source[suffix]
        assert raw.dtype == origin.dtype
        if is_values(suffix):
            assert np.array_equal(codes(raw)[real], codes(origin)[rows][:, columns][real])
            assert not codes(raw)[~real].any()
        elif is_constant(dialect, suffix):
            assert raw.words.shape == origin.words.shape and np.array_equal(raw.words, origin.words)
        else:
            kept = spread(origin.words, dialect.block, move.shape())[rows][:, columns]
            assert np.array_equal(spread(raw.words, block, real.shape)[real], kept[real])
            check_fills(dialect, raw, rows, columns, block)


def check_fills(
    dialect: Dialect, raw: Raw, rows: npt.NDArray[Any], columns: npt.NDArray[Any], block: tuple[int, int]
) -> None:
    """Scales of blocks without a real element hold what the design's table says, and there are as many as blocks."""
    bn, bk = block[0], block[1] or len(columns)
    row_real = [bool((rows[i : i + bn] >= 0).any()) for i in range(0, len(rows), bn)]
    column_real = [bool((columns[i : i + bk] >= 0).any()) for i in range(0, len(columns), bk)]
    entries = (len(row_real), len(column_real))
    assert raw.words.shape == (entries if raw.words.ndim == 2 else entries[:1])
    words = raw.words.reshape(entries)
    assert (words[~np.array(row_real)] == ROW_FILLS[raw.dtype]).all()
    if dialect.block[1]:
        assert (words[row_real][:, ~np.array(column_real)] == COLUMN_FILLS[raw.dtype]).all()


@pytest.mark.parametrize("what", MOVES)
@pytest.mark.parametrize("name", DIALECTS)
def test_the_moved_matrix_is_the_matrix_moved(name: str, what: str) -> None:
    dialect, move = DIALECTS[name], MOVES[what]
    source = sample(name, move.shape())
    found, result = moved(move, source, dialect.quantization)
    assert found == dialect.format
    check(dialect, move, source, result, dialect.block)


@pytest.mark.parametrize("what", ["dummy heads on rows", "channels on columns", "dummies on both"])
@pytest.mark.parametrize("name", DIALECTS)
def test_padding_and_then_quantizing_gives_the_same_words(name: str, what: str) -> None:
    """The order does not matter on the real elements: whoever pads the bf16 matrix gets the words that we move."""
    dialect, move = DIALECTS[name], MOVES[what]
    x = matrix(*move.shape())
    bound = float(np.abs(x).max())
    _, result = moved(move, sample(name, move.shape()), dialect.quantization)
    rows, columns = move.where()
    real = (rows[:, None] >= 0) & (columns[None, :] >= 0)
    padded = np.where(real, x[rows][:, columns], np.float32(0))
    again = stored(dialect, padded, bound)
    for suffix, raw in result.items():
        if is_values(suffix):
            assert np.array_equal(codes(raw)[real], codes(again[suffix])[real])
        elif is_constant(dialect, suffix):
            assert np.array_equal(raw.words, again[suffix].words)
        else:
            held = [spread(r.words, dialect.block, padded.shape)[real] for r in (raw, again[suffix])]
            assert np.array_equal(*held)


@pytest.mark.parametrize(
    ("name", "preset", "compressor"),
    [
        ("fp8 block, compressed-tensors", "FP8_BLOCK", FloatQuantizationCompressor),
        ("fp8 channel, compressed-tensors", "FP8_DYNAMIC", FloatQuantizationCompressor),
        ("fp8 tensor, compressed-tensors", "FP8", FloatQuantizationCompressor),
        ("NVFP4, compressed-tensors", "NVFP4", NVFP4PackedCompressor),
        ("MXFP4, compressed-tensors", "MXFP4", MXFP4PackedCompressor),
        ("MXFP8, compressed-tensors", "MXFP8", MXFP8QuantizationCompressor),
        ("int8 channel, compressed-tensors", "W8A8", IntQuantizationCompressor),
    ],
)
def test_compressed_tensors_reads_the_result(name: str, preset: str, compressor: type) -> None:
    """Its own decoder on the padded form gives the padded matrix: zeros where the dummies are."""
    dialect, move = DIALECTS[name], MOVES["dummies on both"]
    source = sample(name, move.shape())
    _, result = moved(move, source, dialect.quantization)
    dtypes = {v: k for k, v in DTYPES.items()}

    def decompressed(parts: Parts) -> npt.NDArray[np.float32]:
        state = {}
        for suffix, raw in parts.items():
            signed = raw.words.view({1: np.uint8, 2: np.int16, 4: np.int32}[raw.words.itemsize])
            state[suffix[1:]] = torch.from_numpy(signed.copy()).view(dtypes[raw.dtype])
        return compressor.decompress(state, scheme(preset))["weight"].float().numpy()  # type: ignore[attr-defined]

    rows, columns = move.where()
    real = (rows[:, None] >= 0) & (columns[None, :] >= 0)
    before = decompressed(source)
    assert np.array_equal(decompressed(result), np.where(real, before[rows][:, columns], np.float32(0)))
    # and the tests' own decoder agrees with it, which computes in bf16 for four bits
    assert np.allclose(before, dialect.decode(source), rtol=2**-7, atol=0)


# -- where storage allows no cut -------------------------------------------------------------------------------------


def channels(along: str, slots: list[int]) -> Move:
    """256 channels along rows or columns, laid out so."""
    cut, whole = (("mlp", 1),), 64
    return Move({"mlp": 256}, *((cut, whole) if along == "rows" else (whole, cut)), {"mlp": slots})


@pytest.mark.parametrize("along", ["rows", "columns"])
@pytest.mark.parametrize("name", DIALECTS)
def test_cuts_are_as_fine_as_the_scale_group_and_no_finer(name: str, along: str) -> None:
    """The first and the last unit side by side, and a dummy: right at the dialect's finest, refused at half of it."""
    dialect = DIALECTS[name]
    unit = dialect.cut[along == "columns"]
    move = channels(along, [*run(256 - unit, 256), *run(0, unit), *dummies(unit)])
    source = sample(name, move.shape())
    _, result = moved(move, source, dialect.quantization)
    check(dialect, move, source, result, dialect.block)
    census = census_of(move.model(), named(source), dialect.quantization)
    assert units(move.model(), census.uses)["mlp"] == unit
    if unit == 1:
        return
    split = channels(along, [*run(256 - unit // 2, 256), *run(0, unit // 2), *dummies(unit)])
    slots = slots_of(split.model(), split.slots)
    problem = storage_problem(split.model(), census.uses, slots)
    assert problem is not None and "layers.0.proj.weight_scale" in problem
    last = 256 // unit - 1
    assert f"would mix source entries 0 and {last}, each {unit} elements" in problem
    with pytest.raises(StorageError, match="would mix source entries"):
        list(recipes(bare_plan(split.model(), census), slots))


@pytest.mark.parametrize("name", ["NVFP4, ModelOpt", "NVFP4, compressed-tensors", "MXFP4, Quark"])
def test_a_packed_byte_is_never_split(name: str) -> None:
    """An odd number of columns would need half a byte, whatever the scales allow."""
    dialect = DIALECTS[name]
    move = Move({"mlp": 64}, 64, (("mlp", 1),), {"mlp": run(1, 33)})
    model, tensors = move.model(), named(sample(name, (64, 64)))
    census = census_of(model, tensors, dialect.quantization)
    problem = storage_problem(model, census.uses, slots_of(model, move.slots))
    assert problem is not None
    values = ".weight_packed" if ".weight_packed" in problem else ".weight"
    assert problem.startswith(f"layers.0.proj{values}: ") and "source entries" in problem
