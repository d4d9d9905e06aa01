"""Groups over torch.distributed, and the choice of a group."""

import contextlib
import os
from collections.abc import Callable
from datetime import timedelta
from math import prod
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from oddrank.errors import OddrankError
from oddrank.native.compiled import library
from oddrank.runtime.parallel import shm
from oddrank.runtime.parallel.group import Columns, Group, SoloGroup, sum_in_rank_order
from oddrank.runtime.parallel.peers import machine
from oddrank.runtime.parallel.rendezvous import Meeting, StoreMeeting, meet, tcp_store
from oddrank.runtime.topology.limits import affinity, quota

P = ParamSpec("P")
R = TypeVar("R")

_MOST_DIMENSIONS = 15
_CHUNK = 4 << 20  # bytes that a gloo reduction gathers from every rank at a time
_TIMEOUT = timedelta(days=365)  # an idle server's ranks wait in a broadcast for as long as nobody asks anything


def connect(rank: int, size: int, rendezvous: str, device: torch.device | str = "cpu") -> Group:
    """The group of `size` processes that meet at `rendezvous` (see rendezvous.py), as rank `rank`.

    One rank alone gets a `SoloGroup`; ranks that are all on the CPU of one machine a `SharedMemoryGroup`, where that
    machine's memory order allows it (Linux on x86-64, or anywhere with the compiled library); any others a
    `DistributedGroup`: gloo on CPUs, nccl on CUDA devices. Every rank gets the same kind.
    """
    if size < 1 or not 0 <= rank < size:
        raise OddrankError(f"There is no rank {rank} in a group of {size}.")
    device = torch.device(device)
    if size == 1:
        return SoloGroup(device)
    with meet(rank, size, rendezvous) as meeting:
        return _share_memory(meeting, device) or _distribute(meeting, device)


def _share_memory(meeting: Meeting, device: torch.device) -> Group | None:
    """A `SharedMemoryGroup`, or None on every rank if one of them cannot join it."""
    rank, size = meeting.rank, meeting.size
    able = device.type == "cpu" and shm.supported()
    fd = -1
    try:
        if able and rank == 0:
            fd = shm.create(size)
        hellos = meeting.exchange(
            {
                "able": able,
                "native": able and library() is not None,
                "machine": machine(),
                "pid": os.getpid(),
                "fd": fd,
                "cpus": sorted(affinity()),
                "quota": min(quota(), 1e9),  # JSON has no infinity
            }
        )
        joined = all(hello["able"] and hello["machine"] == hellos[0]["machine"] for hello in hellos)
        if joined and rank:
            try:
                fd = os.open(f"/proc/{hellos[0]['pid']}/fd/{hellos[0]['fd']}", os.O_RDWR | os.O_CLOEXEC)
            except OSError:  # a sandbox that keeps processes from each other
                joined = False
        if not all(meeting.exchange(joined)):
            return None
        cpus = set().union(*(hello["cpus"] for hello in hellos))
        spin = size <= min(len(cpus), *(hello["quota"] for hello in hellos))
        found = library() if all(hello["native"] for hello in hellos) else None
        return shm.SharedMemoryGroup(rank, size, fd, [hello["pid"] for hello in hellos], spin, found)
    finally:
        if fd >= 0:
            os.close(fd)


def _distribute(meeting: Meeting, device: torch.device) -> Group:
    rank, size = meeting.rank, meeting.size
    types = set(meeting.exchange(device.type))
    if len(types) > 1:
        raise OddrankError(f"The ranks of a group are on one type of device, and these are on {sorted(types)}.")
    if device.type not in ("cpu", "cuda"):
        raise OddrankError(f"Ranks run on cpu or cuda devices, not on {device.type}.")
    if isinstance(meeting, StoreMeeting):
        store = meeting.store
    else:
        own = tcp_store("127.0.0.1", 0, size, True) if rank == 0 else None
        port = meeting.exchange(own.port if own else 0)[0]
        store = own or tcp_store("127.0.0.1", port, size, False)
    group = DistributedGroup(rank, size, store, device)
    group.barrier()  # rank 0 serves the store: nobody goes on before all have used it
    group.counts.barrier = 0
    return group


