"""The physical cores that a process may use, as sysfs tells them.

Files: kernel documentation, ABI/stable/sysfs-devices-system-cpu and admin-guide/cputopology. None of them is needed:
virtual machines and sandboxes leave out any. What cannot be told is assumed equal and apart: every logical CPU a core
of its own, one memory node, cores of one strength.
"""

from collections.abc import Callable, Iterable
from pathlib import Path

import msgspec

from oddrank.runtime.topology.limits import SYSFS, affinity, cpu_list, cpuset

UNEQUAL = 0.85
"""Cores are unequal where the weakest has less than this of the strongest's capacity. Cores of one kind differ by a
few hundredths (the clock of favoured ones); efficiency cores have 0.4 to 0.75."""

_CPUS = "devices/system/cpu"
_EFFICIENCY = 0.5  # capacity of an Intel efficiency core where the kernel gives no number, only the list


class Core(msgspec.Struct, frozen=True):
    """A physical core. cpus: its logical CPUs that may be used, ascending. node: of memory (NUMA). package: socket.
    capacity: how much it computes, against the machine's other cores."""

    cpus: tuple[int, ...]
    node: int = 0
    package: int = 0
    capacity: float = 1.0


class Topology(msgspec.Struct, frozen=True):
    """Usable physical cores, by (node, package, first CPU); at least one."""

    cores: tuple[Core, ...]

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(sorted({core.node for core in self.cores}))

    @property
    def unequal(self) -> bool:
        """Are there strong and weak cores (performance and efficiency cores, big and little ones)?"""
        capacities = [core.capacity for core in self.cores]
        return min(capacities) < UNEQUAL * max(capacities)


def read_topology(root: Path = SYSFS, allowed: Iterable[int] | None = None) -> Topology:
    """The physical cores among the `allowed` CPUs (default: this thread's affinity) that the machine has online and the
    control group grants. root: where sysfs is mounted."""
    cpus = affinity() if allowed is None else frozenset(allowed)
    for limit in (_listed(root / _CPUS / "online"), cpuset(root)):
        if limit and cpus & limit:  # a limit that leaves nothing is another machine's
            cpus &= limit
    ordered = sorted(cpus or {0})
    nodes, capacities = _nodes(root), _capacities(root, ordered)
    members: dict[tuple[object, ...], list[int]] = {}
    for cpu in ordered:
        members.setdefault(_core_key(root, cpu), []).append(cpu)
    cores = [
        Core(
            tuple(of_core),
            node=nodes.get(of_core[0], 0),
            package=max(0, _number(root / _CPUS / f"cpu{of_core[0]}/topology/physical_package_id") or 0),
            capacity=max(capacities[cpu] for cpu in of_core),
        )
        for of_core in members.values()
    ]
    return Topology(tuple(sorted(cores, key=lambda c: (c.node, c.package, c.cpus))))


def _core_key(root: Path, cpu: int) -> tuple[object, ...]:
    """What the logical CPUs of one physical core have in common."""
    folder = root / _CPUS / f"cpu{cpu}/topology"
    for name in ("core_cpus_list", "thread_siblings_list"):
        siblings = _listed(folder / name)
        if cpu in siblings:
            return ("siblings", min(siblings))
    package, die, core = (_number(folder / n) for n in ("physical_package_id", "die_id", "core_id"))
    if core is not None and core >= 0:
        return ("core", package, die, core)  # a core's number is one of its package
    return ("siblings", cpu)


def _nodes(root: Path) -> dict[int, int]:
    """CPU -> its memory node."""
    found: dict[int, int] = {}
    for folder in sorted((root / "devices/system/node").glob("node[0-9]*")):
        number = folder.name.removeprefix("node")
        if number.isdecimal():
            found.update(dict.fromkeys(_listed(folder / "cpulist"), int(number)))
    return found


def _capacities(root: Path, cpus: list[int]) -> dict[int, float]:
    """CPU -> capacity, by the first source that knows every CPU: the scheduler's own (Arm, newer x86), Intel's list of
    efficiency cores, the highest clock."""
    efficient = _listed(root / "devices/cpu_atom/cpus")
    strong = _listed(root / "devices/cpu_core/cpus")

    def listed(cpu: int) -> int | None:
        return None if cpu not in efficient | strong else 100 if cpu in strong else int(100 * _EFFICIENCY)

    sources: tuple[Callable[[int], int | None], ...] = (
        lambda cpu: _number(root / _CPUS / f"cpu{cpu}/cpu_capacity"),
        listed,
        lambda cpu: _number(root / _CPUS / f"cpu{cpu}/cpufreq/cpuinfo_max_freq"),
    )
    for position, source in enumerate(sources):
        values = {cpu: source(cpu) for cpu in cpus}
        known = {cpu: float(v) for cpu, v in values.items() if v is not None and v > 0}
        told_apart = len(set(known.values())) > 1 or position == len(sources) - 1
        if len(known) == len(cpus) and told_apart:
            most = max(known.values())
            return {cpu: v / most for cpu, v in known.items()}
    return dict.fromkeys(cpus, 1.0)


def _listed(path: Path) -> frozenset[int]:
    try:
        return cpu_list(path.read_text())
    except (OSError, UnicodeError):
        return frozenset()


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return None
