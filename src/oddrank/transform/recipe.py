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

from oddrank.formats import Format, fill_word, format_named
from oddrank.formats.base import stem
from oddrank.geometry import Dim, Role, Slots
from oddrank.geometry.dims import IntArray
from oddrank.layout.census import Cut, Part, stored_shape, use_instances, use_parts
from oddrank.layout.plan import Plan
from oddrank.layout.storage import target_block, target_entries
from oddrank.transform.rewritten import Rewritten, rewritten
from oddrank.transform.zeros import Zeros, zeros_of

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
    memory still needs. rewritten: what it says in place of moves, for index metadata. zeros: what it needs of the zero
    points beside it."""

    source_shape: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    spans: tuple[tuple[Span, ...], ...]
    fills: tuple[int, ...]
    unchanged: bool
    moves: tuple[Move, ...]
    copies: tuple[Move, ...]
    rewritten: Rewritten | None = None
    zeros: Zeros | None = None

    def beside(self, name: str) -> str | None:
        """The stored tensor whose source words `name` is made of, besides its own; None if none."""
        return None if self.zeros is None else self.zeros.beside(name)


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
    maker = _Maker(plan, slots)
    for use in plan.uses:
        role, fmt = plan.model.roles[use.role], format_named(use.format)
        bases = [stem(name) for name in use_instances(plan.model, use)]
        parts = {part.stored.suffix: (part, dtype) for part, dtype in use_parts(plan.model, use)}
        for suffix, (part, dtype) in parts.items():
            recipe = maker.recipe(role, fmt, part, dtype)
            if fmt.zero_points is not None and suffix == fmt.stored[0].suffix:
                recipe = recipe._replace(zeros=maker.zeros(role, fmt, part, parts[fmt.zero_points.suffix][0]))
            yield Made(recipe, [base + part.suffix for base in bases], stem(role.name) + part.suffix)


class _Maker:
    """Recipes for one set of slots. Roles share dims, and many parts lie along a dim alike: each such index is made
    once."""

    def __init__(self, plan: Plan, slots: Slots) -> None:
        self._slots, self._refined = slots, dict(plan.refined)
        self._before, self._after = plan.model.stock(), slots.counts()
        self._found: dict[tuple[Dim, Cut, int], tuple[IntArray, tuple[Span, ...]]] = {}

    def recipe(self, role: Role, fmt: Format, part: Part, dtype: str) -> Recipe:
        before, after = (tuple(d.size(held) for d in role.dims) for held in (self._before, self._after))
        spans = [self._along(role, part, place)[1] for place in range(len(part.dims))]
        rows, columns = (fill_word(f, dtype) for f in (part.stored.row_fill, part.stored.column_fill))
        fills = [columns if role.matrix and d == len(role.dims) - 1 else rows for d in part.dims]
        if part.stored.inner:
            spans.append((Span(0, 0, part.stored.inner),))
            fills.append(0)
        source_shape = stored_shape(before, part)
        shape = tuple(sum(s.length for s in sp) for sp in spans)
        unchanged = shape == source_shape and all(sp == (Span(0, 0, n),) for sp, n in zip(spans, shape, strict=True))
        anew = None
        if part.stored.rewritten is not None:
            sizes = (before[-2], before[-1]), (after[-2], after[-1])
            group = max(s.block[1] for s in fmt.stored if s.shared)
            anew = rewritten(part.stored.rewritten, stem(role.name) + part.suffix, dtype, *sizes, group)
            unchanged = sizes[0] == sizes[1] if part.stored.rewritten == "sizes" else unchanged
        moves = moves_of(spans, fills)
        copies = tuple(m for m in moves if m[1] != 0)
        anew = None if unchanged else anew  # groups in any order stay what they are where no column moves
        return Recipe(source_shape, shape, dtype, tuple(spans), tuple(fills), unchanged, moves, copies, anew)

    def zeros(self, role: Role, fmt: Format, values: Part, points: Part) -> Zeros | None:
        """What the values' dummy columns need of the zero points beside them; None where constant fills do."""
        n, k = len(role.dims) - 2, len(role.dims) - 1
        rows, columns = (self._along(role, values, values.dims.index(d))[0] for d in (n, k))
        groups = self._along(role, points, points.dims.index(k))[0]
        return zeros_of(fmt, stem(role.name) + points.suffix, (values.suffix, points.suffix), (rows, columns), groups)

    def _along(self, role: Role, part: Part, place: int) -> tuple[IntArray, tuple[Span, ...]]:
        """Source entries along one of a part's dimensions, and the same as spans."""
        dim, cut = role.dims[part.dims[place]], part.cuts[place]
        target = target_block(dim, part, cut.block, self._refined)
        if (dim, cut, target) not in self._found:
            entries = target_entries(dim, cut, target, self._before, self._slots)
            self._found[dim, cut, target] = entries, spans_of(entries)
        return self._found[dim, cut, target]