def _translated(call: Callable[P, R]) -> Callable[P, R]:
    """Errors of torch.distributed (a peer that has gone, mostly) as `OddrankError`."""

    def wrapped(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return call(*args, **kwargs)
        except RuntimeError as error:
            group = args[0]
            raise OddrankError(
                f"Rank {getattr(group, 'rank', '?')} failed in {call.__name__} with its peers: "
                f"{str(error).splitlines()[0]}"
            ) from error

    return wrapped


class DistributedGroup(Group):
    """One process of torch.distributed: gloo for a CPU device, nccl for a CUDA device.

    On CPUs the terms of a sum are gathered and added in rank order, as in every other group. nccl adds in its
    own order; it still gives every rank the same bits.
    """

    __slots__ = ("_store",)

    def __init__(self, rank: int, size: int, store: Any, device: torch.device | str) -> None:
        super().__init__(rank, size, device)
        if dist.is_initialized():
            raise OddrankError(
                "This process already belongs to a torch.distributed group; oddrank needs one of its own."
            )
        self._store = store
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
            bound: torch.device | None = torch.device("cuda", torch.cuda.current_device())
            backend = "nccl"
        else:
            bound, backend = None, "gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_TIMEOUT, device_id=bound)

    @_translated
    def all_reduce(self, tensor: Tensor) -> Tensor:
        self.counts.all_reduce += 1
        if self.device.type == "cuda":
            dense = tensor.contiguous()
            dist.all_reduce(dense)
            return tensor if dense is tensor else tensor.copy_(dense)
        flat = tensor.reshape(-1)  # a copy if the tensor is not contiguous
        per_step = _CHUNK // tensor.itemsize
        for start in range(0, len(flat), per_step):
            chunk = flat[start : start + per_step]
            sum_in_rank_order(self._gather_equal(chunk), chunk)
        return tensor if tensor.is_contiguous() else tensor.copy_(flat.view(tensor.shape))

    @_translated
    def all_gather_list(self, tensor: Tensor) -> list[Tensor]:
        self.counts.all_gather += 1
        if tensor.dim() > _MOST_DIMENSIONS:
            raise OddrankError(f"A tensor to gather has at most {_MOST_DIMENSIONS} dimensions.")
        header = [tensor.dim(), *tensor.shape]
        header += [0] * (_MOST_DIMENSIONS + 1 - len(header))
        headers = self._gather_equal(torch.tensor(header, device=self.device))
        shapes = [numbers[1 : 1 + numbers[0]] for numbers in (part.tolist() for part in headers)]
        # Every rank sends as much as the longest has.
        padded = tensor.new_empty(max(prod(shape) for shape in shapes))
        padded[: tensor.numel()] = tensor.reshape(-1)
        parts = self._gather_equal(padded)
        return [part[: prod(shape)].view(shape) for part, shape in zip(parts, shapes, strict=True)]

    @_translated
    def all_gather_columns(self, tensor: Tensor, columns: Columns) -> Tensor:
        """Every rank knows the sizes: nothing is asked of the host, so a CUDA graph can hold it."""
        self.counts.all_gather += 1
        rows, widest = len(tensor), max(columns.widths)
        padded = tensor.new_zeros(rows, widest)
        padded[:, : tensor.shape[1]] = tensor
        parts = [part.view(rows, widest) for part in self._gather_equal(padded.reshape(-1))]
        cut = [part[:, :width] for part, width in zip(parts, columns.widths, strict=True)]
        return columns.arrange(torch.cat(cut, -1))

    def _gather_equal(self, flat: Tensor) -> list[Tensor]:
        parts = [torch.empty_like(flat) for _ in range(self.size)]
        if flat.numel():
            # As bytes: gloo does not know every dtype.
            dist.all_gather([part.view(torch.uint8) for part in parts], flat.contiguous().view(torch.uint8))
        return parts

    @_translated
    def broadcast(self, value: Any = None, source: int = 0) -> Any:
        self.counts.broadcast += 1
        if not 0 <= source < self.size:
            raise OddrankError(f"There is no rank {source} to broadcast from: the group has {self.size}.")
        values = [value if self.rank == source else None]
        dist.broadcast_object_list(values, source, device=self.device)
        return values[0]

    @_translated
    def barrier(self) -> None:
        self.counts.barrier += 1
        dist.barrier()

    def close(self) -> None:
        with contextlib.suppress(RuntimeError):
            if dist.is_initialized():
                dist.destroy_process_group()
