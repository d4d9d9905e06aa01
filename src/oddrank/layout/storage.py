"""Where storage allows an axis to be cut: units, and the check that every stored entry has one source."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

from oddrank.geometry import Dim, Model, Role, Slots
from oddrank.layout.census import Part, Use, use_parts
from oddrank.layout.index import StorageError, logical_index, stored_index

Refined = Mapping[str, int]
"""Axis (or "*" for every dimension) -> the finer block its scales are rewritten in."""


def target_block(dim: Dim, part: Part, block: int, refined: Refined) -> int:
    """The block of the result along `dim`: the source's, or a finer one that divides it. A scale of 128 x 128 is
    four of 64 x 64 with the same value, so refining a shared entry loses nothing; packed values cannot be, and the
    groups of 16 or 32 columns of four-bit formats are the formats' own, which no config changes."""
    if not refined or not part.stored.shared or min(part.stored.block) <= 1:
        return block
    wanted = [refined[name] for name, _ in dim.axes() if name in refined]
    wanted += [refined["*"]] if "*" in refined else []
    return min((w for w in wanted if w < block and block % w == 0), default=block)


def target_part(role: Role, part: Part, refined: Refined) -> Part:
    """The stored tensor with the footprints it has in the result."""
    if not refined:
        return part
    made = (target_block(role.dims[d], part, b, refined) for d, b in zip(part.dims, part.blocks, strict=True))
    return part._replace(blocks=tuple(made))


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


def units(model: Model, uses: Iterable[Use], finest: int = 0) -> dict[str, int]:
    """Axis -> the smallest whole number of elements at which every stored tensor of the axis can be cut: the least
    common multiple of block / gcd(block, width) over the dims. 192 rows a head in blocks of 128: two heads.
    `finest`: scales may be refined to blocks of this size."""
    found = {axis.name: 1 for axis in model.axes}
    everywhere = {"*": finest} if finest else {}
    for _, part, dim, source in sharded_dims(model, uses):
        block = target_block(dim, part, source, everywhere)
        if block > 1:
            for axis, width in dim.axes():
                found[axis] = math.lcm(found[axis], block // math.gcd(block, width))
    return found


def storage_problem(
    model: Model, uses: Iterable[Use], slots: Slots, axes: set[str] | None = None, refined: Refined | None = None
) -> str | None:
    """The first stored tensor whose entries these slots would split or mix, in one sentence; None if none."""
    stock = model.stock()
    done: set[tuple[Dim, int, bool]] = set()
    for role, part, dim, block in sharded_dims(model, uses, axes):
        if (dim, block, part.stored.shared) in done:
            continue
        done.add((dim, block, part.stored.shared))
        try:
            target = target_block(dim, part, block, refined or {})
            index = logical_index(dim, stock, slots)
            stored_index(index, dim.size(stock), block, shared=part.stored.shared, target_block=target)
        except StorageError as error:
            return f"{role.name.removesuffix('.weight')}{part.suffix}: {error}"
        except ValueError as error:
            return f"{role.name}: {error}"
    return None
