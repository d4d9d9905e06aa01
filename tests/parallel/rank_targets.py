"""What the rank processes of the tests run: a launched process imports its target from a module."""

import os
import signal
import time
from typing import Any

import torch

from oddrank import CheckFailedError, OddrankError
from oddrank.runtime.parallel import Group, Link, connect
from oddrank.runtime.parallel.dist import DistributedGroup
from oddrank.runtime.parallel.rendezvous import StoreMeeting, meet

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# One element, odd, more than one slot of shared memory and not a multiple of it (in fp64 and in bf16).
SIZES = (1, 1024, 1001, 33_000, 150_001)


def terms(ranks: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """[ranks, elements]: what each rank adds. Of very different sizes, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(elements)
    values = torch.randn(ranks, elements, generator=generator, dtype=torch.float64)
    return (values * 2.0 ** torch.randint(-6, 7, values.shape, generator=generator)).to(dtype)


def reductions(group: Group, link: Link) -> tuple[str, list[torch.Tensor], Any]:
    """Every dtype and size, a few times in a row so that both buffers of a shared memory are used again."""
    results = []
    for dtype in DTYPES:
        for elements in SIZES:
            for repeat in range(3):
                mine = terms(group.size, elements, dtype)[group.rank] * 2**repeat
                assert group.all_reduce(mine) is mine
                results.append(mine)
    wide = terms(group.size, 24, torch.float32)[group.rank].view(4, 6)
    assert group.all_reduce(wide.T) is not None  # not contiguous: reduced in place all the same
    results.append(wide)
    return type(group).__name__, results, (group.counts.all_reduce, group.counts.total)


def part(rank: int, dtype: torch.dtype, rows: int, width: int) -> torch.Tensor:
    return torch.arange(rows * width).reshape(rows, width).add(100 * rank).to(dtype)


def gathers(group: Group, link: Link, widths: list[list[int]]) -> list[Any]:
    results: list[Any] = []
    for dtype in (torch.bfloat16, torch.float32, torch.int64):
        for each in widths:
            mine = part(group.rank, dtype, 3, each[group.rank])
            results.append(group.all_gather(mine))
            results.append(group.all_gather(mine.T, dim=0))
            results.append(group.all_gather_list(mine.flatten()))
    group.barrier()
    big = {"from": group.rank, "data": b"x" * 700_000}
    for source in range(group.size):
        got = group.broadcast(big if group.rank == source else None, source)
        results.append((got["from"], len(got["data"])))
    results.append(group.all_gather_list(torch.tensor(float(group.rank))))
    return results


def fallback(group: Group, link: Link) -> tuple[str, list[torch.Tensor], Any]:
    """The same over gloo, which the choice of a group would not take here."""
    return reductions(_gloo(group), link)


def fallback_gathers(group: Group, link: Link, widths: list[list[int]]) -> list[Any]:
    return gathers(_gloo(group), link, widths)


def _gloo(group: Group) -> Group:
    """A gloo group of the same ranks, who meet over TCP as ranks of several machines would."""
    import socket

    probe = socket.socket()
    probe.bind(("127.0.0.1", 0))
    port = group.broadcast(probe.getsockname()[1])
    probe.close()
    meeting = meet(group.rank, group.size, f"tcp://127.0.0.1:{port}")
    assert isinstance(meeting, StoreMeeting)
    assert meeting.exchange([group.rank]) == [[rank] for rank in range(group.size)]
    return DistributedGroup(group.rank, group.size, meeting.store, "cpu")


def over_tcp(group: Group, link: Link) -> str:
    import socket

    probe = socket.socket()
    probe.bind(("127.0.0.1", 0))
    port = group.broadcast(probe.getsockname()[1])
    probe.close()
    other = connect(group.rank, group.size, f"tcp://127.0.0.1:{port}")
    assert other.all_reduce(torch.ones(3)).tolist() == [float(group.size)] * 3
    other.close()
    return type(other).__name__


def disagree(group: Group, link: Link, what: str) -> str:
    group.barrier()
    try:
        if group.rank == 0:
            group.all_reduce(torch.zeros(8))
        elif what == "shape":
            group.all_reduce(torch.zeros(9))
        elif what == "dtype":
            group.all_reduce(torch.zeros(8, dtype=torch.int32))
        elif what == "kind":
            group.all_gather(torch.zeros(8))
    except OddrankError as error:
        return str(error)
    return "no error"


def fail(group: Group, link: Link, rank: int, how: str) -> None:
    group.barrier()
    if group.rank == rank:
        if how == "raise":
            raise ZeroDivisionError("by hand")
        if how == "refuse":
            raise OddrankError("The file is corrupt.")
        if how == "check":
            raise CheckFailedError("The logits differ.")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if how == "exit":
            os._exit(3)
    if how == "idle":
        time.sleep(60)
    group.all_reduce(torch.zeros(8))


def lose(group: Group, link: Link, rank: int) -> tuple[str, float] | None:
    """What the others see when `rank` is gone for good, without a launcher to end them."""
    group.barrier()
    if group.rank == rank:
        # The process lives on to give its result; a fork of it takes its place in the group and dies.
        return None
    start = time.monotonic()
    try:
        group.all_reduce(torch.zeros(8))
    except OddrankError as error:
        return str(error), time.monotonic() - start
    return "no error", 0.0


def echo(group: Group, link: Link) -> int:
    count = 0
    while True:
        message = link.receive()
        if message == "stop":
            return count
        count += 1
        link.send((group.rank, message))


def shape_of_process(group: Group, link: Link) -> tuple[int, str | None, int]:
    return torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS"), int(group.all_reduce(torch.ones(1)))


def wait_forever(group: Group, link: Link) -> None:
    link.send(os.getpid())
    time.sleep(600)
