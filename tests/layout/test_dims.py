"""Dims against labelled arrays: every position of a stored dimension carries (axis, element, part, offset)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oddrank.geometry import Along, Concat, Dim, Groups, Slots, Whole
from oddrank.layout.index import logical_index


class Label(NamedTuple):
    """Who a position belongs to. `section`: the part's place in the dim, so that q and k labels differ."""

    section: tuple[int, ...]
    axis: str
    element: int
    offset: int


def labels(dim: Dim, counts: dict[str, int], section: tuple[int, ...] = ()) -> list[Label]:
    """The source dimension, written out position by position as its definition says."""
    if isinstance(dim, Whole):
        return [Label(section, "", 0, i) for i in range(dim.length)]
    if isinstance(dim, Along):
        return [Label(section, dim.axis, e, o) for e in range(counts[dim.axis]) for o in range(dim.width)]
    if isinstance(dim, Concat):
        return [x for i, p in enumerate(dim.parts) for x in labels(p, counts, (*section, i))]
    out = []
    for group in range(counts[dim.by]):
        for i, part in enumerate(dim.parts):
            ratio = counts[part.axis] // counts[dim.by]
            for e in range(group * ratio, (group + 1) * ratio):
                out += [Label((*section, i), part.axis, e, o) for o in range(part.width)]
    return out


def local_labels(dim: Dim, slots: Slots, section: tuple[int, ...] = ()) -> list[Label | None]:
    """The local dimension: slot by slot, None where the slot is a dummy."""
    if isinstance(dim, Whole):
        return list(labels(dim, {}, section))
    if isinstance(dim, Along):
        return list(_slot_labels(dim, slots.source[dim.axis].tolist(), section))
    if isinstance(dim, Concat):
        return [x for i, p in enumerate(dim.parts) for x in local_labels(p, slots, (*section, i))]
    out: list[Label | None] = []
    leaders = len(slots.source[dim.by])
    for slot in range(leaders):
        for i, part in enumerate(dim.parts):
            held = slots.source[part.axis].tolist()
            g = len(held) // leaders
            out += _slot_labels(part, held[slot * g : (slot + 1) * g], (*section, i))
    return out


def _slot_labels(part: Along, held: list[int], section: tuple[int, ...]) -> Iterator[Label | None]:
    for element in held:
        for o in range(part.width):
            yield None if element < 0 else Label(section, part.axis, element, o)


def check(dim: Dim, stock: dict[str, int], slots: Slots) -> None:
    source = labels(dim, stock)
    expected = local_labels(dim, slots)
    index = logical_index(dim, stock, slots)
    assert index.dtype == np.int64
    assert dim.size(stock) == len(source)
    assert dim.size(slots.counts()) == len(expected) == len(index)
    assert [None if i < 0 else source[i] for i in index.tolist()] == expected


STOCK_RATIOS = st.tuples(st.integers(1, 4), st.integers(1, 4), st.integers(1, 9))


def held(count: int, max_slots: int = 10) -> st.SearchStrategy[list[int]]:
    return st.lists(st.one_of(st.just(-1), st.integers(0, count - 1)), max_size=max_slots)


@st.composite
def stock_and_slots(draw: st.DrawFn) -> tuple[dict[str, int], Slots]:
    """k heads, v heads (a multiple), a width; local slots hold anything, v in groups of one size."""
    k, r, m = draw(STOCK_RATIOS)
    stock = {"k": k, "v": k * r, "mlp": m}
    ks = draw(held(k, 6))
    g = draw(st.integers(0, 4))
    vs = draw(st.lists(st.one_of(st.just(-1), st.integers(0, k * r - 1)), min_size=len(ks) * g, max_size=len(ks) * g))
    source = {"k": ks, "v": vs, "mlp": draw(held(m))}
    return stock, Slots({n: np.asarray(s, dtype=np.int64) for n, s in source.items()}, {})


width_st = st.integers(1, 4)
along_st = st.builds(Along, st.sampled_from(["k", "v", "mlp"]), width_st)
group_parts = st.lists(st.builds(Along, st.sampled_from(["k", "v"]), width_st), min_size=1, max_size=4)
groups_st = st.builds(lambda p: Groups("k", tuple(p)), group_parts)
whole_st = st.builds(Whole, st.integers(1, 6))
concat_st = st.builds(
    lambda p: Concat(tuple(p)), st.lists(st.one_of(along_st, groups_st, whole_st), min_size=1, max_size=4)
)
dim_st = st.one_of(along_st, groups_st, whole_st, concat_st)


@given(dim_st, stock_and_slots())
def test_index_draws_every_position_from_its_own(dim: Dim, both: tuple[dict[str, int], Slots]) -> None:
    check(dim, *both)


def _slots(**source: list[int]) -> Slots:
    return Slots({n: np.asarray(s, dtype=np.int64) for n, s in source.items()}, {})


def test_packed_qkv_by_hand() -> None:
    """q|k|v of 4 q and 2 kv heads of width 2; a rank with q 2, 3 and kv 1."""
    dim = Concat((Along("q", 2), Along("kv", 2), Along("kv", 2)))
    index = logical_index(dim, {"q": 4, "kv": 2}, _slots(q=[2, 3], kv=[1]))
    assert index.tolist() == [4, 5, 6, 7, 10, 11, 14, 15]


def test_interleaved_qkvz_by_hand() -> None:
    """Two key heads with two value heads each, widths 1: [q k v v z z | q k v v z z]; key head 1 first, a dummy
    value head beside its first."""
    dim = Groups("k", (Along("k"), Along("k"), Along("v"), Along("v")))
    index = logical_index(dim, {"k": 2, "v": 4}, _slots(k=[1, 0], v=[3, -1, 0, 1]))
    assert index.tolist() == [6, 7, 9, -1, 11, -1, 0, 1, 2, 3, 4, 5]


def test_groups_need_whole_groups() -> None:
    dim = Groups("k", (Along("k"), Along("v")))
    with pytest.raises(ValueError, match="3 v slots do not group by 2 k slots"):
        logical_index(dim, {"k": 2, "v": 4}, _slots(k=[0, 1], v=[0, 1, 2]))


def test_a_rank_that_holds_nothing() -> None:
    dim = Concat((Groups("k", (Along("k", 2), Along("v", 3))), Along("v", 3)))
    assert logical_index(dim, {"k": 2, "v": 4}, _slots(k=[], v=[])).tolist() == []


def test_axes_of_a_dim() -> None:
    dim = Concat((Along("q", 4), Groups("k", (Along("k", 2), Along("v", 3))), Whole(5)))
    assert list(dim.axes()) == [("q", 4), ("k", 2), ("v", 3)]


@given(dim_st)
def test_dims_survive_json(dim: Any) -> None:
    assert msgspec.json.decode(msgspec.json.encode(dim), type=Dim) == dim
