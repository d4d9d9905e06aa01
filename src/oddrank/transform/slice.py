"""One rank's slice of a checkpoint, copied straight from the mapped files into the caller's arrays."""

from __future__ import annotations

from oddrank.checkpoint import Checkpoint
from oddrank.errors import OddrankError
from oddrank.geometry.dims import IntArray
from oddrank.layout.plan import Plan
from oddrank.transform.recipe import Words, apply, recipes


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
        if self._checkpoint is None:
            raise OddrankError(f"this slice has no checkpoint to read {name} from.")
        recipe = self._recipes[name]
        if out.shape != recipe.shape:
            raise ValueError(f"{name}: out is {list(out.shape)}, the slice is {list(recipe.shape)}")
        apply(recipe, self._checkpoint.array(name), out)


def _instances(plan: Plan, role_name: str) -> list[str]:
    return [n for role in plan.model.roles if role.name == role_name for n in role.instances()]


def rank_slice(plan: Plan, rank: int, checkpoint: Checkpoint | None = None) -> RankSlice:
    """One rank's slice of `plan`, to be read from `checkpoint`."""
    return RankSlice(plan, checkpoint, rank)
