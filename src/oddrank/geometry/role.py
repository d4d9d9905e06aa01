"""Roles: what a stored tensor is, told once per name pattern."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Literal

import msgspec

from oddrank.geometry.dims import Dim

Combine = Literal["column", "row", "replicated"]


class Role(msgspec.Struct, frozen=True):
    """A tensor-name pattern, its dims, and how its ranks combine.

    name: pattern of the tensor's dense name, e.g. `model.layers.{layer}.self_attn.q_proj.weight`. A quantized
        format replaces the final `.weight` by its own suffixes.
    dims: one dim per dimension of the logical tensor; a matrix is [..., N, K], N output rows, K input columns.
    combine: `column`: ranks' outputs differ and are kept apart; `row`: ranks' outputs are partial sums;
        `replicated`: every rank holds all of it.
    index: the values each `{placeholder}` takes, in order of appearance; instances are their product.
    matrix: a linear layer's weight, which a format may quantize. Norms, convolutions and biases are not.
    transposed: as plain numbers it is stored [..., K, N], whatever other formats do.
    work: multiply-adds per token and weight element: 1 for a linear layer, 0 for a lookup or a vector,
        top_k / experts for a routed expert.
    joins: for a replicated term that is added to a row-parallel sum: the pattern of that sum's role. Exactly
        one rank, its owner, adds it.
    group: roles of an optional part (MTP layers, vision tower) that a checkpoint has completely or not at all.
    either: (choice, option): stored this way or another (stacked or separate experts), not both.
    tied_to: this tensor has no storage of its own; it is the tensor of that other role. A stored copy is an alias.
    """

    name: str
    dims: tuple[Dim, ...]
    combine: Combine
    index: tuple[tuple[str, tuple[int, ...]], ...] = ()
    matrix: bool = False
    transposed: bool = False
    work: float = 0.0
    joins: str | None = None
    tied_to: str | None = None
    group: str | None = None
    either: tuple[str, str] | None = None

    def instances(self) -> Iterator[str]:
        """Every dense tensor name this role stands for."""
        if not self.index:
            yield self.name
            return
        head, *rest = re.split(r"\{[a-z]+\}", self.name)
        names = [head]
        for (_, values), piece in zip(self.index, rest, strict=True):
            tails = [f"{v}{piece}" for v in values]
            names = [name + tail for name in names for tail in tails]
        yield from names

    def outermost(self) -> set[str]:
        """The first and the last of `instances`, and where there are several placeholders those between."""
        ends = tuple((key, tuple(dict.fromkeys((*values[:1], *values[-1:])))) for key, values in self.index)
        return set(msgspec.structs.replace(self, index=ends).instances())

    def count(self) -> int:
        total = 1
        for _, values in self.index:
            total *= len(values)
        return total

    def axes(self) -> set[str]:
        return {name for dim in self.dims for name, _ in dim.axes()}
