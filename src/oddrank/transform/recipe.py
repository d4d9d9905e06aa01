"""Recipes: how one stored tensor of the result is drawn from one stored tensor of the source.

A recipe is the plan's slots turned into runs of stored entries, once per role and stored tensor; every instance of
the role shares it. Applying one is slices copied between numpy views of raw words: nothing is decoded.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from oddrank.formats.base import fill_word, stem
from oddrank.geometry import Slots
from oddrank.geometry.dims import IntArray
from oddrank.layout.census import stored_shape, use_instances, use_parts
from oddrank.layout.index import logical_index, stored_index
from oddrank.layout.plan import Plan
from oddrank.layout.storage import target_block

Words = npt.NDArray[Any]


class Span(NamedTuple):
    """`length` target entries from `target` on, drawn from source entries from `source` on; -1 = filled."""

    target: int
    source: int
    length: int


Move = tuple[tuple[slice, ...], tuple[slice, ...] | int]
"""(target region, source region or the word to fill with)."""


class Recipe(NamedTuple):
    """source_shape, shape: stored shapes before and after. dtype: safetensors name. spans: per dimension.
    fills: per dimension, the word for entries of that dimension that have no source; where two dimensions have
    none, the first (rows) decides. unchanged: the result is the source, byte for byte. moves: the same as slices,
    made once for all the tensors that share the recipe. copies: those of the moves that a result made of zeroed
    memory still needs."""

    source_shape: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    spans: tuple[tuple[Span, ...], ...]
    fills: tuple[int, ...]
    unchanged: bool
    moves: tuple[Move, ...]
    copies: tuple[Move, ...]


def spans_of(index: IntArray) -> tuple[Span, ...]:
    """Runs of consecutive source entries (or of fills) in an index of entries."""
    if not len(index):
        return ()
    step = np.where(index[:-1] < 0, index[1:] < 0, index[1:] == index[:-1] + 1)
    starts = np.flatnonzero(np.concatenate([[True], ~step]))
    ends = np.append(starts[1:], len(index))
    return tuple(Span(int(s), int(index[s]), int(e - s)) for s, e in zip(starts, ends, strict=True))


class Made(NamedTuple):
    """A recipe with the stored tensors that share it, and what they are of: role and suffix."""

    recipe: Recipe
    names: list[str]
    what: str


def made_recipes(plan: Plan, slots: Slots) -> Iterator[Made]:
    """The recipes of every stored tensor that has a role, one a role, format and suffix."""
    stock, refined = plan.model.stock(), dict(plan.refined)
    found: dict[tuple[Any, ...], tuple[Span, ...]] = {}
    for use in plan.uses:
        role = plan.model.roles[use.role]
        bases = [stem(name) for name in use_instances(plan.model, use)]
        source_logical = tuple(d.size(stock) for d in role.dims)
        for part, dtype in use_parts(plan.model, use):
            spans = []
            for d, block in zip(part.dims, part.blocks, strict=True):
                key = (role.dims[d], block, part.stored.shared)
                if key not in found:
                    index = logical_index(role.dims[d], stock, slots)
                    size = source_logical[d]
                    target = target_block(role.dims[d], part, block, refined)
                    entries = stored_index(index, size, block, shared=part.stored.shared, target_block=target)
                    found[key] = spans_of(entries)
                spans.append(found[key])
            source_shape = stored_shape(source_logical, part)
            shape = tuple(sum(s.length for s in sp) for sp in spans)
            unchanged = shape == source_shape and all(
                sp == (Span(0, 0, n),) for sp, n in zip(spans, shape, strict=True)
            )
            rows, columns = (fill_word(f, dtype) for f in (part.stored.row_fill, part.stored.column_fill))
            is_column = [role.matrix and d == len(role.dims) - 1 for d in part.dims]
            fills = tuple(columns if c else rows for c in is_column)
            moves = moves_of(spans, fills)
            copies = tuple(m for m in moves if m[1] != 0)
            recipe = Recipe(source_shape, shape, dtype, tuple(spans), fills, unchanged, moves, copies)
            yield Made(recipe, [base + part.suffix for base in bases], stem(role.name) + part.suffix)


def recipes(plan: Plan, slots: Slots) -> dict[str, Recipe]:
    """The recipe of every stored tensor that has a role, by its name."""
    found: dict[str, Recipe] = {}
    for made in made_recipes(plan, slots):
        found.update(dict.fromkeys(made.names, made.recipe))
    return found


def apply(recipe: Recipe, source: Words, out: Words) -> None:
    """Write the whole result into `out` (STORAGE dtype, recipe.shape; may be strided)."""
    _run(recipe.moves, source, out)


def apply_rows(recipe: Recipe, source: Words, start: int, out: Words) -> None:
    """Write rows start .. start + len(out) of the result (along its first dimension) into `out`."""
    stop = start + len(out)
    first = []
    for span in recipe.spans[0]:
        a, b = max(span.target, start), min(span.target + span.length, stop)
        if a < b:
            moved = span.source + (a - span.target) if span.source >= 0 else -1
            first.append(Span(a - start, moved, b - a))
    _run(moves_of((tuple(first), *recipe.spans[1:]), recipe.fills), source, out)


def moves_of(spans: Sequence[tuple[Span, ...]], fills: tuple[int, ...]) -> tuple[Move, ...]:
    """Every combination of the dimensions' spans, as regions. Where some dimension has no source the region is
    filled, by the first such dimension's word."""
    made: list[Move] = []
    for combination in itertools.product(*spans):
        target = tuple(slice(s.target, s.target + s.length) for s in combination)
        fill = next((f for s, f in zip(combination, fills, strict=True) if s.source < 0), None)
        made.append(
            (target, tuple(slice(s.source, s.source + s.length) for s in combination) if fill is None else fill)
        )
    return tuple(made)


def _run(moves: Iterable[Move], source: Words, out: Words) -> None:
    for target, origin in moves:
        out[target] = origin if isinstance(origin, int) else source[origin]


def materialize(recipe: Recipe, source: Words) -> Words:
    """The result as a new array of the source's words; the source itself (a view, no copy) where nothing changes."""
    if recipe.unchanged:
        return source
    # fresh pages come from the system as zeros, and numpy asks for just those: zero fills then cost nothing
    out = np.zeros(recipe.shape, dtype=source.dtype)
    _run(recipe.copies, source, out)
    return out
