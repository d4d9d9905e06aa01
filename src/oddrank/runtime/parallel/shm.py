"""Ranks that are CPU processes of one machine, reducing through a piece of memory that all of them map.

The memory has no name: the first rank makes it with memfd_create and the others open it through that rank's
/proc entry, so whatever kills the ranks, nothing stays behind, and the size of /dev/shm does not matter.

The memory is the ranks' common steps (steps.py) and two buffers of N slots. In step k every rank copies its data
into its slot of buffer k % 2, meets the others, and reads the slots. One meeting a step is enough: a rank that
fills buffer k % 2 again has met everybody in step k + 1, and whoever came to step k + 1 has read buffer k % 2.

Sums and gathered columns are compiled operations (native/collectives.cpp), which work through the same steps and
signatures, so the interpreter may do some collectives of a group and the library others. Where there is no compiled
library the interpreter does them all: its stores and loads are ordered well enough for that on x86-64 only. On other
machines `supported()` then says no and ranks reduce through gloo.
"""

import ctypes
import mmap
import os
import pickle
import platform
import sys
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from oddrank.errors import OddrankError
from oddrank.native.calls import not_a_call
from oddrank.native.compiled import Library, library
from oddrank.native.ranks import NativeRanks, Signatures
from oddrank.runtime.parallel import steps
from oddrank.runtime.parallel.group import Columns, Group, sum_in_rank_order

_HEADER = 128  # bytes before a slot's data: the number of dimensions and their sizes
_MOST_DIMENSIONS = _HEADER // 8 - 1
SLOT = 256 * 1024  # bytes of data a slot takes; longer tensors go in several steps
_MOST_ENTRIES = 512  # shapes whose views are kept

_OPS = ("", "barrier", "broadcast", "all_gather", "all_reduce", "all_reduce in parts", "all_gather_columns")
_BARRIER, _BROADCAST, _ALL_GATHER, _ALL_REDUCE, _IN_PARTS, _COLUMNS = range(1, 7)
_DTYPES = (
    torch.bfloat16,
    torch.float16,
    torch.float32,
    torch.float64,
    torch.int8,
    torch.uint8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.bool,
)


def supported() -> bool:
    """Whether this machine's memory order and system calls allow a `SharedMemoryGroup`."""
    able = sys.platform == "linux" and sys.byteorder == "little" and hasattr(os, "memfd_create")
    return able and (platform.machine() == "x86_64" or library() is not None)


def bytes_needed(size: int, slot: int = SLOT) -> int:
    """Bytes of shared memory that `size` ranks need."""
    return steps.bytes_needed(size) + 2 * size * (_HEADER + slot)


def create(size: int, slot: int = SLOT) -> int:
    """A file descriptor of zeroed shared memory for `size` ranks, without a name."""
    fd = os.memfd_create("oddrank", os.MFD_CLOEXEC)
    os.ftruncate(fd, bytes_needed(size, slot))
    return fd


class _Entry(NamedTuple):
    """What an all-reduce of one shape and dtype needs, made at its first call."""

    nbytes: int
    code: int  # of the dtype
    signatures: Signatures
    views: tuple[list[Tensor], list[Tensor]]  # per buffer, every rank's slot as such a tensor; where Python adds


