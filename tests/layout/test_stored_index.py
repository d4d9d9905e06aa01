"""stored_index against an element-by-element account of who is in which stored entry."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oddrank.layout.index import StorageError, entries, stored_index


def by_element(logical: list[int], size: int, block: int, shared: bool, target: int) -> list[int] | None:
    """Source entry of every target entry, found by trying every source entry; None where one cannot be stored.

    A shared entry (a scale) serves a target entry if every real element of the target lies in its block. A packed
    entry must be the source word as it is: every element of the word in its place, real or (past the end) absent.
    """
    made = []
    source_entries = -(-size // block)
    for t in range(-(-len(logical) // target)):
        wanted = [logical[i] if i < len(logical) else -1 for i in range(t * target, (t + 1) * target)]
        if all(w < 0 for w in wanted):
            made.append(-1)
            continue
        fitting = []
        for s in range(source_entries):
            inside = [e if e < size else -1 for e in range(s * block, (s + 1) * block)]
            ok = all(w in inside for w in wanted if w >= 0) if shared else wanted == inside
            if ok:
                fitting.append(s)
        if not fitting:
            return None
        made.append(fitting[0])
    return made


@st.composite
def mostly_blocks(draw: st.DrawFn) -> tuple[list[int], int, int, int]:
    """(logical, size, block, target): runs that often keep to blocks, sometimes not; targets refine the block."""
    block = draw(st.integers(1, 6))
    target = draw(st.sampled_from([d for d in range(1, block + 1) if block % d == 0]))
    size = draw(st.integers(1, 5 * block))
    logical: list[int] = []
    for _ in range(draw(st.integers(0, 5))):
        kind = draw(st.sampled_from(["block", "block", "dummies", "run", "one"]))
        if kind == "block":
            b = draw(st.integers(0, (size - 1) // block))
            logical += range(b * block, min((b + 1) * block, size))
            if draw(st.booleans()):
                logical += [-1] * (-len(logical) % block)
        elif kind == "dummies":
            logical += [-1] * draw(st.integers(1, 2 * block))
        elif kind == "run":
            a = draw(st.integers(0, size - 1))
            logical += range(a, draw(st.integers(a, size)))
        else:
            logical.append(draw(st.integers(0, size - 1)))
    return logical, size, block, target


@settings(max_examples=1000)
@given(mostly_blocks(), st.booleans(), st.booleans())
def test_against_elements(case: tuple[list[int], int, int, int], shared: bool, refine: bool) -> None:
    logical, size, block, target = case
    target = target if shared and refine else block  # only scales are refined
    expected = by_element(logical, size, block, shared, target)
    at = np.asarray(logical, dtype=np.int64)
    if expected is None:
        with pytest.raises(StorageError) as caught:
            stored_index(at, size, block, shared=shared, target_block=target)
        # the entry it names is indeed one that cannot be stored
        bad = caught.value.entry
        assert by_element(logical[bad * target : (bad + 1) * target], size, block, shared, target) is None
    else:
        got = stored_index(at, size, block, shared=shared, target_block=None if target == block else target)
        assert got.tolist() == expected
        assert got.dtype == np.int64


@given(st.lists(st.integers(-1, 20), max_size=30))
def test_one_element_an_entry_is_the_logical_index(logical: list[int]) -> None:
    at = np.asarray(logical, dtype=np.int64)
    for shared in (False, True):
        assert stored_index(at, 21, 1, shared=shared).tolist() == logical


def test_one_entry_for_everything() -> None:
    assert stored_index(np.asarray([3, -1, 0]), 4, 0, shared=True).tolist() == [0]
    assert stored_index(np.asarray([-1, -1]), 4, 0, shared=True).tolist() == [0]


@pytest.mark.parametrize(("size", "block", "n"), [(10, 1, 10), (10, 4, 3), (8, 4, 2), (0, 4, 0), (7, 0, 1)])
def test_entries(size: int, block: int, n: int) -> None:
    assert entries(size, block) == n


def test_refined_scale_by_hand() -> None:
    """512 channels in 128-blocks at 3 ranks of 192: refined to 64, rank 1 (171..341 in units of 64: 192..383)."""
    rank1 = np.arange(192, 384)
    with pytest.raises(StorageError, match="source entries 1 and 2"):
        stored_index(rank1, 512, 128, shared=True)
    assert stored_index(rank1, 512, 128, shared=True, target_block=64).tolist() == [1, 2, 2]


def test_a_short_last_block() -> None:
    """10944 rows are 85.5 blocks of 128: the last scale covers 64 rows, and dummies may fill its block up."""
    tail = np.concatenate([np.arange(10880, 10944), np.full(64, -1)])
    assert stored_index(tail, 10944, 128, shared=True).tolist() == [85]
    assert stored_index(np.arange(10880, 10944), 10944, 128, shared=True).tolist() == [85]


def test_packed_words_do_not_straddle() -> None:
    """Two e2m1 values a byte."""
    assert stored_index(np.asarray([2, 3, -1, -1, 0, 1]), 6, 2, shared=False).tolist() == [1, -1, 0]
    for logical, message in (
        ([1, 2], "source entries 0 and 1"),
        ([3, 2], "packed"),
        ([2, -1], "packed"),
        ([2], "packed"),
    ):
        with pytest.raises(StorageError, match=message):
            stored_index(np.asarray(logical), 6, 2, shared=False)


def test_a_short_last_word_keeps_its_own_padding() -> None:
    """Five values in words of two: the third word holds one; a dummy may stand where nothing was."""
    assert stored_index(np.asarray([4]), 5, 2, shared=False).tolist() == [2]
    assert stored_index(np.asarray([4, -1, 0, 1]), 5, 2, shared=False).tolist() == [2, 0]
