"""The page: a plan's picture as HTML, everything in one file."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from oddrank import __version__
from oddrank.picture.figures import picture
from oddrank.report import amount

_ASKS = {
    "coverage": "Has every stored tensor its role, and every role its tensors?",
    "exactly once": "Does each element that ranks are summed over sit on exactly one?",
    "pairing": "Does every real head read its own head, on its own rank?",
    "silence": "Do dummies add nothing?",
    "storage": "Is no stored entry split, and no scale mixed with another?",
    "executor": "Can the engine run it, and is it what was asked for?",
    "no crosstalk": "Is every operation that runs across heads accounted for?",
}


def page(reports: Sequence[dict[str, Any]]) -> str:
    """HTML of one plan, or of a model's and its drafter's. reports: of `oddrank.report.describe`, each with its plan
    under "plan". Names are shown as text, whatever they hold."""
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    for filter_ in (amount, capitalized, percent, short, signed, spans):
        environment.filters[filter_.__name__] = filter_
    here = files(__package__)
    template = environment.from_string(here.joinpath("page.html").read_text(encoding="utf-8"))
    style = Markup(here.joinpath("page.css").read_text(encoding="utf-8"))
    return template.render(pictures=[picture(r) for r in reports], style=style, asks=_ASKS, version=__version__)


def percent(part: float) -> str:
    """1.5 is 150.0%; with a second digit where it is less than one percent."""
    return f"{part:.2%}" if 0 < abs(part) < 0.01 else f"{part:.1%}"


def signed(part: float) -> str:
    return f"{'+' if part >= 0 else '−'}{percent(abs(part))}"


def capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]


def short(axis: str) -> str:
    """What one head is called beside those that read it: "key" of "GDN key heads"."""
    return axis.removesuffix(" heads").rpartition(" ")[2]


def spans(numbers: Sequence[int]) -> str:
    """Ascending numbers, the consecutive ones together: "0, 2–4"."""
    found: list[list[int]] = []
    for n in numbers:
        if found and n == found[-1][1] + 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    return ", ".join(f"{a}–{b}" if b > a else f"{a}" for a, b in found)