class SharedMemoryGroup(Group):
    """One CPU process of `size`, joined to the others through shared memory.

    `memory` is a descriptor of `bytes_needed(size, slot)` zeroed bytes, the same on all ranks; it may be
    closed after this returns. `pids` are the ranks' processes. `spin` allows a rank to look again for up to
    0.1 ms before it sleeps; leave it off where ranks outnumber cores. `found` is the compiled library, the same on all
    ranks; None: without it, where the memory order allows that. A rank that waits for a process that
    has died, or has left the group, raises `PeerLostError`; ranks that called different things raise
    `OddrankError`.
    """

    def __init__(
        self,
        rank: int,
        size: int,
        memory: int,
        pids: list[int],
        spin: bool,
        found: Library | None = None,
        slot: int = SLOT,
    ) -> None:
        super().__init__(rank, size)
        self.spin = spin
        self._slot = slot
        self._map = mmap.mmap(memory, bytes_needed(size, slot))
        self._words = memoryview(self._map).cast("Q")
        with torch.inference_mode(False):
            self._bytes = torch.frombuffer(self._map, dtype=torch.uint8)
        self._address = self._bytes.data_ptr()
        self._steps = steps.Steps(rank, pids, self._map, self._address, spin, _words_of)
        first = steps.bytes_needed(size)
        stride = _HEADER + slot
        self._data = tuple([first + (b * size + r) * stride + _HEADER for r in range(size)] for b in (0, 1))
        self._mine = tuple(self._address + self._data[b][rank] for b in (0, 1))
        self._entries: dict[tuple[torch.Size, torch.dtype], _Entry] = {}
        self._native: NativeRanks | None = None
        self.recordable = found is not None
        if found is not None:
            watched = self._steps.descriptors()
            self._native = NativeRanks(found, self._address, rank, first, slot, pids, watched, spin)
            self._steps.use(self._native)
        self._steps.meet(_BARRIER)

    # What the ranks do together -----------------------------------------------------------------------------

    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.counts.all_reduce += 1
        if self._native is None or not tensor.is_cpu:
            not_a_call("a sum over ranks in Python")
            return self._reduce(tensor)
        entry = self._entries.get((tensor.shape, tensor.dtype)) or self._prepare(tensor)
        flat = tensor if tensor.is_contiguous() else tensor.contiguous()
        self._native.all_reduce(flat, entry.code, entry.signatures)
        self._steps.check()
        return tensor if flat is tensor else tensor.copy_(flat)

    def all_gather_list(self, tensor: Tensor) -> list[Tensor]:
        self.counts.all_gather += 1
        not_a_call("tensors gathered from ranks in Python")
        parts, shared = self._gather(tensor)
        return [part.clone() for part in parts] if shared else parts

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        self.counts.all_gather += 1
        not_a_call("tensors gathered from ranks in Python")
        return torch.cat(self._gather(tensor)[0], dim)

    def all_gather_columns(self, tensor: Tensor, columns: Columns) -> Tensor:
        if self._native is None:
            return super().all_gather_columns(tensor, columns)
        self.counts.all_gather += 1
        code, total = self._dtype_code(tensor), len(tensor) * sum(columns.widths)
        out = self._native.gather_columns(
            tensor, columns.widths_in_memory, columns.place, columns.count, _COLUMNS | code << 4 | total << 16
        )
        self._steps.check()
        return out

    def check(self) -> None:
        """Raise what a replayed collective has met with, if anything."""
        if self._native is not None:
            self._steps.check()

    def broadcast(self, value: Any = None, source: int = 0) -> Any:
        self.counts.broadcast += 1
        not_a_call("a broadcast")
        if not 0 <= source < self.size:
            raise OddrankError(f"There is no rank {source} to broadcast from: the group has {self.size}.")
        data = pickle.dumps(value) if source == self.rank else b""
        received = bytearray()
        while True:
            buffer = (self._steps.step + 1) & 1
            at = self._data[buffer][source]
            if source == self.rank:
                chunk = data[len(received) : len(received) + self._slot]
                self._words[(at - _HEADER) // 8] = len(data)
                self._map[at : at + len(chunk)] = chunk
            self._steps.meet(_BROADCAST | source << 4)
            total = self._words[(at - _HEADER) // 8]
            received += self._map[at : at + min(self._slot, total - len(received))]
            if len(received) == total:
                return pickle.loads(received)

    def barrier(self) -> None:
        self.counts.barrier += 1
        not_a_call("a barrier")
        self._steps.meet(_BARRIER)

    def close(self) -> None:
        self._steps.close()

    # How ----------------------------------------------------------------------------------------------------

    def _reduce(self, tensor: Tensor) -> Tensor:
        entry = self._entries.get((tensor.shape, tensor.dtype)) or self._prepare(tensor)
        if entry.nbytes > self._slot or not tensor.is_contiguous() or not tensor.is_cpu:
            return self._reduce_in_steps(tensor)
        step = self._steps.step + 1
        ctypes.memmove(self._mine[step & 1], tensor.data_ptr(), entry.nbytes)
        self._steps.meet(entry.signatures.last)
        views = entry.views[step & 1]
        if self.size == 2:
            return tensor.add_(views[1 - self.rank])
        return sum_in_rank_order(views, tensor)

    def _prepare(self, tensor: Tensor) -> _Entry:
        code = self._dtype_code(tensor)
        nbytes = tensor.numel() * tensor.itemsize
        views: tuple[list[Tensor], list[Tensor]] = ([], [])
        if nbytes <= self._slot and self._native is None:
            for buffer in (0, 1):
                views[buffer].extend(self._view(at, tensor.dtype, tensor.shape) for at in self._data[buffer])
        if len(self._entries) >= _MOST_ENTRIES:
            self._entries.clear()
        last = nbytes % self._slot or min(nbytes, self._slot)
        steps_of, in_parts = _ALL_REDUCE | code << 4, _IN_PARTS | code << 4 | nbytes << 16
        entry = _Entry(nbytes, code, Signatures(steps_of | self._slot << 16, steps_of | last << 16, in_parts), views)
        self._entries[tensor.shape, tensor.dtype] = entry
        return entry

    def _reduce_in_steps(self, tensor: Tensor) -> Tensor:
        """Reduce a tensor that is longer than a slot or not contiguous, in as many steps as it takes."""
        if not tensor.is_cpu:
            raise OddrankError(f"Shared memory reduces CPU tensors; this one is on {tensor.device}.")
        flat = tensor.reshape(-1)  # a copy if the tensor is not contiguous
        per_step = self._slot // tensor.itemsize
        for start in range(0, len(flat), per_step):
            self._reduce(flat[start : start + per_step])
        return tensor if tensor.is_contiguous() else tensor.copy_(flat.view(tensor.shape))

    def _gather(self, tensor: Tensor) -> tuple[list[Tensor], bool]:
        """Every rank's tensor, and whether they are views of the slots, good until the next call but one."""
        signature = _ALL_GATHER | self._dtype_code(tensor) << 4
        if not tensor.is_cpu:
            raise OddrankError(f"Shared memory gathers CPU tensors; this one is on {tensor.device}.")
        if tensor.dim() > _MOST_DIMENSIONS:
            raise OddrankError(f"A tensor to gather has at most {_MOST_DIMENSIONS} dimensions.")
        tensor = tensor.contiguous()
        words, dtype, itemsize = self._words, tensor.dtype, tensor.itemsize
        mine = tensor.numel() * itemsize
        done = 0
        parts: list[Tensor] = []
        lengths: list[int] = []
        while True:
            buffer = (self._steps.step + 1) & 1
            header = (self._data[buffer][self.rank] - _HEADER) // 8
            words[header] = tensor.dim()
            for axis, length in enumerate(tensor.shape):
                words[header + 1 + axis] = length
            if mine > done:
                source = tensor.data_ptr() + done
                ctypes.memmove(self._mine[buffer], source, min(self._slot, mine - done))
            self._steps.meet(signature)
            if not lengths:
                shapes = [self._shape(at) for at in self._data[buffer]]
                lengths = [prod(shape) * itemsize for shape in shapes]
                if max(lengths) <= self._slot:
                    slots = zip(self._data[buffer], shapes, strict=True)
                    return [self._view(at, dtype, shape) for at, shape in slots], True
                parts = [torch.empty(shape, dtype=dtype) for shape in shapes]
            for at, part, length in zip(self._data[buffer], parts, lengths, strict=True):
                if length > done:
                    chunk = min(self._slot, length - done)
                    ctypes.memmove(part.data_ptr() + done, self._address + at, chunk)
            done += self._slot
            if done >= max(lengths):
                return parts, False

    def _shape(self, at: int) -> tuple[int, ...]:
        header = (at - _HEADER) // 8
        return tuple(self._words[header + 1 : header + 1 + self._words[header]])

    def _view(self, at: int, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        length = prod(shape) * dtype.itemsize
        return self._bytes[at : at + length].view(dtype).view(shape)

    def _dtype_code(self, tensor: Tensor) -> int:
        if tensor.dtype not in _DTYPES:
            raise OddrankError(f"Shared memory does not take {tensor.dtype}, only {', '.join(map(str, _DTYPES))}.")
        return _DTYPES.index(tensor.dtype)


def _words_of(signature: int) -> str:
    op, code, nbytes = signature & 15, signature >> 4 & 0xFFF, signature >> 16
    detail = {_BROADCAST: f" from rank {code}", _ALL_GATHER: f" of {_DTYPES[code % len(_DTYPES)]}"}.get(op, "")
    if op == _ALL_REDUCE:
        detail = f" of {nbytes} bytes of {_DTYPES[code]}"
    elif op == _IN_PARTS:
        detail = f", {nbytes} bytes of {_DTYPES[code]}"
    elif op == _COLUMNS:
        detail = f" of {nbytes} numbers of {_DTYPES[code]}"
    return _OPS[op] + detail
