"""The one function of vLLM that is replaced, because vLLM has no extension point there.

A draft model's ModelConfig is made and checked inside SpeculativeConfig, before any per-architecture entry that knows
the TP size runs. SpeculativeConfig.__post_init__ is where its target, its ranks and its final config are first known.
"""

from __future__ import annotations

import functools
import inspect
from typing import Any

KNOWN = ("0.32",)
"""vLLM versions (as prefixes) whose SpeculativeConfig was read for this."""

WANTS = ("self.draft_model_config", "self.target_model_config", "self.draft_parallel_config")
"""What SpeculativeConfig.__post_init__ must still be about for the patch to make sense."""


def drafter_problem() -> str | None:
    """Why the patch cannot be installed in this vLLM; None where it can."""
    try:
        from vllm.config.speculative import SpeculativeConfig
    except ImportError as error:
        return f"SpeculativeConfig is not there ({error})"
    made = SpeculativeConfig.__dict__.get("__post_init__")
    if made is None:
        return "SpeculativeConfig has no __post_init__"
    made = inspect.unwrap(made)
    if list(inspect.signature(made).parameters) != ["self"]:
        return "SpeculativeConfig.__post_init__ takes other arguments"
    source = inspect.getsource(made)
    gone = [name for name in WANTS if name not in source]
    return f"SpeculativeConfig.__post_init__ no longer uses {', '.join(gone)}" if gone else None


def plan_drafters() -> None:
    """Wrap SpeculativeConfig.__post_init__: a draft model is planned with its target as soon as it is known."""
    from vllm.config.speculative import SpeculativeConfig

    stock = SpeculativeConfig.__post_init__
    if getattr(stock, "oddrank", False):
        return

    @functools.wraps(stock)
    def planned(self: Any) -> Any:
        from oddrank.engines.vllm.hooks import plan_drafter

        result = stock(self)
        plan_drafter(self)
        return result

    planned.oddrank = True  # type: ignore[attr-defined]
    SpeculativeConfig.__post_init__ = planned
