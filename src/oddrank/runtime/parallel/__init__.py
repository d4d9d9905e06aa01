"""Ranks and what passes between them: groups, partial sums, and the launcher of rank processes.

Names are imported on first use: the launcher runs in a process that never imports torch.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from oddrank.runtime.parallel.group import Collectives, Group, SoloGroup
    from oddrank.runtime.parallel.local import LocalGroup
    from oddrank.runtime.parallel.partial import Partial

_HOMES = {
    "Collectives": "group",
    "Group": "group",
    "LocalGroup": "local",
    "Partial": "partial",
    "SoloGroup": "group",
}

__all__ = ["Collectives", "Group", "LocalGroup", "Partial", "SoloGroup"]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{home}"), name)
