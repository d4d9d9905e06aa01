"""Numbers on the command line."""

from __future__ import annotations

from typing import Any

import click


class Number(click.FloatRange):
    """A number in a range; NaN, which is below and above nothing, is in none."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if found != found:
            self.fail("nan is no number.", param, ctx)
        return found
