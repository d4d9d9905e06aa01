"""Coverage told tensor by tensor, for people: what each stored tensor is, how it is stored, what becomes of it."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from oddrank.formats.base import stem
from oddrank.formats.declared import Declared, kind_of
from oddrank.geometry import Model
from oddrank.layout.census import Census, use_instances


class Disagreement(msgspec.Struct, frozen=True):
    """A linear layer that the config says is stored otherwise than it is."""

    module: str
    stored: str
    declared: str


def disagreements(model: Model, census: Census, said: Declared) -> Iterator[Disagreement]:
    """Every linear layer whose format is of another kind than the config declares.

    Lookups and routers are no linear layers to a quantizer, which leaves them dense whatever its lists say.
    """
    for use in census.uses:
        role = model.roles[use.role]
        if not role.matrix or role.work == 0 or len(role.dims) != 2:
            continue
        kind = kind_of(use.format)
        if kind == "dense" and (role.combine == "replicated" or role.name == "lm_head.weight"):
            continue
        for name in use_instances(model, use):
            module = stem(name)
            declared = said(module)
            if declared is not None and declared != kind:
                yield Disagreement(module, use.format, declared)
