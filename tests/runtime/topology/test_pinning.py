"""Pinning, as the kernel reports it afterwards."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from runtime.topology import pinned_targets

from oddrank.runtime.parallel import Ranks
from oddrank.runtime.topology import PinnedPool, cores_of, own_cores
from oddrank.runtime.topology.limits import cpu_list, quota

pytestmark = pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system pins no threads")

ALLOWED = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else [0]


def test_threads_of_a_pool_are_pinned_one_to_a_cpu() -> None:
    cpus, ready = [ALLOWED[0], ALLOWED[-1]], []
    gate = threading.Barrier(2)

    def where(_: int) -> frozenset[int]:
        gate.wait(timeout=30)  # so that both threads are there
        return frozenset(os.sched_getaffinity(0))

    with PinnedPool(cpus, lambda: ready.append(threading.get_ident())) as pool:
        assert sorted(map(sorted, pool.map(where, range(2)))) == sorted([[c] for c in cpus])
    assert len(set(ready)) == 2
    assert sorted(os.sched_getaffinity(0)) == ALLOWED  # this thread goes where it went


def test_ranks_stay_in_their_slices_with_all_their_threads() -> None:
    with Ranks(2, pinned_targets.report) as ranks:
        placed, reports = ranks.placements, ranks.join()
    for p, said in zip(placed, reports, strict=True):
        assert said["threads"] == len(p.threads)
        assert said["affinities"] == [sorted(p.cpus)]  # of every thread of the process
        assert said["own"] == sorted(p.threads)
    if len(ALLOWED) > 1 and all(p.shares == 1 for p in placed):
        assert not set(placed[0].cpus) & set(placed[1].cpus)


def test_every_rank_logs_where_it_computes() -> None:
    code = (
        "from oddrank.runtime.parallel import run_ranks\n"
        "from runtime.topology import pinned_targets\n"
        "run_ranks(3, pinned_targets.nothing)\n"
    )
    tests = Path(__file__).parents[2]
    where = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tests), os.environ.get("PYTHONPATH", "")])}
    where.pop("ODDRANK_LOG", None)

    def said(**more: str) -> str:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env={**where, **more})
        assert done.returncode == 0, done.stderr
        assert not done.stdout
        return done.stderr

    lines = said().splitlines()
    for rank in range(3):
        mine = [line for line in lines if line.startswith(f"rank {rank} of 3: ")]
        assert len(mine) == 1
        assert "on CPUs" in mine[0] and "(node " in mine[0]
    # more ranks than logical CPUs: some share one, and say so
    assert len(ALLOWED) > 2 or any("more ranks than cores" in line for line in lines)
    assert said(ODDRANK_LOG="warning") == ""


def test_cores_of_this_process() -> None:
    assert set(own_cores()) <= set(ALLOWED)
    assert own_cores(1) == own_cores()[:1]
    every = [set(cores_of(rank, 2, 1)) for rank in range(2)]
    assert all(len(mine) == 1 for mine in every)
    assert len(ALLOWED) == 1 or not every[0] & every[1]


def test_lists_and_quotas_as_the_kernel_writes_them(tmp_path: Path) -> None:
    assert cpu_list("0-3,8,10-11\n") == {0, 1, 2, 3, 8, 10, 11}
    assert cpu_list("\n") == cpu_list("none") == frozenset()
    assert cpu_list("0 2\n") == frozenset()
    assert cpu_list("0,\n5") == {0, 5}
    group = tmp_path / "fs/cgroup"
    group.mkdir(parents=True)
    for text, cores in (("max 100000", float("inf")), ("250000 100000", 2.5), ("nonsense", float("inf"))):
        (group / "cpu.max").write_text(text + "\n")
        assert quota(tmp_path) == cores
