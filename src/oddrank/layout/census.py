"""The census of a checkpoint: every stored tensor with its role and format, and whatever does not fit.

It reads names, dtypes and shapes only. A plan keeps the `uses`; the first proof check (coverage) is that
`problems` is empty.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Protocol

import msgspec

from oddrank.formats import Format, format_named, formats
from oddrank.formats.base import Stored, stem
from oddrank.geometry import Model, Role
from oddrank.layout.index import entries


class TensorLike(Protocol):
    """What the census reads of a stored tensor."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


class Use(msgspec.Struct, frozen=True):
    """Instances of one role that are stored alike.

    role: position in `Model.roles`. format: registry name. dtypes: one per stored tensor of the format.
    instances: positions among `Role.instances()`, None = all of them. count: how many.
    """

    role: int
    format: str
    dtypes: tuple[str, ...]
    count: int
    instances: tuple[int, ...] | None = None


class Census(msgspec.Struct, frozen=True):
    """What a checkpoint holds.

    total: stored tensors. stock_bytes: bytes of those with a role. ignored, aliased: names without a role that
    the family accounts for. unmatched: names nothing accounts for. problems: one sentence each, naming the
    tensor and the numbers.
    """

    uses: tuple[Use, ...]
    total: int
    ignored: tuple[str, ...]
    aliased: tuple[str, ...]
    unmatched: tuple[str, ...]
    problems: tuple[str, ...]


def stored_tensors(role: Role, fmt: Format) -> Iterator[tuple[str, Stored]]:
    """(suffix to put on an instance's stem, stored tensor) for each stored tensor of the role in this format."""
    for stored in fmt.stored:
        if role.name.endswith(".weight"):
            yield stored.suffix, stored
        else:
            yield stored.suffix.removeprefix(".weight"), stored


def blocks(role: Role, stored: Stored) -> tuple[int, ...]:
    """Footprint of a stored entry along each dim of the role: leading dims 1, then N and K."""
    if not role.matrix:
        return (1,) * len(role.dims)
    return (1,) * (len(role.dims) - 2) + stored.block


def stored_shape(logical: tuple[int, ...], footprint: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(entries(n, b) for n, b in zip(logical, footprint, strict=True))


def take_census(model: Model, tensors: Mapping[str, TensorLike]) -> Census:
    """Match every stored tensor with its role and format, by name, dtype and shape."""
    stock = model.stock()
    vectors = [f for f in formats().values() if f.for_vectors]
    matrices = list(formats().values())
    seen: set[str] = set()
    aliased: list[str] = []
    problems: list[str] = []
    uses: list[Use] = []
    for position, role in enumerate(model.roles):
        logical = tuple(d.size(stock) for d in role.dims)
        if role.tied_to is not None:
            for name in role.instances():
                if name in tensors:
                    seen.add(name)
                    aliased.append(name)
            continue
        candidates = [
            (fmt, [(s, st, stored_shape(logical, blocks(role, st))) for s, st in stored_tensors(role, fmt)])
            for fmt in (matrices if role.matrix else vectors)
        ]
        groups: dict[tuple[str, tuple[str, ...]], list[int]] = {}
        for number, name in enumerate(role.instances()):
            base = stem(name)
            for fmt, parts in candidates:
                found = [tensors.get(base + suffix) for suffix, _, _ in parts]
                if all(
                    t is not None and t.dtype in st.dtypes and tuple(t.shape) == shape
                    for t, (_, st, shape) in zip(found, parts, strict=True)
                ):
                    seen.update(base + suffix for suffix, _, _ in parts)
                    key = (fmt.name, tuple(t.dtype for t in found if t is not None))
                    groups.setdefault(key, []).append(number)
                    break
            else:
                problems.append(_mismatch(name, tensors, logical, role, candidates, seen))
        for (fmt_name, dtypes), numbers in groups.items():
            whole = len(numbers) == role.count()
            uses.append(Use(position, fmt_name, dtypes, len(numbers), None if whole else tuple(numbers)))
    left = [name for name in tensors if name not in seen]
    pattern = re.compile("|".join(model.ignored) or r"(?!)")
    ignored = [name for name in left if pattern.fullmatch(name)]
    unmatched = [name for name in left if not pattern.fullmatch(name)]
    problems += [
        f"{name} {tensors[name].dtype} {list(tensors[name].shape)} has no role in family {model.family}"
        for name in unmatched
    ]
    return Census(
        tuple(uses), len(tensors), tuple(ignored), tuple(aliased), tuple(unmatched), tuple(problems)
    )


def _mismatch(
    name: str,
    tensors: Mapping[str, TensorLike],
    logical: tuple[int, ...],
    role: Role,
    candidates: list[tuple[Format, list[tuple[str, Stored, tuple[int, ...]]]]],
    seen: set[str],
) -> str:
    """One sentence on an instance that no format explains; what is there under its name is marked as seen."""
    there = tensors.get(name)
    if there is None:
        return f"{name} is missing (config.json implies {role.count()} of {role.name})"
    seen.add(name)
    shape = tuple(there.shape)
    if shape != logical and any(there.dtype in st.dtypes for _, parts in candidates for _, st, _ in parts):
        return f"{name} is {there.dtype} {list(shape)}, but config.json implies {list(logical)}"
    names = ", ".join(fmt.name for fmt, _ in candidates)
    return f"{name} is {there.dtype} {list(shape)}, which no known format ({names}) stores a {list(logical)} as"


def use_instances(model: Model, use: Use) -> Iterator[str]:
    """Dense names of the instances a use covers."""
    names = model.roles[use.role].instances()
    if use.instances is None:
        yield from names
        return
    wanted = set(use.instances)
    yield from (name for number, name in enumerate(names) if number in wanted)


def use_format(use: Use) -> Format:
    return format_named(use.format)
