"""Placement, by what must hold on every machine: slices apart, every core in one, one thread a core, memory near."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from runtime.topology.machines import MACHINES, Machine

from oddrank.errors import OddrankError
from oddrank.runtime.topology import Core, Placement, Topology, place, read_topology

RANKS = (1, 2, 3, 4, 5, 6, 7, 8, 12)


def topology_of(machine: Machine, root: Path) -> Topology:
    allowed = machine.cpus() if machine.allowed is None else machine.allowed
    return read_topology(machine.write(root), allowed)


def core_numbers(machine: Machine, cpus: tuple[int, ...]) -> list[int]:
    return [next(i for i, core in enumerate(machine.cores) if cpu in core) for cpu in cpus]


@pytest.mark.parametrize("name", MACHINES)
def test_cores_are_those_of_the_machine(name: str, tmp_path: Path) -> None:
    machine = MACHINES[name]
    read = topology_of(machine, tmp_path / "sys")
    assert {frozenset(core.cpus) for core in read.cores} == set(machine.usable_cores())
    assert {frozenset(c.cpus): c.node for c in read.cores} == {k: n for k, (_, n) in machine.usable_cores().items()}
    assert read.unequal == bool(machine.strength)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("name", MACHINES)
def test_slices_are_apart_cover_and_have_a_thread_a_core(name: str, ranks: int, tmp_path: Path) -> None:
    machine = MACHINES[name]
    cores = machine.usable_cores()
    placed = place(topology_of(machine, tmp_path / "sys"), ranks)
    assert len(placed) == ranks
    assert {cpu for p in placed for cpu in p.cpus} <= machine.usable
    if ranks > len(cores):
        return
    slices = [core_numbers(machine, p.cpus) for p in placed]
    assert sum(len(set(s)) for s in slices) == len({n for s in slices for n in s}) == len(cores)  # apart, covering
    assert {cpu for p in placed for cpu in p.cpus} == machine.usable
    for p, mine in zip(placed, slices, strict=True):
        threads = core_numbers(machine, p.threads)
        assert len(set(threads)) == len(threads)  # one a core
        assert set(threads) == set(mine)
        assert p.shares == 1
        assert sorted(p.nodes) == sorted({machine.node[n] for n in mine})


@pytest.mark.parametrize(
    ("name", "ranks"),
    [(n, r) for n in ("dual socket", "sockets interleaved", "four nodes in a socket") for r in (1, 2, 3, 4, 5, 6, 8)],
)
def test_a_rank_is_on_one_memory_node_or_on_whole_ones(name: str, ranks: int, tmp_path: Path) -> None:
    machine = MACHINES[name]
    everything = [core_numbers(machine, p.cpus) for p in place(topology_of(machine, tmp_path / "sys"), ranks)]
    for mine in map(set, everything):
        nodes = {machine.node[n] for n in mine}
        whole = {n for n in range(len(machine.cores)) if machine.node[n] in nodes}
        assert len(nodes) == 1 or mine == whole
        near = [n for n in range(len(machine.cores)) if machine.node[n] in nodes]
        assert max(map(near.index, mine)) - min(map(near.index, mine)) == len(mine) - 1  # neighbours
    if ranks % len(set(machine.node)) == 0:
        sizes = [len(set(s)) for s in everything]
        assert max(sizes) - min(sizes) <= 1


def test_slices_of_equal_cores_are_neighbours(tmp_path: Path) -> None:
    placed = place(topology_of(MACHINES["dual socket"], tmp_path / "sys"), 4)
    assert [p.threads for p in placed] == [tuple(range(8 * r, 8 * r + 8)) for r in range(4)]
    placed = place(topology_of(MACHINES["sockets interleaved"], tmp_path / "two"), 2)
    assert [p.threads for p in placed] == [tuple(range(0, 24, 2)), tuple(range(1, 24, 2))]


@pytest.mark.parametrize("ranks", [2, 3, 4])
@pytest.mark.parametrize(
    "name", ["performance and efficiency cores", "the same, known by list only", "big and little cores"]
)
def test_unequal_cores_are_dealt_out(name: str, ranks: int, tmp_path: Path) -> None:
    machine = MACHINES[name]
    counted = []
    for p in place(topology_of(machine, tmp_path / "sys"), ranks):
        mine = [machine.strength[n] for n in core_numbers(machine, p.threads)]
        assert mine == sorted(mine, reverse=True)  # fewer threads stay on the strongest
        counted.append((mine.count(2), len(mine)))
    for each in zip(*counted, strict=True):
        assert max(each) - min(each) <= 1


@pytest.mark.parametrize("name", MACHINES)
@pytest.mark.parametrize("threads", [1, 2, 5, 64])
def test_a_thread_count_stays_inside_the_slice(name: str, threads: int, tmp_path: Path) -> None:
    machine = MACHINES[name]
    topology = topology_of(machine, tmp_path / "sys")
    for ranks in (1, 2, 3):
        free = place(topology, ranks)
        for p, default in zip(place(topology, ranks, threads), free, strict=True):
            assert p.cpus == default.cpus
            assert set(p.threads) <= set(p.cpus)
            assert len(p.threads) == len(set(p.threads)) == min(threads, len(p.cpus))
            used = core_numbers(machine, p.threads)
            assert len(set(used)) == min(threads, len(set(core_numbers(machine, p.cpus))))  # cores before threads
            assert (p.asked == threads) == (threads > len(p.cpus))


def test_more_ranks_than_cores_share_and_say_so(tmp_path: Path) -> None:
    two = topology_of(MACHINES["virtual machine with two CPUs"], tmp_path / "two")
    placed = place(two, 5, threads=3)
    assert [p.cpus for p in placed] == [p.threads for p in placed] == [(0,), (1,), (0,), (1,), (0,)]
    assert [p.shares for p in placed] == [3, 2, 3, 2, 3]
    assert "shared by 3 ranks" in placed[0].describe()
    assert "more ranks than cores" in placed[0].describe()
    assert "3 threads were asked for" in placed[0].describe()
    # logical CPUs first: four ranks on two cores of four threads
    power = place(topology_of(MACHINES["four threads a core, nodes 0 and 8"], tmp_path / "power"), 20)
    assert len({p.threads for p in power}) == 20
    assert {p.shares for p in power} == {2}


def test_a_quota_limits_threads_not_slices(tmp_path: Path) -> None:
    topology = topology_of(MACHINES["dual socket"], tmp_path / "sys")
    for ranks, granted, threads in ((2, 5.0, 2), (3, 2.0, 1), (1, 3.5, 3), (2, 64.0, 16)):
        placed = place(topology, ranks, quota=granted)
        assert {len(p.threads) for p in placed} == {threads}
        assert {cpu for p in placed for cpu in p.cpus} == set(range(64))


def test_a_lopsided_cpuset_is_not_split_by_node() -> None:
    """Nine cores of one node and one of another: two ranks on a node each would leave one with a single core."""
    cores = tuple(Core((i,), node=0 if i < 9 else 1) for i in range(10))
    assert [len(p.cpus) for p in place(Topology(cores), 2)] == [5, 5]


def test_senseless_counts_are_refused() -> None:
    topology = Topology((Core((0,)),))
    for ranks, threads, says in ((0, None, "At least one rank"), (1, 0, "at least one thread")):
        with pytest.raises(OddrankError, match=says):
            place(topology, ranks, threads)


def test_a_line_for_the_log() -> None:
    p = Placement((0, 1, 2, 8), (0, 1, 2, 8, 32), (0,))
    assert p.describe() == "4 threads on CPUs 0-2,8 (node 0), of its slice 0-2,8,32"


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    """Any cores: any numbering, one to four logical CPUs each, up to four memory nodes, two strengths."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=24))
    numbers = draw(st.permutations(range(sum(sizes))))
    cores, at = [], 0
    for size in sizes:
        cpus = tuple(sorted(numbers[at : at + size]))
        cores.append(Core(cpus, draw(st.integers(0, 3)), 0, draw(st.sampled_from((1.0, 0.97, 0.5)))))
        at += size
    return Topology(tuple(sorted(cores, key=lambda c: (c.node, c.package, c.cpus))))


