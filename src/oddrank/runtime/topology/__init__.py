"""Which CPU cores a rank computes on: the machine's topology, the placement of ranks, pinning. Imports no torch."""

from oddrank.runtime.topology.pin import PinnedPool, clamp, cores_of, own_cores
from oddrank.runtime.topology.placement import Placement, place
from oddrank.runtime.topology.sysfs import Core, Topology, read_topology

__all__ = [
    "Core",
    "PinnedPool",
    "Placement",
    "Topology",
    "clamp",
    "cores_of",
    "own_cores",
    "place",
    "read_topology",
]
