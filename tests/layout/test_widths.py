"""Layouts of widths and vocabularies."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oddrank.layout import widths
from oddrank.layout.candidate import Candidate

width_st, ranks_st, unit_st = st.integers(1, 400), st.integers(1, 9), st.integers(1, 12)


def real_slots(c: Candidate) -> list[int]:
    (layout,) = c.layouts
    return [int(s) for r in range(len(layout.ranks)) for s in layout.slots(r) if s >= 0]


@given(width_st, ranks_st, unit_st)
def test_even(width: int, ranks: int, unit: int) -> None:
    c = widths.even("mlp", width, ranks, unit, "even")
    assert (c is not None) == (width % (ranks * unit) == 0)
    if c is not None:
        assert c.layouts[0].is_even_split(width)


@given(width_st, ranks_st, unit_st)
def test_padded_is_the_smallest_equal_cut_in_whole_units(width: int, ranks: int, unit: int) -> None:
    c = widths.padded("mlp", width, ranks, unit)
    assert c is not None
    (layout,) = c.layouts
    assert real_slots(c) == list(range(width))
    per = layout.counts()[0]
    assert layout.counts() == (per,) * ranks
    assert per % unit == 0
    assert per * ranks >= width > (per - unit) * ranks
    _whole_units(c, unit)


@given(width_st, ranks_st, unit_st, st.integers(1, 800))
def test_padded_to_a_fixed_total(width: int, ranks: int, unit: int, total: int) -> None:
    c = widths.padded("mlp", width, ranks, unit, total)
    assert (c is not None) == (total >= width and total % (ranks * unit) == 0)
    if c is not None:
        assert c.layouts[0].total() == total
        assert len(set(c.layouts[0].counts())) == 1
        assert real_slots(c) == list(range(width))
        _whole_units(c, unit)


@given(width_st, ranks_st, unit_st, st.booleans(), st.data())
def test_ragged(width: int, ranks: int, unit: int, weighted: bool, data: st.DataObject) -> None:
    shares = data.draw(st.lists(st.floats(0.1, 10), min_size=ranks, max_size=ranks)) if weighted else None
    c = widths.ragged("mlp", width, ranks, unit, shares)
    units = -(-width // unit)
    assert (c is None) == (units < ranks)
    if c is None:
        return
    (layout,) = c.layouts
    assert real_slots(c) == list(range(width))
    assert layout.total() == width
    assert min(layout.counts()) >= 1
    _whole_units(c, unit)
    if not weighted:
        # the fullest rank has one unit more than the emptiest at most (the last unit of the width may be short)
        assert max(layout.counts()) <= -(-units // ranks) * unit
    padded = widths.padded("mlp", width, ranks, unit)
    assert padded is not None
    if not weighted:
        assert not c.dominated_by(padded)


def _whole_units(c: Candidate, unit: int) -> None:
    """Each rank's real slots start at a unit's first element; a unit's elements are never on two ranks."""
    (layout,) = c.layouts
    home: dict[int, int] = {}
    for rank in range(len(layout.ranks)):
        slots = layout.slots(rank)
        real = slots[slots >= 0]
        if len(real):
            assert real[0] % unit == 0
            assert (slots[: len(real)] == real).all()  # dummies only after the real ones
        for u in np.unique(real // unit).tolist():
            assert home.setdefault(u, rank) == rank


@given(st.integers(1, 3000), ranks_st, st.integers(1, 40), st.sampled_from([1, 16, 64, 128]))
def test_aligned_unit(width: int, ranks: int, unit: int, preferred: int) -> None:
    """A multiple of the unit and of a power-of-two fraction of the preferred; at most 5% wider; the largest such."""
    u = widths.aligned_unit(width, ranks, unit, preferred)
    assert u % unit == 0
    widest = lambda x: -(-width // (ranks * x)) * x  # noqa: E731
    assert u == unit or widest(u) <= 1.05 * widest(unit)
    assert u == unit or width >= ranks * u
    fraction = preferred
    while fraction > 1:
        larger = np.lcm(unit, fraction)
        if larger > u:
            assert widest(larger) > 1.05 * widest(unit) or width < ranks * larger
        fraction //= 2


@pytest.mark.parametrize(
    ("rows", "ranks", "total"),
    [
        (32000, 3, 32064),
        (152064, 6, 152064),
        (151552, 6, 151680),
        (248320, 3, 248448),
        (248320, 8, 248320),
        (201088, 3, 201216),
        (129280, 6, 129408),
        (49152, 2, 49152),
        (49152, 5, 49280),
    ],
)
def test_published_vocabularies(rows: int, ranks: int, total: int) -> None:
    c = widths.engine_vocab("vocab", rows, ranks, 64)
    assert c is not None
    assert c.layouts[0].total() == total
    assert c.layouts[0].in_engine
    assert c.kind == ("identity" if total == rows else "pad")


@given(st.integers(1, 5000), ranks_st, st.sampled_from([1, 8, 64]))
def test_engine_vocab(rows: int, ranks: int, multiple: int) -> None:
    """vLLM: pad to a multiple of 64, or of 64 x ranks where that does not divide; rank i holds rows i * per on."""
    c = widths.engine_vocab("vocab", rows, ranks, multiple)
    assert c is not None
    (layout,) = c.layouts
    per = layout.counts()[0]
    assert layout.counts() == (per,) * ranks
    assert real_slots(c) == list(range(rows))
    padded = -(-rows // multiple) * multiple
    if padded % ranks:
        padded = -(-rows // (multiple * ranks)) * multiple * ranks
    assert layout.total() == padded
    for rank in range(ranks):
        held = [x for x in range(rank * per, (rank + 1) * per) if x < rows]
        assert layout.slots(rank).tolist() == held + [-1] * (per - len(held))


def test_engine_vocab_of_a_fixed_total() -> None:
    assert widths.engine_vocab("vocab", 100, 3, 4, 120).layouts[0].total() == 120  # type: ignore[union-attr]
    assert widths.engine_vocab("vocab", 100, 3, 4, 119) is None
    assert widths.engine_vocab("vocab", 100, 3, 4, 99) is None
