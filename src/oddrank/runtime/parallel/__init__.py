"""Ranks and what passes between them: groups, partial sums, and the launcher of rank processes.

Names are imported on first use: the launcher runs in a process that never imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oddrank.runtime.parallel.child import Link
    from oddrank.runtime.parallel.dist import connect
    from oddrank.runtime.parallel.group import Collectives, Group, PeerLostError, SoloGroup
    from oddrank.runtime.parallel.launch import Ranks, run_ranks
    from oddrank.runtime.parallel.local import LocalGroup
    from oddrank.runtime.parallel.partial import Partial

_HOMES = {
    "Collectives": "group",
    "Group": "group",
    "Link": "child",
    "LocalGroup": "local",
    "Partial": "partial",
    "PeerLostError": "group",
    "Ranks": "launch",
    "SoloGroup": "group",
    "connect": "dist",
    "run_ranks": "launch",
}

__all__ = [
    "Collectives",
    "Group",
    "Link",
    "LocalGroup",
    "Partial",
    "PeerLostError",
    "Ranks",
    "SoloGroup",
    "connect",
    "run_ranks",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
