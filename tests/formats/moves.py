"""Stored matrices moved by slots: a model of one matrix, and an account of which element goes where."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from formats.codec import Parts, Raw

from oddrank.geometry import Along, Axis, Concat, Dim, Model, Role, Slots, Whole
from oddrank.layout.census import Census, take_census
from oddrank.layout.executors import Constraints
from oddrank.layout.plan import Plan
from oddrank.transform.recipe import materialize, recipes

Sections = tuple[tuple[str, int], ...]
"""(axis, positions an element takes) of each section of a dimension; no section: the dimension is never cut."""

NAME = "layers.0.proj.weight"


class Tensor(NamedTuple):
    dtype: str
    shape: tuple[int, ...]


class Move(NamedTuple):
    """A matrix and where its elements go. axes: axis -> count. rows, columns: Sections, or a whole length.
    slots: axis -> source element per slot, -1 = dummy (axes not named stay as they are)."""

    axes: dict[str, int]
    rows: Sections | int
    columns: Sections | int
    slots: dict[str, list[int]]

    def shape(self) -> tuple[int, int]:
        n, k = (d if isinstance(d, int) else sum(self.axes[a] * w for a, w in d) for d in (self.rows, self.columns))
        return n, k

    def where(self) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
        """Source row of every row and source column of every column of the result, -1 = dummy."""
        return self._where(self.rows), self._where(self.columns)

    def _where(self, dim: Sections | int) -> np.ndarray[Any, Any]:
        if isinstance(dim, int):
            return np.arange(dim)
        found: list[int] = []
        start = 0
        for axis, width in dim:
            for element in self.slots.get(axis, range(self.axes[axis])):
                found += [start + element * width + i if element >= 0 else -1 for i in range(width)]
            start += self.axes[axis] * width
        return np.array(found)

    def model(self) -> Model:
        role = Role(NAME, (_dim(self.rows), _dim(self.columns)), "column", matrix=True)
        return model_of((role,), self.axes)


def _dim(dim: Sections | int) -> Dim:
    if isinstance(dim, int):
        return Whole(dim)
    parts = tuple(Along(axis, width) for axis, width in dim)
    return parts[0] if len(parts) == 1 else Concat(parts)


def model_of(roles: Sequence[Role], axes: Mapping[str, int]) -> Model:
    return Model(
        family="toy",
        architecture="Toy",
        hidden=0,
        axes=tuple(Axis(a, n, "width" if n > 64 else "heads", summed=False) for a, n in axes.items()),
        pairs=(),
        roles=tuple(roles),
        kv=(),
        config_axes=(),
    )


def named(parts: Parts, base: str = NAME) -> dict[str, Raw]:
    return {base.removesuffix(".weight") + suffix: raw for suffix, raw in parts.items()}


def census_of(model: Model, tensors: Mapping[str, Raw], quantization: dict[str, Any] | None = None) -> Census:
    return take_census(model, {n: Tensor(r.dtype, r.words.shape) for n, r in tensors.items()}, quantization)


def bare_plan(model: Model, census: Census, refined: Mapping[str, int] | None = None) -> Plan:
    """A plan as far as recipes need one: how tensors are stored; the slots are given apart."""
    return Plan(
        name="toy", config_digest="", model=model, uses=census.uses, tp=1, executor="runtime", kind="", layouts=(),
        pairings=(), owners=(), constraints=Constraints(), context=0, kv_itemsize=2,
        refined=tuple((refined or {}).items()),
    )  # fmt: skip


def slots_of(model: Model, slots: Mapping[str, Sequence[int]]) -> Slots:
    stock = model.stock()
    return Slots({a: np.asarray(slots.get(a, range(n)), dtype=np.int64) for a, n in stock.items()}, {})


def moved(
    move: Move, parts: Parts, quantization: dict[str, Any] | None = None, refined: Mapping[str, int] | None = None
) -> tuple[str, dict[str, Raw]]:
    """(format the census finds, the stored tensors of the result)."""
    model, tensors = move.model(), named(parts)
    census = census_of(model, tensors, quantization)
    assert not census.problems, census.problems
    plan = bare_plan(model, census, refined)
    base = NAME.removesuffix(".weight")
    result = {}
    for name, recipe in recipes(plan, slots_of(model, move.slots)).items():
        assert recipe.dtype == tensors[name].dtype
        beside = recipe.beside(name)
        made = materialize(recipe, tensors[name].words, None if beside is None else tensors[beside].words)
        assert made.shape == recipe.shape and made.dtype == tensors[name].words.dtype
        result[name.removeprefix(base)] = Raw(recipe.dtype, made)
    assert result.keys() == parts.keys()
    return census.uses[0].format, result
