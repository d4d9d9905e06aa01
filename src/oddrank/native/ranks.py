"""What ranks do together in the memory that they share, as compiled operations."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from oddrank.native.calls import call
from oddrank.native.compiled import Library

_IN_PARTS = 1 << 15
"""Bytes from which on three or more ranks each sum a part and read the others': one meeting more, fewer bytes."""


class RankState(ctypes.Structure):
    """ranks.h's Ranks."""

    _fields_ = (
        ("memory", ctypes.c_void_p),
        ("rank", ctypes.c_int64),
        ("size", ctypes.c_int64),
        ("slots", ctypes.c_int64),
        ("slot_bytes", ctypes.c_int64),
        ("descriptors", ctypes.c_void_p),
        ("pids", ctypes.c_void_p),
        ("step", ctypes.c_uint64),
        ("spin", ctypes.c_int64),
        ("failure", ctypes.c_int64),
        ("other", ctypes.c_int64),
        ("mine", ctypes.c_uint64),
        ("theirs", ctypes.c_uint64),
    )


LEFT, DIED, DISAGREES, CLOSED = range(1, 5)
"""`RankState.failure`: the other rank left, died, or called something else; or this one had left."""


class Signatures(NamedTuple):
    """What ranks tell each other of an all-reduce, so that all do the same. steps: of every step but the last, which
    may be shorter. parts: of one in parts."""

    steps: int
    last: int
    parts: int


class _AllReduce(ctypes.Structure):
    _fields_ = (
        ("ranks", ctypes.c_void_p),
        ("data", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
        ("signature", ctypes.c_uint64),
        ("last_signature", ctypes.c_uint64),
        ("in_parts", ctypes.c_int64),
    )


class _GatherColumns(ctypes.Structure):
    _fields_ = (
        ("ranks", ctypes.c_void_p),
        ("x", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("widths", ctypes.c_void_p),
        ("place", ctypes.c_void_p),
        ("rows", ctypes.c_int64),
        ("columns", ctypes.c_int64),
        ("item_bytes", ctypes.c_int64),
        ("signature", ctypes.c_uint64),
    )


class NativeRanks:
    """One rank's end of the shared memory at `memory`, of which the slots begin at `slots`; pids and descriptors
    (pidfd, or -1) of every rank's process. After an operation `state.failure` tells whether it did its work."""

    def __init__(
        self,
        library: Library,
        memory: int,
        rank: int,
        slots: int,
        slot_bytes: int,
        pids: Sequence[int],
        descriptors: Sequence[int],
        spin: bool,
    ) -> None:
        size = len(pids)
        self.library = library
        self._processes = (ctypes.c_int32 * size)(*descriptors), (ctypes.c_int32 * size)(*pids)
        self.state = RankState(
            memory, rank, size, slots, slot_bytes, *(ctypes.addressof(each) for each in self._processes), 0, spin
        )
        self._address = ctypes.addressof(self.state)
        self._meet = library.function("meet", ctypes.c_int32, ctypes.c_void_p, ctypes.c_uint64)
        self._all_reduce, self._gather = library.operation("all_reduce"), library.operation("gather_columns")

    def meet(self, signature: int) -> None:
        """Steps.meet."""
        self._meet(self._address, signature)

    def in_parts(self, nbytes: int) -> bool:
        return self.state.size > 2 and nbytes >= _IN_PARTS

    def all_reduce(self, tensor: Tensor, dtype: int, signatures: Signatures) -> None:
        """Sum a contiguous tensor over the ranks, in place. dtype: position in shm.py's list."""
        parts = self.in_parts(tensor.numel() * tensor.itemsize)
        first = signatures.parts if parts else signatures.steps
        arguments = _AllReduce(self._address, tensor.data_ptr(), tensor.numel(), dtype, first, signatures.last, parts)
        call(self._all_reduce, arguments, tensor, self)

    def gather_columns(
        self, x: Tensor, widths: "ctypes.Array[ctypes.c_int64]", place: Tensor | None, columns: int, signature: int
    ) -> Tensor:
        return _gather_columns(self._gather, self._address, self, x, widths, place, columns, signature)


def place_columns(library: Library, x: Tensor, place: Tensor | None, columns: int) -> Tensor:
    """x [rows, width] -> [rows, columns]: column i goes to place[i] (int64, -1: nowhere), or stays where place is None.
    Every column of the result must be some column's place."""
    widths = (ctypes.c_int64 * 1)(x.shape[-1])
    return _gather_columns(library.operation("gather_columns"), None, None, x, widths, place, columns, 0)


def _gather_columns(
    function: object,
    ranks: int | None,
    owner: NativeRanks | None,
    x: Tensor,
    widths: "ctypes.Array[ctypes.c_int64]",
    place: Tensor | None,
    columns: int,
    signature: int,
) -> Tensor:
    x = x.contiguous()
    out = torch.empty(len(x), columns, dtype=x.dtype)
    arguments = _GatherColumns(
        ranks,
        x.data_ptr(),
        out.data_ptr(),
        ctypes.addressof(widths),
        None if place is None else place.data_ptr(),
        len(x),
        columns,
        x.itemsize,
        signature,
    )
    call(function, arguments, x, out, widths, place, owner)
    return out
