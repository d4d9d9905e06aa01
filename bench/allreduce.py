"""All-reduce between CPU ranks of this machine, in shared memory: against gloo, and against the same group without the
compiled operations. Prints JSON.

Times are medians over single calls, in microseconds, of rank 0, one thread a rank; all ways are timed in the same
processes by turns on the same tensors, fp32, which is what decoding sums. "Replayed" is the mean of 64 sums on a tape,
as recorded decode steps do them. The ceiling of the long ones is what each rank does at least: copy its own tensor in,
and write a sum of two out, in memory of its own, all ranks at a time. `waiting_cpu` is the share of a core that a rank
uses while it waits in an all-reduce for a rank that is 20 ms late.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from report import row

from oddrank.native import library
from oddrank.native.tape import Blocks, Recording
from oddrank.runtime.parallel import Group, Link, connect, run_ranks
from oddrank.runtime.parallel import dist as ours
from oddrank.runtime.parallel.dist import DistributedGroup
from oddrank.runtime.parallel.rendezvous import local_rendezvous, tcp_store

PAYLOADS = {"2 KB": 2048, "8 KB": 8192, "64 KB": 64 << 10, "1 MB": 1 << 20}
ON_TAPE = 64
TARGET_US, TARGET_RATIO = 30.0, 0.1
LATE = 0.02  # s


def times(call: Callable[[torch.Tensor], Any], tensor: torch.Tensor, calls: int) -> list[float]:
    clock = time.perf_counter_ns
    found = []
    for _ in range(calls):
        start = clock()
        call(tensor)
        found.append((clock() - start) / 1000)
    return found


def replayed(group: Group, tensor: torch.Tensor) -> Callable[[torch.Tensor], Any] | None:
    """Makes ON_TAPE sums of the tensor."""
    found = library()
    if found is None or not group.recordable:
        return None
    with Recording(found, Blocks()) as recording:
        for _ in range(ON_TAPE):
            group.all_reduce(tensor)
    assert recording.stray is None, recording.stray
    return lambda _: recording.tape.replay()


def least(tensor: torch.Tensor) -> Callable[[torch.Tensor], Any]:
    """What no way of summing two can do without."""
    other, out = torch.zeros_like(tensor), torch.empty_like(tensor)

    def work(mine: torch.Tensor) -> None:
        out.copy_(mine)
        torch.add(out, other, out=mine)

    return work


def measure(group: Group, link: Link, rounds: int) -> dict[str, Any]:
    """Runs on every rank: all ways for each payload by turns, then the cost of waiting."""
    store = tcp_store("127.0.0.1", 0, group.size, True) if group.rank == 0 else None
    port = group.broadcast(store.port if store else 0)
    gloo = DistributedGroup(group.rank, group.size, store or tcp_store("127.0.0.1", port, group.size, False), "cpu")
    where = group.broadcast(local_rendezvous() if group.rank == 0 else None)
    with mock.patch.object(ours, "library", lambda: None):
        interpreted = connect(group.rank, group.size, where)
    result: dict[str, Any] = {"ranks": group.size, "group": type(group).__name__}
    result["spins"] = bool(getattr(group, "spin", False))
    for name, nbytes in PAYLOADS.items():
        tensor = torch.zeros(nbytes // 4)
        calls = max(10, min(200, 20_000_000 // nbytes // group.size))
        ways: dict[str, tuple[Callable[[torch.Tensor], Any], int, int]] = {
            "compiled": (group.all_reduce, calls, 1),
            "interpreted": (interpreted.all_reduce, calls, 1),
            "gloo": (dist.all_reduce, max(10, calls // 4), 1),
            "least": (least(tensor), calls, 1),
        }
        tape = replayed(group, tensor)
        if tape is not None:
            ways["replayed"] = tape, max(3, calls // ON_TAPE), ON_TAPE
        found: dict[str, list[float]] = {way: [] for way in ways}
        for turn in range(rounds + 1):
            for way, (call, count, each) in ways.items():
                group.barrier()
                taken = times(call, tensor, count)
                if turn:  # the first round warms up
                    found[way] += [t / each for t in taken]
        result[name] = {way: round(statistics.median(taken), 2) for way, taken in found.items()}
    result["waiting_cpu"] = waiting(group)
    interpreted.close()
    gloo.close()
    return result


def waiting(group: Group) -> float:
    tensor = torch.zeros(512)
    cpu = wall = 0.0
    for _ in range(20):
        group.barrier()
        if group.rank == 0:
            time.sleep(LATE)
        start, start_cpu = time.perf_counter(), time.process_time()
        group.all_reduce(tensor)
        cpu += time.process_time() - start_cpu
        wall += time.perf_counter() - start
    return max(group.all_gather(torch.tensor([cpu / wall]))[1:].tolist())


def rows_of(measured: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    for name, nbytes in PAYLOADS.items():
        us, what = measured[name], f"all-reduce of {name}, {measured['ranks']} ranks"
        judged = measured["ranks"] == 2 and name == "2 KB"
        floor = ("copying it in and a sum out", us["least"]) if nbytes >= 64 << 10 else (None, None)
        share = us["least"] / us["compiled"] if floor[0] else None
        found.append(row(what, us["compiled"], "us", us["compiled"] <= TARGET_US if judged else None,
                         f"<= {TARGET_US:.0f} us" if judged else None, *floor, share))  # fmt: skip
        if "replayed" in us:
            share = us["least"] / us["replayed"] if floor[0] else None
            found.append(row(f"{what}, replayed", us["replayed"], "us", None, None, *floor, share))
        found.append(row(f"{what}, against the interpreter's", us["compiled"] / us["interpreted"], "x", None))
        ratio = us["compiled"] / us["gloo"]
        found.append(row(f"{what}, against gloo", ratio, "x", ratio <= TARGET_RATIO if judged else None,
                         f"<= {TARGET_RATIO} x" if judged else None))  # fmt: skip
    found.append(row(f"core used while waiting, {measured['ranks']} ranks", measured["waiting_cpu"], "cores", None))
    return found


def main() -> int:
    import allreduce  # the ranks import their target by this name

    load = round(os.getloadavg()[0], 2)  # what else ran before: it shows in every time
    two = run_ranks(2, allreduce.measure, 10, threads=1)[0]
    four = run_ranks(4, allreduce.measure, 3, threads=1)[0]
    rows = rows_of(two) + rows_of(four)
    print(json.dumps({"load": load, "two_ranks": two, "four_ranks": four, "rows": rows}, indent=2))
    return 0 if all(r["passed"] is not False for r in rows) else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
