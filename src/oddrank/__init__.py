"""oddrank: run any LLM checkpoint at any tensor-parallel size, and prove that it computes the same thing."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from oddrank.errors import CheckFailedError, OddrankError

if TYPE_CHECKING:
    from oddrank.checkpoint import Checkpoint
    from oddrank.layout.plan import Plan
    from oddrank.planner import Planned, make_plan
    from oddrank.transform.pad import pad
    from oddrank.transform.slice import RankSlice, rank_slice
    from oddrank.transform.stream import Stream, stream

__version__ = "0.1.0"
__all__ = [
    "CheckFailedError",
    "Checkpoint",
    "OddrankError",
    "Plan",
    "Planned",
    "RankSlice",
    "Stream",
    "__version__",
    "make_plan",
    "pad",
    "rank_slice",
    "stream",
]

_HOMES = {
    "Checkpoint": "oddrank.checkpoint",
    "Plan": "oddrank.layout.plan",
    "Planned": "oddrank.planner",
    "make_plan": "oddrank.planner",
    "pad": "oddrank.transform.pad",
    "RankSlice": "oddrank.transform.slice",
    "rank_slice": "oddrank.transform.slice",
    "Stream": "oddrank.transform.stream",
    "stream": "oddrank.transform.stream",
}


def __getattr__(name: str) -> Any:
    # imported on first use, so that `oddrank --help` loads nothing it does not need
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'oddrank' has no attribute {name!r}")
