"""What rank processes of the pinning tests run."""

import os
from typing import Any

import torch

from oddrank.runtime.parallel import Group, Link
from oddrank.runtime.topology import own_cores


def report(group: Group, link: Link) -> dict[str, Any]:
    """The affinity of every thread of this process, once torch has started its own."""
    torch.ones(512, 512) @ torch.ones(512, 512)
    threads = [int(name) for name in os.listdir("/proc/self/task")]
    return {
        "threads": torch.get_num_threads(),
        "affinities": [list(a) for a in sorted({tuple(sorted(os.sched_getaffinity(t))) for t in threads})],
        "own": sorted(own_cores(torch.get_num_threads())),
    }


def nothing(group: Group, link: Link) -> None:
    group.barrier()
