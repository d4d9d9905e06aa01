"""Machines as sysfs shows them, with what is true of them told beside it: which logical CPUs are one core, and where.

The numbering is that of real machines: second hardware threads after all the first (most servers), beside them
(laptops), sockets interleaved (some dual-socket servers), memory nodes with gaps (POWER).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple


class Machine(NamedTuple):
    """cores: the logical CPUs of every physical core. node, package: of each core. files: what sysfs has besides the
    topology, e.g. {"fs/cgroup/cpuset.cpus.effective": "3-6"}. allowed: the process's affinity (None: all of it).
    usable: the CPUs that may be used in the end."""

    cores: Sequence[tuple[int, ...]]
    node: Sequence[int]
    package: Sequence[int]
    usable: frozenset[int]
    files: Mapping[str, str] = MappingProxyType({})
    allowed: frozenset[int] | None = None
    leave_out: tuple[str, ...] = ()
    strength: Sequence[int] = ()

    def cpus(self) -> frozenset[int]:
        return frozenset(cpu for core in self.cores for cpu in core)

    def usable_cores(self) -> dict[frozenset[int], tuple[int, int]]:
        """Usable logical CPUs of each core that has any -> (number of the core, memory node)."""
        made = {}
        for number, core in enumerate(self.cores):
            left = frozenset(core) & self.usable
            if left:
                made[left] = number, self.node[number]
        return made

    def write(self, root: Path) -> Path:
        """The tree, below `root`."""
        files = {"devices/system/cpu/online": _listed(self.cpus())}
        nodes: dict[int, set[int]] = {}
        for number, core in enumerate(self.cores):
            nodes.setdefault(self.node[number], set()).update(core)
            for cpu in core:
                at = f"devices/system/cpu/cpu{cpu}/topology/"
                files[at + "thread_siblings_list"] = files[at + "core_cpus_list"] = _listed(core)
                files[at + "physical_package_id"] = str(self.package[number])
                files[at + "core_id"] = str(number)
        for node, cpus in nodes.items():
            files[f"devices/system/node/node{node}/cpulist"] = _listed(cpus)
        for name, text in {**files, **self.files}.items():
            if any(part in name for part in self.leave_out):
                continue
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text + "\n")
        root.mkdir(exist_ok=True)
        return root


def _listed(cpus: Sequence[int] | set[int] | frozenset[int]) -> str:
    """As the kernel writes them: 0-3,8."""
    out, numbers = "", sorted(cpus)
    for i, n in enumerate(numbers):
        if i == 0 or numbers[i - 1] != n - 1:
            out += ("," if out else "") + str(n)
        elif i == len(numbers) - 1 or numbers[i + 1] != n + 1:
            out += f"-{n}"
    return out


def _clocks(mhz: dict[int, int]) -> dict[str, str]:
    return {f"devices/system/cpu/cpu{cpu}/cpufreq/cpuinfo_max_freq": str(m * 1000) for cpu, m in mhz.items()}


def _plain(cores: Sequence[tuple[int, ...]], node: Sequence[int], package: Sequence[int] | None = None) -> Machine:
    return Machine(cores, node, node if package is None else package, frozenset(c for core in cores for c in core))


# Two sockets of 16 cores, the second hardware threads numbered after all the first.
_DUAL = _plain([(i, i + 32) for i in range(32)], [i // 16 for i in range(32)])
# The same with CPUs dealt to the sockets in turn: even ones on socket 0.
_INTERLEAVED = _plain([(i, i + 24) for i in range(24)], [i % 2 for i in range(24)])
# One socket in four memory nodes (sub-NUMA clusters), no second hardware threads.
_CLUSTERS = _plain([(i,) for i in range(32)], [i // 8 for i in range(32)], [0] * 32)
# Eight performance cores with two threads side by side, four efficiency cores; favoured cores clock a little higher.
_HYBRID_CORES = [(2 * i, 2 * i + 1) for i in range(8)] + [(16 + i,) for i in range(4)]
_HYBRID = _plain(_HYBRID_CORES, [0] * 12)._replace(
    files=_clocks({c: 3800 if c >= 16 else 5000 if c in (8, 9) else 4900 for c in range(20)}),
    strength=[2] * 8 + [1] * 4,
)
# Small cores first: four small, three middle, one big.
_BIG_LITTLE = _plain([(i,) for i in range(8)], [0] * 8)._replace(
    files={f"devices/system/cpu/cpu{i}/cpu_capacity": "160" if i < 4 else "871" if i < 7 else "1024" for i in range(8)},
    strength=[1] * 4 + [2] * 4,
)
_FEW = frozenset({5, 6, 7, 8, 37, 38})

MACHINES: dict[str, Machine] = {
    "dual socket": _DUAL,
    "sockets interleaved": _INTERLEAVED,
    "four nodes in a socket": _CLUSTERS,
    "performance and efficiency cores": _HYBRID,
    "the same, known by list only": _HYBRID._replace(
        files={"devices/cpu_core/cpus": "0-15", "devices/cpu_atom/cpus": "16-19"}
    ),
    "big and little cores": _BIG_LITTLE,
    "four threads a core, nodes 0 and 8": _plain(
        [tuple(range(4 * i, 4 * i + 4)) for i in range(10)], [0] * 5 + [8] * 5
    ),
    "container with a cpuset over both sockets": _DUAL._replace(
        files={"fs/cgroup/cpuset.cpus.effective": "12-19,44-51"}, usable=frozenset({*range(12, 20), *range(44, 52)})
    ),
    "container with parts of cores": _DUAL._replace(allowed=_FEW, usable=_FEW),
    "cpuset of an older control group": _DUAL._replace(
        files={"fs/cgroup/cpuset/cpuset.effective_cpus": "0-3"}, usable=frozenset(range(4))
    ),
    "affinity and cpuset that overlap": _DUAL._replace(
        files={"fs/cgroup/cpuset.cpus.effective": "0-7"}, allowed=frozenset(range(4, 40)), usable=frozenset(range(4, 8))
    ),
    "second threads offline, two cores too": _DUAL._replace(
        files={"devices/system/cpu/online": "0-2,4-16,18-31"}, usable=frozenset(range(32)) - {3, 17}
    ),
    "virtual machine with two CPUs": _plain([(0,), (1,)], [0, 0]),
    "one CPU": _plain([(0,)], [0]),
    "no sibling lists": _DUAL._replace(leave_out=("siblings_list", "core_cpus")),
    "older kernel": _DUAL._replace(leave_out=("core_cpus",)),
    "no memory nodes": _DUAL._replace(leave_out=("/node/",), node=[0] * 32),
    "no topology": _plain([(i,) for i in range(6)], [0] * 6)._replace(leave_out=("topology", "/node/")),
    "nothing at all": _plain([(i,) for i in range(3)], [0] * 3)._replace(leave_out=("devices",)),
}
