"""Where storage allows an axis to be cut: units, and the check that every stored entry has one source."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from oddrank.geometry import Dim, Model, Role, Slots
from oddrank.layout.census import Part, Use, use_parts
from oddrank.layout.index import StorageError, logical_index, stored_index


def sharded_dims(
    model: Model, uses: Iterable[Use], axes: set[str] | None = None
) -> Iterator[tuple[Role, Part, Dim, int]]:
    """(role, stored tensor, dim, block) of every sharded dimension; with `axes`, only theirs."""
    for use in uses:
        role = model.roles[use.role]
        for part, _ in use_parts(model, use):
            for d, block in zip(part.dims, part.blocks, strict=True):
                touched = {name for name, _ in role.dims[d].axes()}
                if touched and (axes is None or touched & axes):
                    yield role, part, role.dims[d], block


def units(model: Model, uses: Iterable[Use]) -> dict[str, int]:
    """Axis -> the smallest whole number of elements at which every stored tensor of the axis can be cut: the least
    common multiple of block / gcd(block, width) over the dims. 192 rows a head in blocks of 128: two heads."""
    found = {axis.name: 1 for axis in model.axes}
    for _, _, dim, block in sharded_dims(model, uses):
        if block > 1:
            for axis, width in dim.axes():
                found[axis] = math.lcm(found[axis], block // math.gcd(block, width))
    return found


def storage_problem(
    model: Model, uses: Iterable[Use], slots: Slots, axes: set[str] | None = None
) -> str | None:
    """The first stored tensor whose entries these slots would split or mix, in one sentence; None if none."""
    stock = model.stock()
    done: set[tuple[Dim, int, bool]] = set()
    for role, part, dim, block in sharded_dims(model, uses, axes):
        if (dim, block, part.stored.shared) in done:
            continue
        done.add((dim, block, part.stored.shared))
        try:
            stored_index(logical_index(dim, stock, slots), dim.size(stock), block, shared=part.stored.shared)
        except StorageError as error:
            return f"{role.name.removesuffix('.weight')}{part.suffix}: {error}"
        except ValueError as error:
            return f"{role.name}: {error}"
    return None
