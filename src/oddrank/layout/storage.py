"""Where storage allows an axis to be cut: units, and the check that every stored entry has one source."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from oddrank.errors import OddrankError
from oddrank.formats import format_named
from oddrank.geometry import Dim, Model, Role, Slots
from oddrank.geometry.dims import Counts, IntArray
from oddrank.layout.census import Cut, Part, Use, use_parts
from oddrank.layout.index import StorageError, logical_index, stored_index

Refined = Mapping[str, int]
"""Axis (or "*" for every dimension) -> the finer block its scales are rewritten in."""


def target_block(dim: Dim, part: Part, block: int, refined: Refined) -> int:
    """The block of the result along `dim`: the source's, or a finer one that divides it. A scale of 128 x 128 is
    four of 64 x 64 with the same value, so refining a shared entry loses nothing; packed values cannot be, and the
    groups of 16 or 32 columns of four-bit formats are the formats' own, which no config changes."""
    if not refined or not part.stored.is_block_scale:
        return block
    wanted = [refined[name] for name, _ in dim.axes() if name in refined]
    wanted += [refined["*"]] if "*" in refined else []
    return min((w for w in wanted if w < block and block % w == 0), default=block)


def target_part(role: Role, part: Part, refined: Refined) -> Part:
    """The stored tensor with the footprints it has in the result."""
    if not refined:
        return part
    made = (
        cut._replace(block=target_block(role.dims[d], part, cut.block, refined))
        for d, cut in zip(part.dims, part.cuts, strict=True)
    )
    return part._replace(cuts=tuple(made))


def target_entries(dim: Dim, cut: Cut, target: int, stock: Counts, slots: Slots) -> IntArray:
    """Source entry of each entry of the result along a dimension, -1 = all dummy. target: elements that one covers.

    Raises StorageError where an entry would be split or mixed, ValueError where the slots have no such dimension.
    """
    index = logical_index(dim, stock, slots)
    size = dim.size(stock)
    if cut.fixed and not np.array_equal(index, np.arange(size)):
        raise StorageError("its columns are in activation order, scattered over the scale groups, so none may move", 0)
    return stored_index(index, size, cut.block, shared=cut.shared, target_block=target, tail=cut.tail)


def sharded_dims(
    model: Model, uses: Iterable[Use], axes: set[str] | None = None
) -> Iterator[tuple[Role, Part, Dim, Cut]]:
    """(role, stored tensor, dim, its cut) of every sharded dimension; with `axes`, only theirs."""
    for use in uses:
        role = model.roles[use.role]
        for part, _ in use_parts(model, use):
            for d, cut in zip(part.dims, part.cuts, strict=True):
                touched = {name for name, _ in role.dims[d].axes()}
                if touched and (axes is None or touched & axes):
                    yield role, part, role.dims[d], cut


def units(model: Model, uses: Iterable[Use], finest: int = 0) -> dict[str, int]:
    """Axis -> the smallest whole number of elements at which every stored tensor of the axis can be cut: the least
    common multiple of block / gcd(block, width) over the dims. 192 rows a head in blocks of 128: two heads.
    `finest`: scales may be refined to blocks of this size."""
    found = {axis.name: 1 for axis in model.axes}
    everywhere = {"*": finest} if finest else {}
    for _, part, dim, cut in sharded_dims(model, uses):
        block = target_block(dim, part, cut.block, everywhere)
        if block > 1:
            for axis, width in dim.axes():
                found[axis] = math.lcm(found[axis], block // math.gcd(block, width))
    return found


def require_columns_cut(model: Model, uses: Iterable[Use], ranks: int) -> None:
    """Raises OddrankError where several ranks would cut columns that are scattered over their scale groups."""
    for use in uses if ranks > 1 else ():
        role = model.roles[use.role]
        if format_named(use.format).scattered and any(True for _ in role.dims[-1].axes()):
            raise OddrankError(
                f"{role.name.removesuffix('.weight')} ({use.count} of {role.count()}) is quantized in activation order "
                "(desc_act or actorder, and its g_idx is not k // group): a group has columns from everywhere, "
                f"so {ranks} ranks cannot cut them. Layers cut along their rows only may be stored so. Quantize "
                "it with static_groups (actorder: weight) or without activation order, or run it on one rank.",
                short="columns in activation order",
            )


def storage_problem(
    model: Model, uses: Iterable[Use], slots: Slots, axes: set[str] | None = None, refined: Refined | None = None
) -> str | None:
    """The first stored tensor whose entries these slots would split or mix, in one sentence; None if none."""
    stock = model.stock()
    done: set[tuple[Dim, Cut, int]] = set()
    for role, part, dim, cut in sharded_dims(model, uses, axes):
        target = target_block(dim, part, cut.block, refined or {})
        if (dim, cut, target) in done:
            continue
        done.add((dim, cut, target))
        try:
            target_entries(dim, cut, target, stock, slots)
        except StorageError as error:
            return f"{role.name.removesuffix('.weight')}{part.suffix}: {error}"
        except ValueError as error:
            return f"{role.name}: {error}"
    return None