def recipes(plan: Plan, slots: Slots) -> dict[str, Recipe]:
    """The recipe of every stored tensor that has a role, by its name."""
    found: dict[str, Recipe] = {}
    for made in made_recipes(plan, slots):
        found.update(dict.fromkeys(made.names, made.recipe))
    return found


def passed_names(plan: Plan) -> Iterator[str]:
    """What tools may have written beside the plan's matrices, which has no role and is passed on as it is."""
    for use in plan.uses:
        passed = format_named(use.format).passed
        for name in use_instances(plan.model, use) if passed else ():
            yield from (stem(name) + suffix for suffix in passed)


def apply(recipe: Recipe, source: Words, out: Words, beside: Words | None = None) -> None:
    """Write the whole result into `out` (STORAGE dtype, recipe.shape; may be strided). beside: the source of
    `recipe.beside`, where it has one."""
    if recipe.rewritten is not None:
        out[...] = recipe.rewritten.of(source)
        return
    _run(recipe.moves, source, out)
    _run_zeros(recipe, beside, out, 0)


def apply_rows(recipe: Recipe, source: Words, start: int, out: Words, beside: Words | None = None) -> None:
    """Write rows start .. start + len(out) of the result (along its first dimension) into `out`."""
    stop = start + len(out)
    if recipe.rewritten is not None:
        out[...] = recipe.rewritten.of(source)[start:stop]
        return
    first = []
    for span in recipe.spans[0]:
        a, b = max(span.target, start), min(span.target + span.length, stop)
        if a < b:
            moved = span.source + (a - span.target) if span.source >= 0 else -1
            first.append(Span(a - start, moved, b - a))
    _run(moves_of((tuple(first), *recipe.spans[1:]), recipe.fills), source, out)
    _run_zeros(recipe, beside, out, start)


def moves_of(spans: Sequence[tuple[Span, ...]], fills: Sequence[int]) -> tuple[Move, ...]:
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


def _run_zeros(recipe: Recipe, beside: Words | None, out: Words, start: int) -> None:
    """The words of dummy columns that are made from zero points, in rows start, start + 1, ... of the result."""
    if recipe.zeros is None:
        return
    if beside is None:
        raise TypeError("this recipe is made of the zero points beside its values, too")
    for (rows, columns), words in recipe.zeros.patches(beside):
        a, b = max(rows.start, start), min(rows.stop, start + len(out))
        if a < b:
            part = words if len(words) == 1 else words[a - rows.start : b - rows.start]
            out[a - start : b - start, columns] = part


def materialize(recipe: Recipe, source: Words, beside: Words | None = None) -> Words:
    """The result as a new array of the source's words; the source itself (a view, no copy) where nothing changes."""
    if recipe.unchanged:
        return source
    # fresh pages come from the system as zeros, and numpy asks for just those: zero fills then cost nothing
    out = np.zeros(recipe.shape, dtype=source.dtype)
    if recipe.rewritten is not None:
        out[...] = recipe.rewritten.of(source)
        return out
    _run(recipe.copies, source, out)
    _run_zeros(recipe, beside, out, 0)
    return out
