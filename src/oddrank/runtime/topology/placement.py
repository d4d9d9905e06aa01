"""Placing ranks on cores: every physical core belongs to one rank, a rank has one thread on each of its cores.

Several memory nodes: a rank's cores lie together on one node, or are whole nodes. Unequal cores: they are dealt out in
turn, strongest first, because all ranks wait for the slowest. More ranks than cores: the ranks share.
"""

import itertools
from collections.abc import Iterable, Sequence

import msgspec

from oddrank.errors import OddrankError
from oddrank.runtime.topology.sysfs import UNEQUAL, Core, Topology
from oddrank.words import counted

_LEAST = 0.5
"""Ranks stay within memory nodes as long as none gets less than this of an even share of the cores."""


class Placement(msgspec.Struct, frozen=True):
    """One rank's cores.

    threads: the logical CPU of each of its threads, on a core of its own each (an explicit count beyond the cores
    goes on with their second logical CPUs). cpus: every logical CPU of the rank's cores, ascending: its slice, in
    which everything it runs stays. nodes: of memory. shares: how many ranks compute on these CPUs.
    asked: the thread count that was asked for, where the slice is smaller.
    """

    threads: tuple[int, ...]
    cpus: tuple[int, ...]
    nodes: tuple[int, ...]
    shares: int = 1
    asked: int | None = None

    def describe(self) -> str:
        """One line for a log."""
        nodes = ("node " if len(self.nodes) == 1 else "nodes ") + ranges(self.nodes)
        count = counted(len(self.threads), "thread")
        text = f"{count} on CPUs {ranges(self.threads)} ({nodes})"
        if set(self.cpus) != set(self.threads):
            text += f", of its slice {ranges(self.cpus)}"
        if self.shares > 1:
            text += f", shared by {self.shares} ranks: there are more ranks than cores"
        if self.asked is not None:
            text += f"; {self.asked} threads were asked for, the slice has room for no more"
        return text


def place(
    topology: Topology, ranks: int, threads: int | None = None, quota: float = float("inf")
) -> tuple[Placement, ...]:
    """Where each of `ranks` ranks computes.

    threads: of each rank; by default one a core, and no more over all ranks than `quota` cores' worth of time.
    Slices are disjoint and cover every core. Where there are more ranks than cores the logical CPUs are dealt in
    turn instead, one to a rank; beyond those, ranks share them.
    OddrankError for less than one rank or thread.
    """
    if ranks < 1:
        raise OddrankError(f"At least one rank is needed, and {ranks} were asked for.")
    if threads is not None and threads < 1:
        raise OddrankError(f"A rank computes with at least one thread, and {threads} were asked for.")
    cores = topology.cores
    if ranks > len(cores):
        return _shared(cores, ranks, threads)
    granted = max(1, int(quota / ranks)) if quota < len(cores) else len(cores)
    return tuple(_placed(part, threads, granted) for part in _slices(topology, ranks))


def _placed(cores: Sequence[Core], threads: int | None, granted: int) -> Placement:
    order = _by_turns(core.cpus for core in cores)
    wanted = min(len(cores), granted) if threads is None else threads
    cpus, nodes = tuple(sorted(order)), tuple(sorted({core.node for core in cores}))
    return Placement(tuple(order[:wanted]), cpus, nodes, asked=wanted if wanted > len(order) else None)


def _shared(cores: Sequence[Core], ranks: int, threads: int | None) -> tuple[Placement, ...]:
    order = _by_turns(core.cpus for core in cores)
    core_of = {cpu: core for core in cores for cpu in core.cpus}
    given = [order[rank % len(order)] for rank in range(ranks)]
    asked = threads if threads is not None and threads > 1 else None
    return tuple(
        Placement((cpu,), (cpu,), (core_of[cpu].node,), sum(core_of[other] is core_of[cpu] for other in given), asked)
        for cpu in given
    )


def _by_turns(groups: Iterable[Sequence[int]]) -> list[int]:
    """The first of every group, then the second of those that have one, and so on."""
    kept = [list(g) for g in groups]
    return [g[i] for i in range(max(map(len, kept))) for g in kept if i < len(g)]


def _slices(topology: Topology, ranks: int) -> list[list[Core]]:
    cores = topology.cores
    nodes = [[core for core in cores if core.node == node] for node in topology.nodes]
    local = _over_nodes(nodes, ranks)
    least = min(len(part) for part in local)
    if len(nodes) == 1 or least >= _LEAST * len(cores) / ranks:
        return local
    return _divided(cores, ranks)


def _over_nodes(nodes: Sequence[Sequence[Core]], ranks: int) -> list[list[Core]]:
    """Each rank on one node, or on whole nodes, in order."""
    sizes = [len(node) for node in nodes]
    if ranks >= len(nodes):
        given = _ranks_of_nodes(sizes, ranks)
        return [part for node, n in zip(nodes, given, strict=True) for part in _divided(node, n)]
    parts, at = [], 0
    for rank in range(ranks):
        left, wanted = ranks - rank - 1, sum(sizes[at:]) / (ranks - rank)
        stop = at + 1
        # another node comes in while that brings the rank nearer its share of what is left
        while stop < len(nodes) - left and (
            not left or abs(sum(sizes[at : stop + 1]) - wanted) <= abs(sum(sizes[at:stop]) - wanted)
        ):
            stop += 1
        parts.append([core for node in nodes[at:stop] for core in node])
        at = stop
    return parts


def _ranks_of_nodes(sizes: Sequence[int], ranks: int) -> list[int]:
    """How many ranks each node takes, at least one: the next always to the node whose ranks have most cores."""
    given = [1] * len(sizes)
    for _ in range(ranks - len(sizes)):
        fullest = max(range(len(sizes)), key=lambda i: (sizes[i] / given[i], -i))
        given[fullest] += 1
    return given


def _divided(cores: Sequence[Core], ranks: int) -> list[list[Core]]:
    """`ranks` parts, none larger than another by more than one core: neighbours together where cores are equal, in
    turn from the strongest where they are not."""
    capacities = [core.capacity for core in cores]
    if min(capacities) < UNEQUAL * max(capacities):
        strongest = sorted(cores, key=lambda core: -core.capacity)
        return [strongest[rank::ranks] for rank in range(ranks)]
    bounds = [len(cores) * rank // ranks for rank in range(ranks + 1)]
    return [list(cores[a:b]) for a, b in itertools.pairwise(bounds)]


def ranges(numbers: Iterable[int]) -> str:
    """Numbers as the kernel lists them: 0-3,8."""
    parts: list[list[int]] = []
    for n in sorted(set(numbers)):
        if parts and n == parts[-1][1] + 1:
            parts[-1][1] = n
        else:
            parts.append([n, n])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in parts)
