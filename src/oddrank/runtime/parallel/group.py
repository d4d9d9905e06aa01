"""What a rank may do with the other ranks."""

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from oddrank.errors import OddrankError
from oddrank.native.compiled import library
from oddrank.native.ranks import place_columns

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


class Columns:
    """How columns that ranks have become one matrix's.

    widths: columns of each rank. place: int64 [sum of widths], the column of the result that each gathered one is, -1
    for none; None: the first `count`, in order. Every column of the result is the place of one gathered column.
    """

    def __init__(self, widths: Sequence[int], count: int, place: Tensor | None = None) -> None:
        self.widths, self.count, self.place = tuple(widths), count, place
        self.widths_in_memory = (ctypes.c_int64 * len(self.widths))(*self.widths)
        self._order: Tensor | None = None
        if place is not None:
            real = (place >= 0).nonzero().flatten()
            self._order = torch.empty(count, dtype=torch.int64, device=place.device)
            self._order[place[real]] = real

    def arrange(self, gathered: Tensor) -> Tensor:
        """[rows, sum of widths] -> [rows, count]."""
        if self._order is not None:
            return gathered.index_select(-1, self._order)
        return gathered if gathered.shape[-1] == self.count else gathered[..., : self.count]


class Group(ABC):
    """One rank's end of a set of ranks that call the same collectives in the same order.

    `rank` is in [0, `size`); `device` is where this rank's tensors live; `counts` is what it has called.
    A collective that ranks call with different kinds, dtypes or shapes raises `OddrankError`, as does one
    that waits for a rank that is gone.
    """

    __slots__ = ("counts", "device", "rank", "size")

    recordable: bool = False
    """Whether its sums and gathered columns are compiled operations."""

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

    def all_gather_columns(self, tensor: Tensor, columns: Columns) -> Tensor:
        """Every rank's tensor [rows, columns.widths[rank]] as one [rows, columns.count], each column in its place."""
        return columns.arrange(self.all_gather(tensor, -1))

    @abstractmethod
    def broadcast(self, value: Any = None, source: int = 0) -> Any:
        """`value` of rank `source`, pickled, on every rank. What the other ranks pass is ignored."""

    @abstractmethod
    def barrier(self) -> None:
        """Return once every rank has called it."""

    def check(self) -> None:  # noqa: B027 (most groups have no collectives that a replay could hold)
        """Raise what went wrong in a replayed collective, if anything did."""

    def close(self) -> None:  # noqa: B027 (most groups hold nothing)
        """Leave the group: ranks that still wait for this one get an error. Safe to call twice."""

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rank={self.rank}, size={self.size}, device={str(self.device)!r})"


class SoloGroup(Group):
    """One rank alone: every collective is its own input."""

    __slots__ = ()
    recordable = True

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

    def all_gather_columns(self, tensor: Tensor, columns: Columns) -> Tensor:
        self.counts.all_gather += 1
        found = library() if tensor.is_cpu and columns.place is not None else None
        return columns.arrange(tensor) if found is None else place_columns(found, tensor, columns.place, columns.count)

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
