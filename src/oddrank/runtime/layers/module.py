"""What a model is made of: modules that hold parameters, and parameters that know their stored tensors.

A module is built from a rank's sizes alone, without memory. The loader then walks `parameters()`, gives each
its tensor and copies the stored tensors into it.
"""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from oddrank.errors import OddrankError


class Part:
    """Rows [start, stop) of a parameter's first dimension: one stored tensor, whole."""

    __slots__ = ("name", "start", "stop")

    def __init__(self, name: str, start: int, stop: int) -> None:
        self.name, self.start, self.stop = name, start, stop


class Parameter:
    """One tensor of a module, filled from one or several stored tensors stacked along its first dimension.

    parts: (stored name, rows), in order. width: the other dimensions. dtype: what it is held in.
    A module that prepares a form of its own of the values drops `tensor` and says in `held` how many bytes that is.
    """

    def __init__(
        self,
        parts: Sequence[tuple[str, int]],
        width: tuple[int, ...],
        dtype: torch.dtype,
    ) -> None:
        self.parts: list[Part] = []
        rows = 0
        for name, count in parts:
            self.parts.append(Part(name, rows, rows + count))
            rows += count
        self.shape = (rows, *width)
        self.dtype = dtype
        self.tensor: Tensor | None = None
        self.held = 0

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

    def _walk(self, seen: set[int]) -> "Iterator[Module]":
        seen.add(id(self))
        yield self
        for item in _items(self):
            if isinstance(item, Module) and id(item) not in seen:
                yield from item._walk(seen)

    def nbytes(self) -> int:
        """Bytes that the loaded parameters hold."""
        return sum(parameter.held for parameter in self.parameters())


def _items(module: Module) -> Iterator[object]:
    for value in vars(module).values():
        if isinstance(value, list):
            yield from value
        else:
            yield value
