"""Where a plan's bytes go: to which part of the model, and why the ranks hold more than was trained."""

from __future__ import annotations

import msgspec

from oddrank.geometry import Model, Role
from oddrank.layout.cost import weight_bytes
from oddrank.layout.plan import Plan


class PartBytes(msgspec.Struct, frozen=True):
    """Bytes of weights of one part of the model. stock: as trained. per_rank: one a rank."""

    name: str
    stock: int
    per_rank: tuple[int, ...]


class Held(msgspec.Struct, frozen=True):
    """Bytes of weights that all ranks hold together; the sum of all five.

    stock: as trained, once. finer: more of the scales that are rewritten in finer blocks. whole: every further rank's
    copy of what a rank without a single slot would hold (norms, routers, towers). copies: elements that more than one
    slot holds (KV heads). dummies: slots that hold none.
    """

    stock: int
    finer: int
    whole: int
    copies: int
    dummies: int

    @property
    def total(self) -> int:
        return self.stock + self.finer + self.whole + self.copies + self.dummies


def parts(model: Model) -> tuple[str, ...]:
    """What each of the model's roles is part of, in their order.

    By the axes that a role is cut along: `attention`, `linear attention` (heads with a recurrent state), `experts`, or
    the name of a width or of the vocabulary. A role without an axis is part of what the same module has (`q_norm`
    beside `q_proj`); else of its optional group (`vision`); else it is one of the `norms`, or `other`.
    """
    kinds = {axis.name: axis.kind for axis in model.axes}
    recurrent = {state.axis for state in model.states}
    recurrent |= {pair.leader for pair in model.pairs if pair.follower in recurrent}
    inside = expert_axes(model)

    def by_axes(role: Role) -> str | None:
        axes = role.axes()
        if axes & inside:
            return "experts"
        if any(kinds[name] == "heads" for name in axes):
            return "linear attention" if axes & recurrent else "attention"
        return min(axes, default=None)

    modules: dict[str, str] = {}
    for role in model.roles:
        part = by_axes(role)
        if part is not None and not any(kinds[name] == "vocab" for name in role.axes()):
            modules.setdefault(_module(role), part)
    return tuple(
        by_axes(role) or modules.get(_module(role)) or role.group or ("norms" if len(role.dims) == 1 else "other")
        for role in model.roles
    )


def expert_axes(model: Model) -> set[str]:
    """The experts, and the widths that each of them has."""
    experts = {axis.name for axis in model.axes if axis.kind == "experts"}
    return {name for role in model.roles if role.axes() & experts for name in role.axes()}


def _module(role: Role) -> str:
    """Name pattern of the module that has a role's layer: `layers.{layer}.self_attn` of its q_norm's."""
    return role.name.removesuffix(".weight").removesuffix(".bias").rpartition(".")[0]


def bytes_by_part(plan: Plan) -> tuple[PartBytes, ...]:
    """Every part that has bytes, in the order of the model's roles."""
    model, refined, names = plan.model, dict(plan.refined), parts(plan.model)
    found = []
    for name in dict.fromkeys(names[use.role] for use in plan.uses):
        uses = [use for use in plan.uses if names[use.role] == name]
        ranks = tuple(weight_bytes(model, uses, plan.counts(r), refined=refined) for r in range(plan.tp))
        found.append(PartBytes(name, weight_bytes(model, uses, model.stock()), ranks))
    return tuple(found)


def dummy_bytes(plan: Plan) -> tuple[int, ...]:
    """Bytes of weights that each rank's dummies have."""
    model, refined = plan.model, dict(plan.refined)
    found = []
    for rank in range(plan.tp):
        real = {la.axis: la.real()[rank] for la in plan.layouts}
        both = (weight_bytes(model, plan.uses, counts, refined=refined) for counts in (plan.counts(rank), real))
        found.append(next(both) - next(both))
    return tuple(found)


def held(plan: Plan) -> Held:
    """Why the ranks hold more than was trained."""
    model, refined, stock = plan.model, dict(plan.refined), plan.model.stock()
    empty = {axis.name: axis.count if axis.kind == "experts" else 0 for axis in model.axes}
    trained, once = weight_bytes(model, plan.uses, stock), weight_bytes(model, plan.uses, stock, refined=refined)
    whole = (plan.tp - 1) * weight_bytes(model, plan.uses, empty, refined=refined)
    total = sum(weight_bytes(model, plan.uses, plan.counts(r), refined=refined) for r in range(plan.tp))
    dummies = sum(dummy_bytes(plan))
    return Held(trained, once - trained, whole, total - once - whole - dummies, dummies)
