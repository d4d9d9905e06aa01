"""What a model is made of: modules that hold parameters, and parameters that know their stored tensors.

A module is built from a rank's sizes alone, without memory. The loader then walks `parameters()`, gives each
its tensor and copies the stored tensors into it.
"""

from collections.abc import Callable, Iterator, Sequence

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
    take: called once with the filled tensor; what it returns is kept as `tensor` (None: the taker holds the
        values in a form of its own, and `held` says how many bytes that is).
    """

    def __init__(
        self,
        parts: Sequence[tuple[str, int]],
        width: tuple[int, ...],
        dtype: torch.dtype,
        take: Callable[[Tensor], Tensor | None] | None = None,
    ) -> None:
        self.parts: list[Part] = []
        rows = 0
        for name, count in parts:
            self.parts.append(Part(name, rows, rows + count))
            rows += count
        self.shape = (rows, *width)
        self.dtype = dtype
        self.take = take
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

    def finish(self, tensor: Tensor) -> None:
        """Keep the filled tensor, or hand it to the taker."""
        kept = tensor if self.take is None else self.take(tensor)
        self.tensor = kept
        if kept is not None:
            self.held = kept.nbytes


class Module:
    """Has parameters and modules as attributes, alone or in lists."""

    def parameters(self) -> Iterator[Parameter]:
        """Every parameter once, in the order of construction; a shared one at its first owner."""
        yield from self._walk(set())

    def _walk(self, seen: set[int]) -> Iterator[Parameter]:
        for value in vars(self).values():
            for item in value if isinstance(value, list) else (value,):
                if id(item) in seen:
                    continue
                if isinstance(item, Parameter):
                    seen.add(id(item))
                    yield item
                elif isinstance(item, Module):
                    seen.add(id(item))
                    yield from item._walk(seen)

    def nbytes(self) -> int:
        """Bytes that the loaded parameters hold."""
        return sum(parameter.held for parameter in self.parameters())
