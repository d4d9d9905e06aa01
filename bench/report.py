"""Rows of the benchmarks' tables: a number, its target, and the best this machine could do."""

from __future__ import annotations

from typing import Any


def row(
    what: str,
    measured: float,
    unit: str,
    passed: bool | None,
    target: str | None = None,
    ceiling_is: str | None = None,
    ceiling: float | None = None,
    share: float | None = None,
) -> dict[str, Any]:
    """One line. passed: None where there is no target. ceiling: the limit of the machine in the same unit, and
    ceiling_is what that is. share: how much of it is reached; measured / ceiling unless given."""
    if share is None and ceiling:
        share = measured / ceiling
    return {
        "what": what,
        "measured": measured,
        "unit": unit,
        "target": target,
        "passed": passed,
        "ceiling": ceiling,
        "ceiling_is": ceiling_is,
        "share": share,
    }
