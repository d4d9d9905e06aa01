"""A 128 x 128 block scale rewritten as four of 64 x 64: the same matrix, cut where the stored blocks allow no cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from formats.codec import codes
from formats.dialects import DIALECTS, sample
from formats.moves import Move, census_of, moved, named, slots_of
from formats.test_stored_forms import check, dummies, run

from oddrank.layout.index import StorageError
from oddrank.layout.storage import storage_problem, units

BLOCKED = [name for name, d in DIALECTS.items() if d.block == (128, 128)]
GROUPED = [name for name, d in DIALECTS.items() if d.block[1] in (16, 32)]


def rows_of(width: int, slots: list[int]) -> Move:
    return Move({"mlp": width}, (("mlp", 1),), 192, {"mlp": slots})


def columns_of(width: int, slots: list[int]) -> Move:
    return Move({"mlp": width}, 192, (("mlp", 1),), {"mlp": slots})


@pytest.mark.parametrize("of", [rows_of, columns_of])
@pytest.mark.parametrize("name", BLOCKED)
def test_512_channels_over_three_ranks(name: str, of: Any) -> None:
    """192, 192 and 128 a rank: each is refused in blocks of 128 (the first but for its own), right in blocks of 64, and
    the ranks together are the matrix."""
    dialect = DIALECTS[name]
    block = (64, 128) if of is rows_of else (128, 64)
    source = sample(name, of(512, []).shape())
    parts = []
    for rank in (run(0, 192), run(192, 384), run(384, 512)):
        move = of(512, rank)
        census = census_of(move.model(), named(source), dialect.quantization)
        slots = slots_of(move.model(), move.slots)
        problem = storage_problem(move.model(), census.uses, slots)
        assert (problem is not None) == (rank[0] == 192)
        assert storage_problem(move.model(), census.uses, slots, refined={"mlp": 64}) is None
        assert units(move.model(), census.uses)["mlp"] == 128 and units(move.model(), census.uses, 64)["mlp"] == 64
        found, result = moved(move, source, dialect.quantization, {"mlp": 64})
        assert found == dialect.format
        check(dialect, move, source, result, block)
        parts.append(dialect.decode(result, block))
    whole = np.concatenate(parts, axis=0 if of is rows_of else 1)
    assert np.array_equal(whole, dialect.decode(source))


@pytest.mark.parametrize("name", BLOCKED)
def test_without_refinement_the_cut_is_refused(name: str) -> None:
    with pytest.raises(StorageError, match="would mix source entries 1 and 2, each 128 elements"):
        moved(rows_of(512, run(192, 384)), sample(name, (512, 192)), DIALECTS[name].quantization)


@pytest.mark.parametrize("name", BLOCKED)
@pytest.mark.parametrize("shape", [(320, 192), (300, 200), (128, 128), (64, 448)])
def test_refining_every_scale_changes_no_value(name: str, shape: tuple[int, int]) -> None:
    """Nothing moves, short last blocks included; the values' bytes stay and so does every decoded number."""
    dialect = DIALECTS[name]
    move = Move({"mlp": shape[0]}, (("mlp", 1),), shape[1], {})
    source = sample(name, shape)
    _, result = moved(move, source, dialect.quantization, {"*": 64})
    assert np.array_equal(codes(result[".weight"]), codes(source[".weight"]))
    scale = next(suffix for suffix in result if suffix.startswith(".weight_scale"))
    assert result[scale].words.shape == tuple(-(-n // 64) for n in shape)
    assert np.array_equal(dialect.decode(result, (64, 64)), dialect.decode(source))


@pytest.mark.parametrize("name", BLOCKED)
def test_dummies_on_both_in_refined_blocks(name: str) -> None:
    dialect = DIALECTS[name]
    move = Move(
        {"q": 3, "mlp": 320}, (("q", 64),), (("mlp", 1),),
        {"q": [2, -1, 0, -1, 1], "mlp": [*run(192, 320), *dummies(64), *run(0, 192)]},
    )  # fmt: skip
    source = sample(name, move.shape())
    _, result = moved(move, source, dialect.quantization, {"*": 64})
    check(dialect, move, source, result, (64, 64))


@pytest.mark.parametrize("name", GROUPED)
def test_a_group_of_16_or_32_is_the_formats_own_and_stays(name: str) -> None:
    """Only fp8's square blocks have a size that a config gives; refining to 64 or to 8 leaves four-bit groups alone."""
    dialect = DIALECTS[name]
    move = columns_of(256, [*run(64, 256), *dummies(64), *run(0, 64)])
    source = sample(name, move.shape())
    for refined in ({"*": 64}, {"mlp": 64}, {"*": 8}, {"mlp": 8}):
        _, result = moved(move, source, dialect.quantization, refined)
        check(dialect, move, source, result, dialect.block)
    census = census_of(move.model(), named(source), dialect.quantization)
    assert units(move.model(), census.uses, 8)["mlp"] == dialect.cut[1]
