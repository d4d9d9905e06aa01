"""What a model is made of: modules that hold parameters, and parameters that know their stored tensors.

A module is built from a rank's sizes alone, without memory. The loader then walks `parameters()`, gives each
its tensor and copies the stored tensors into it.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from oddrank.errors import OddrankError

Index = tuple[int | slice, ...]


class Part:
    """What one stored tensor, whole, fills of a parameter: `tensor[index]`; () is all of it."""

    __slots__ = ("index", "name")

    def __init__(self, name: str, index: Index = ()) -> None:
        self.name, self.index = name, index


class Parameter:
    """One tensor of a module, filled from one or several stored tensors.

    parts: (stored name, rows) of each, stacked along the first dimension in order. width: the other dimensions. dtype:
    what it is held in. `Parameter.of` makes one of any parts at all.
    A module that prepares a form of its own of the values drops `tensor` and says in `held` how many bytes that is.
    """

    def __init__(
        self,
        parts: Sequence[tuple[str, int]],
        width: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        rows = [0, *accumulate(count for _, count in parts)]
        spans = zip(parts, pairwise(rows), strict=True)
        self.parts = [Part(name, (slice(start, stop),)) for (name, _), (start, stop) in spans]
        self.shape: tuple[int, ...] = (rows[-1], *width)
        self.dtype = dtype
        self.tensor: Tensor | None = None
        self.held = 0

    @classmethod
    def of(cls, parts: Sequence[Part], shape: tuple[int, ...], dtype: torch.dtype) -> "Parameter":
        """A parameter of any shape ([] too) made of these parts, which fill it without overlap."""
        made = cls([], (), dtype)
        made.parts, made.shape = list(parts), shape
        return made

    def shape_of(self, part: Part) -> tuple[int, ...]:
        """The shape that a part's stored tensor must have."""
        found = []
        for place, size in enumerate(self.shape):
            at = part.index[place] if place < len(part.index) else slice(None)
            if isinstance(at, slice):
                found.append(len(range(*at.indices(size))))
        return tuple(found)

    @property
    def name(self) -> str:
        return "+".join(part.name for part in self.parts)

    @property
    def data(self) -> Tensor:
        """The loaded tensor. OddrankError before it is loaded."""
        if self.tensor is None:
            raise OddrankError(f"{self.name} is used before it was loaded.")
        return self.tensor

    def fill(self, tensor: Tensor) -> None:
        """Take the loaded tensor."""
        self.tensor, self.held = tensor, tensor.nbytes


class Module:
    """Has parameters and modules as attributes, alone or in lists."""

    def modules(self) -> "Iterator[Module]":
        """Itself and every module in it, once, in the order of construction."""
        yield from self._walk(set())

    def parameters(self) -> Iterator[Parameter]:
        """Every parameter once; a shared one at its first owner."""
        seen: set[int] = set()
        for module in self.modules():
            for item in _items(module):
                if isinstance(item, Parameter) and id(item) not in seen:
                    seen.add(id(item))
                    yield item

    def prepare(self, threads: int) -> None:
        """Bring this module's own loaded parameters into the form it computes with, if that is another.

        threads: how many it will compute with. Called in a thread of a pool, where torch's count is not it.
        """

    def own_tensors(self) -> Collection[str]:
        """Stored tensors that are no parameter's: `load_own` takes care of them."""
        return ()

    def load_own(self, part: Any, release: Callable[[str], object] | None = None) -> int:
        """Fill what is not in parameters from a rank's slice. release: called with each name once it was read. Returns
        the bytes stored."""
        return 0

    def held(self) -> int:
        """Bytes that this module holds beside parameters."""
        return 0

    def _walk(self, seen: set[int]) -> "Iterator[Module]":
        seen.add(id(self))
        yield self
        for item in _items(self):
            if isinstance(item, Module) and id(item) not in seen:
                yield from item._walk(seen)

    def nbytes(self) -> int:
        """Bytes of everything that is loaded."""
        return sum(parameter.held for parameter in self.parameters()) + sum(m.held() for m in self.modules())


def _items(module: Module) -> Iterator[object]:
    for value in vars(module).values():
        if isinstance(value, list):
            yield from value
        else:
            yield value
