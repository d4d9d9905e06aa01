"""The plan travels with the config it changed: vLLM pickles, deep-copies and dumps that config to its processes.

The marker is an attribute of the Hugging Face config object: a plain dict of strings and numbers, so it survives
pickling, deepcopy, to_dict and JSON.
"""

from __future__ import annotations

import base64
import zlib
from typing import Any

from oddrank.layout.plan import Plan

NAME = "oddrank_plan"


def mark(config: Any, plan: Plan) -> None:
    """Write the plan into a config object (a few kilobytes of text)."""
    packed = base64.b85encode(zlib.compress(plan.to_json(), 9)).decode()
    setattr(config, NAME, {"tp": plan.tp, "model": plan.name, "plan": packed})


def plan_of(config: Any) -> Plan | None:
    """The plan that was written into a config object, or None."""
    found = getattr(config, NAME, None)
    if found is None:
        return None
    return Plan.from_json(zlib.decompress(base64.b85decode(found["plan"])))