@settings(deadline=None, max_examples=300)
@given(topologies(), st.integers(1, 30), st.none() | st.integers(1, 12), st.floats(0.5, 40))
def test_any_machine(topology: Topology, ranks: int, threads: int | None, quota: float) -> None:
    placed = place(topology, ranks, threads, quota)
    core_of = {cpu: i for i, core in enumerate(topology.cores) for cpu in core.cpus}
    assert len(placed) == ranks
    for p in placed:
        assert p.threads and set(p.threads) <= set(p.cpus) <= set(core_of)
        assert len(set(p.threads)) == len(p.threads)
        assert set(p.nodes) == {topology.cores[core_of[cpu]].node for cpu in p.cpus}
    if ranks > len(topology.cores):
        used = [cpu for p in placed for cpu in p.threads]
        assert len(set(used)) == min(ranks, len(core_of))
        for p in placed:
            assert p.shares == sum(core_of[p.threads[0]] == core_of[cpu] for cpu in used)
        return
    everything = [{core_of[cpu] for cpu in p.cpus} for p in placed]
    assert sum(map(len, everything)) == len(set().union(*everything)) == len(topology.cores)
    assert sorted(cpu for p in placed for cpu in p.cpus) == sorted(core_of)
    for p, mine in zip(placed, everything, strict=True):
        if threads is None:
            assert len(p.threads) == len({core_of[cpu] for cpu in p.threads}) <= len(mine)
            assert quota >= len(topology.cores) or len(p.threads) == min(len(mine), max(1, int(quota / ranks)))
        else:
            assert len(p.threads) == min(threads, len(p.cpus))
    # near memory, unless that gives a rank less than half of an even share; then all ranks have as much
    node_cores = [{i for i, c in enumerate(topology.cores) if c.node == n} for n in topology.nodes]
    local = all(
        any(mine <= n for n in node_cores) or mine == set().union(*(n for n in node_cores if n & mine))
        for mine in everything
    )
    sizes = [len(mine) for mine in everything]
    assert (local and min(sizes) >= 0.5 * len(topology.cores) / ranks) or max(sizes) - min(sizes) <= 1
