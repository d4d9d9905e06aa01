"""What the rank processes of the tests run: a launched process imports its target from a module."""

import functools
import os
import signal
import socket
import time
from typing import Any

import torch

from oddrank import CheckFailedError, OddrankError
from oddrank.runtime.parallel import Group, Link, connect, shm
from oddrank.runtime.parallel.rendezvous import local_rendezvous

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
# One element, nothing odd about 1024, odd, and more than one slot of shared memory without filling the last.
SIZES = (1, 1024, 1001, 140_001)
WIDTHS = ([1, 2, 3, 4], [0, 70_001, 5, 1])  # columns of every rank's part; the second takes several slots


@functools.cache
def terms(ranks: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """[ranks, elements]: what each rank adds. Of very different sizes, so that the order of a sum shows."""
    generator = torch.Generator().manual_seed(elements)
    values = torch.randn(ranks, elements, generator=generator, dtype=torch.float64)
    return (values * 2.0 ** torch.randint(-6, 7, values.shape, generator=generator)).to(dtype)


def part(rank: int, dtype: torch.dtype, width: int) -> torch.Tensor:
    """[3, width]: what a rank gives to a gather."""
    return torch.arange(3 * width).remainder(97).reshape(3, width).add(100 * rank).to(dtype)


def reductions(group: Group) -> dict[Any, torch.Tensor]:
    """Every dtype and size, twice in a row, so that both buffers of a shared memory are used, and used again."""
    results: dict[Any, torch.Tensor] = {}
    for dtype in DTYPES:
        for elements in SIZES:
            for repeat in range(2):
                mine = terms(group.size, elements, dtype)[group.rank] * 2**repeat
                assert group.all_reduce(mine) is mine
                results[dtype, elements, repeat] = mine
    wide = terms(group.size, 24, torch.float32)[group.rank].reshape(4, 6).clone()
    transposed = wide.T
    assert group.all_reduce(transposed) is transposed  # not contiguous, and reduced in place all the same
    results["not contiguous"] = wide
    return results


def gathers(group: Group) -> list[Any]:
    results: list[Any] = []
    for dtype in (torch.bfloat16, torch.float32, torch.int64):
        for widths in WIDTHS:
            mine = part(group.rank, dtype, widths[group.rank])
            results.append(group.all_gather(mine))
            results.append(group.all_gather(mine.T, dim=0))
            results.append(group.all_gather_list(mine.flatten()))
    results.append(group.all_gather_list(torch.tensor(float(group.rank))))
    for source in range(group.size):
        value = {"from": group.rank, "data": bytes(700_000)} if group.rank == source else None
        got = group.broadcast(value, source)
        results.append((got["from"], len(got["data"])))
    return results


def soak(group: Group, calls: int) -> int:
    """How many of many small reductions in a row, the ranks out of step in turn, come out wrong."""
    wrong = 0
    base = torch.arange(64.0)
    for call in range(calls):
        if call % group.size == group.rank and call % 7 == 0:
            time.sleep(0.0002)
        found = group.all_reduce(base + call * (group.rank + 1))
        wrong += not torch.equal(found, base * group.size + call * group.size * (group.size + 1) / 2)
    return wrong


def everything(group: Group, link: Link, with_gloo: bool) -> dict[str, Any]:
    """The collectives in the group that the launcher chose, and perhaps in a gloo group of the same ranks."""
    shared = {"kind": type(group).__name__, "reductions": reductions(group)}
    shared["counts"] = (group.counts.all_reduce, group.counts.total)
    shared["gathers"] = gathers(group)
    shared["wrong"] = soak(group, 2000)
    if not with_gloo:
        return shared
    shared["over tcp"] = type(connect(group.rank, group.size, _free_address(group))).__name__
    shm.supported = lambda: False  # as on a machine with a weaker memory order
    gloo = connect(group.rank, group.size, group.broadcast(local_rendezvous()))
    shared["fallback"] = type(gloo).__name__
    shared["gloo reductions"] = reductions(gloo)
    shared["gloo gathers"] = gathers(gloo)
    gloo.close()
    return shared


def _free_address(group: Group) -> str:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(group.broadcast(f"tcp://127.0.0.1:{probe.getsockname()[1]}"))


def disagreements(group: Group, link: Link) -> list[str]:
    """What each rank is told where rank 1 does something else than the others."""
    odd = [
        lambda g: g.all_reduce(torch.zeros(9)),
        lambda g: g.all_reduce(torch.zeros(8, dtype=torch.int32)),
        lambda g: g.all_gather(torch.zeros(8)),
        lambda g: g.barrier(),
        lambda g: g.close(),
    ]
    said = []
    for number, call in enumerate(odd):
        name = group.broadcast(f"local:oddrank-test-{os.getpid()}-{number}")
        other = connect(group.rank, group.size, name)
        try:
            call(other) if group.rank == 1 else other.all_reduce(torch.zeros(8))
            said.append("no error")
        except OddrankError as error:
            said.append(str(error))
        group.barrier()
    return said


def fail(group: Group, link: Link, how: str) -> None:
    """Rank 1 fails in the given way; rank 0 waits for it in a collective; rank 2, if any, is busy elsewhere."""
    group.barrier()
    if group.rank == 1:
        if how == "raise":
            raise ZeroDivisionError("by hand")
        if how == "check":
            raise CheckFailedError("The logits differ.")
        if how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
    if group.rank == 2:
        time.sleep(60)
    group.all_reduce(torch.zeros(8))


def lockstep(rendezvous: str, rank: int) -> None:
    """A rank without a launcher: says that it is there, then reduces until it learns that its peer is gone."""
    group = connect(rank, 2, rendezvous)
    print("ready", flush=True)
    while rank == 0:
        try:
            group.all_reduce(torch.zeros(8))
        except OddrankError as error:
            print(time.monotonic(), error, flush=True)
            return
    group.all_reduce(torch.zeros(8))
    time.sleep(60)


def echo(group: Group, link: Link) -> tuple[int, int, str | None]:
    while (message := link.receive(timeout=30)) != "stop":
        link.send(torch.full((2,), float(message)))
    return group.rank, torch.get_num_threads(), os.environ.get("OMP_NUM_THREADS")


def wait_forever(group: Group, link: Link) -> None:
    link.send(os.getpid())
    time.sleep(60)
