"""All-reduce between CPU ranks of this machine: shared memory against gloo, in one run. Prints JSON.

Times are medians over single calls, in microseconds, of rank 0. Both are timed in the same processes by turns,
on the same tensors (bf16, one thread a rank). `waiting_cpu` is the share of a core that a rank uses while it waits in
an all-reduce for a rank that is 20 ms late.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from oddrank.runtime.parallel import Group, Link, run_ranks
from oddrank.runtime.parallel.dist import DistributedGroup
from oddrank.runtime.parallel.rendezvous import tcp_store
from oddrank.runtime.topology.limits import cores_available

PAYLOADS = {"2KB": 2048, "64KB": 64 * 1024, "1MB": 1024 * 1024}  # bytes
TARGET_US = 30.0
TARGET_RATIO = 0.1
LATE = 0.02  # s


def _times(call: Callable[[torch.Tensor], Any], tensor: torch.Tensor, calls: int) -> list[float]:
    clock = time.perf_counter_ns
    times = []
    for _ in range(calls):
        start = clock()
        call(tensor)
        times.append((clock() - start) / 1000)
    return times


def measure(group: Group, link: Link, rounds: int) -> dict[str, Any]:
    """Runs on every rank: both ways of each payload by turns, then the cost of waiting."""
    port = 0
    store = None
    if group.rank == 0:
        store = tcp_store("127.0.0.1", 0, group.size, True)
        port = store.port
    port = group.broadcast(port)
    store = store or tcp_store("127.0.0.1", port, group.size, False)
    gloo = DistributedGroup(group.rank, group.size, store, "cpu")
    result: dict[str, Any] = {"ranks": group.size, "group": type(group).__name__}
    result["spins"] = bool(getattr(group, "spin", False))
    for name, nbytes in PAYLOADS.items():
        tensor = torch.zeros(nbytes // 2, dtype=torch.bfloat16)
        calls = max(10, min(200, 20_000_000 // nbytes // group.size))
        ours: list[float] = []
        theirs: list[float] = []
        for turn in range(rounds + 1):
            group.barrier()
            mine = _times(group.all_reduce, tensor, calls)
            dist.barrier()
            other = _times(dist.all_reduce, tensor, max(10, calls // 4))
            if turn:  # the first round warms up
                ours += mine
                theirs += other
        a, b = statistics.median(ours), statistics.median(theirs)
        result[name] = {"oddrank_us": round(a, 1), "gloo_us": round(b, 1), "ratio": round(a / b, 4)}
    result["waiting_cpu"] = _waiting(group)
    gloo.close()
    return result


def _waiting(group: Group) -> float:
    tensor = torch.zeros(1024, dtype=torch.bfloat16)
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


def main() -> int:
    import allreduce  # the ranks import their target by this name

    load = round(os.getloadavg()[0], 2)  # what else ran before: it shows in every time
    two = run_ranks(2, allreduce.measure, 10, threads=1)[0]
    four = run_ranks(4, allreduce.measure, 3, threads=1)[0]
    small = two["2KB"]
    passed = small["oddrank_us"] <= TARGET_US and small["ratio"] <= TARGET_RATIO
    report = {
        "cores": cores_available(),
        "load": load,
        "two_ranks": two,
        "four_ranks": four,
        "target": {"2KB_us": TARGET_US, "2KB_ratio": TARGET_RATIO, "passed": passed},
    }
    print(json.dumps(report, indent=2))
    return 0 if passed else 1


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
