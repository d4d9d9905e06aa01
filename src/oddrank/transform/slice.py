"""One rank's slice of a checkpoint, copied straight from the mapped files into the caller's arrays."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from oddrank.checkpoint import Checkpoint
from oddrank.errors import OddrankError
from oddrank.formats import format_named
from oddrank.formats.base import stem
from oddrank.geometry.dims import IntArray
from oddrank.layout.census import Use, use_instances, use_parts
from oddrank.layout.plan import Plan
from oddrank.layout.storage import target_part
from oddrank.transform.recipe import Words, apply, apply_rows, recipes


class StoredMatrix(NamedTuple):
    """How a matrix is stored in a rank's slice. format: its name, see formats.format_named. names: the format's suffix
    -> the stored tensor, of those that are there. blocks: suffix -> elements along (N, K) that one entry covers in
    the slice, where scales may be finer than in the file; 0 = the whole dimension. transposed: it is stored
    [..., K, N]."""

    format: str
    names: dict[str, str]
    blocks: dict[str, tuple[int, int]]
    transposed: bool = False


class RankSlice:
    """What one rank of a plan holds: sizes and maps for building modules, bytes for filling them.

    Both come from the same slots, so a module built from `count` always fits what `read_into` copies.
    Without a checkpoint the sizes and maps still answer; reading raises.
    """

    def __init__(self, plan: Plan, checkpoint: Checkpoint | None, rank: int) -> None:
        if not 0 <= rank < plan.tp:
            raise OddrankError(f"rank {rank} is not one of the plan's {plan.tp} (0 to {plan.tp - 1}).")
        self.plan, self.rank, self.tp = plan, rank, plan.tp
        self._checkpoint = checkpoint
        self._slots = plan.slots(rank)
        self._recipes = recipes(plan, self._slots)
        self._owners = {n: r for name, r in plan.owners for n in _instances(plan, name)}
        self._uses = {name: use for use in plan.uses for name in map(stem, use_instances(plan.model, use))}
        self._suffixes: dict[int, tuple[tuple[str, str, tuple[int, int]], ...]] = {}
        self._groups = _groups(plan)

    def count(self, axis: str) -> int:
        """Local slots of an axis, dummies included."""
        return len(self._slots.source[axis])

    def source(self, axis: str) -> IntArray:
        """int64 [count]: the source element each local slot holds, -1 = dummy."""
        return self._slots.source[axis]

    def partner(self, axis: str) -> IntArray:
        """int64 [count]: the local leader slot that each slot of this follower axis reads."""
        return self._slots.partner[axis]

    def owns(self, name: str) -> bool:
        """Does this rank add the replicated tensor `name` to the sum it joins? KeyError if it joins none."""
        return self._owners[name] == self.rank

    def joins_sum(self, name: str) -> bool:
        return name in self._owners

    def names(self) -> list[str]:
        """Stored tensors that have a role, in the order of the roles."""
        return list(self._recipes)

    def matrix(self, name: str) -> StoredMatrix:
        """How the linear layer `name` (without `.weight`), or the stack of experts `name`, is stored. KeyError for a
        name that no stored matrix has."""
        use = self._uses[name]
        if id(use) not in self._suffixes:  # the plan keeps its uses, and thousands of experts share one
            self._suffixes[id(use)] = tuple(self._parts(use))
        known = self._suffixes[id(use)]
        names, blocks = {s: name + tail for s, tail, _ in known}, {s: block for s, _, block in known}
        transposed = self.plan.model.roles[use.role].transposed and format_named(use.format).for_vectors
        return StoredMatrix(use.format, names, blocks, transposed)

    def _parts(self, use: Use) -> Iterator[tuple[str, str, tuple[int, int]]]:
        """(the format's suffix, what it is appended to a stem as, its block) of what a use stores."""
        role, refined = self.plan.model.roles[use.role], dict(self.plan.refined)
        last = len(role.dims) - 1
        for part, _ in use_parts(self.plan.model, use):
            found = target_part(role, part, refined)
            over = dict(zip(found.dims, found.blocks, strict=True))
            n, k = part.stored.block
            yield part.stored.suffix, part.suffix, (over.get(last - 1, n), over.get(last, k))

    def part_of(self, name: str) -> str | None:
        """The optional part of the model that a stored tensor belongs to ("MTP", "vision"); None for the model."""
        return self._groups.get(name)

    def shape(self, name: str) -> tuple[int, ...]:
        """The local stored shape."""
        return self._recipes[name].shape

    def dtype(self, name: str) -> str:
        """safetensors dtype name."""
        return self._recipes[name].dtype

    def nbytes(self) -> int:
        """Bytes of the whole slice as stored."""
        from oddrank.checkpoint.dtypes import nbytes

        return sum(nbytes(r.dtype, r.shape) for r in self._recipes.values())

    def read_into(self, name: str, out: Words) -> None:
        """Copy the rank's part of a stored tensor into `out`: STORAGE dtype, `shape(name)`, any strides."""
        recipe = self._recipes[name]
        if out.shape != recipe.shape:
            raise ValueError(f"{name}: out is {list(out.shape)}, the slice is {list(recipe.shape)}")
        apply(recipe, self._source(name), out, self._beside(name))

    def read_rows_into(self, name: str, start: int, out: Words) -> None:
        """Copy rows start, start + 1, ... of the rank's part of a stored tensor into `out`, as many as it has."""
        apply_rows(self._recipes[name], self._source(name), start, out, self._beside(name))

    def _source(self, name: str) -> Words:
        if self._checkpoint is None:
            raise OddrankError(f"this slice has no checkpoint to read {name} from.")
        return self._checkpoint.array(name)

    def _beside(self, name: str) -> Words | None:
        """The zero points that a stored tensor's dummy columns are made of, where they are."""
        beside = self._recipes[name].beside(name)
        return None if beside is None else self._source(beside)


def _groups(plan: Plan) -> dict[str, str]:
    """Stored tensor -> optional part of the model, for those of such parts."""
    found = {}
    for use in plan.uses:
        group = plan.model.roles[use.role].group
        if group is not None:
            for name in map(stem, use_instances(plan.model, use)):
                found.update({name + part.suffix: group for part, _ in use_parts(plan.model, use)})
    return found


def _instances(plan: Plan, role_name: str) -> list[str]:
    return [n for role in plan.model.roles if role.name == role_name for n in role.instances()]


def rank_slice(plan: Plan, rank: int, checkpoint: Checkpoint | None = None) -> RankSlice:
    """One rank's slice of `plan`, to be read from `checkpoint`."""
    return RankSlice(plan, checkpoint, rank)
