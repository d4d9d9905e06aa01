"""What a rank may do with the other ranks."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from oddrank.errors import OddrankError

_HALF = (torch.bfloat16, torch.float16)


class PeerLostError(OddrankError):
    """Another rank is gone, so this one cannot go on: a consequence, the cause is on the other rank."""


class Collectives:
    """How many collectives a rank has called, by kind. Tests count one `all_reduce` a block."""

    __slots__ = ("all_gather", "all_reduce", "barrier", "broadcast")

    def __init__(self) -> None:
        self.all_reduce = 0
        self.all_gather = 0
        self.broadcast = 0
        self.barrier = 0

    @property
    def total(self) -> int:
        return self.all_reduce + self.all_gather + self.broadcast + self.barrier

    def __repr__(self) -> str:
        return "Collectives(" + ", ".join(f"{name}={getattr(self, name)}" for name in self.__slots__) + ")"


class Group(ABC):
    """One rank's end of a set of ranks that call the same collectives in the same order.

    `rank` is in [0, `size`); `device` is where this rank's tensors live; `counts` is what it has called.
    A collective that ranks call with different kinds, dtypes or shapes raises `OddrankError`, as does one
    that waits for a rank that is gone.
    """

    __slots__ = ("counts", "device", "rank", "size")

    def __init__(self, rank: int, size: int, device: torch.device | str = "cpu") -> None:
        self.rank = rank
        self.size = size
        self.device = torch.device(device)
        self.counts = Collectives()

    @abstractmethod
    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum `tensor` over the ranks, in place, and return it.

        Shape and dtype are the same on every rank. The ranks' terms are added in rank order, bf16 and fp16
        accumulated in fp32 and rounded once, so every rank gets the same bits and so does every kind of group
        (nccl alone keeps its own order).
        """

    @abstractmethod
    def all_gather_list(self, tensor: Tensor) -> list[Tensor]:
        """Every rank's tensor, in rank order. Same dtype everywhere; any shapes, empty ones too."""

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        """Every rank's tensor concatenated along `dim` in rank order.

        Sizes along `dim` may differ, and may be 0; the other sizes may not.
        """
        return torch.cat(self.all_gather_list(tensor), dim)

    @abstractmethod
    def broadcast(self, value: Any = None, source: int = 0) -> Any:
        """`value` of rank `source`, pickled, on every rank. What the other ranks pass is ignored."""

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has called it."""

    def close(self) -> None:  # noqa: B027 (most groups hold nothing)
        """Leave the group: ranks that still wait for this one get an error. Safe to call twice."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size}, device={str(self.device)!r})"


class SoloGroup(Group):
    """One rank alone: every collective is its own input."""

    __slots__ = ()

    def __init__(self, device: torch.device | str = "cpu") -> None:
        super().__init__(0, 1, device)

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.counts.all_reduce += 1
        return tensor

    def all_gather_list(self, tensor: Tensor) -> list[Tensor]:
        self.counts.all_gather += 1
        return [tensor]

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        self.counts.all_gather += 1
        return tensor

    def broadcast(self, value: Any = None, source: int = 0) -> Any:
        self.counts.broadcast += 1
        return value

    def barrier(self) -> None:
        self.counts.barrier += 1


def sum_in_rank_order(parts: Sequence[Tensor], out: Tensor) -> Tensor:
    """The sum of two or more equally shaped `parts` into `out`, which must not overlap `parts[2:]`.

    The order and the roundings are part of every group's contract, so all of them use this one.
    """
    if len(parts) > 2 and out.dtype in _HALF:
        total = parts[0].float()
        for part in parts[1:]:
            total += part
        return out.copy_(total)
    # Two half-precision terms need no wider accumulator: one addition, rounded once, is the same number.
    torch.add(parts[0], parts[1], out=out)
    for part in parts[2:]:
        out += part
    return out
