"""The comparison of two captures as one self-contained page, answers side by side."""

from __future__ import annotations

import math
from importlib.resources import files
from typing import NamedTuple

from jinja2 import Environment, StrictUndefined

from oddrank.verify.served.answers import Answer, Capture
from oddrank.verify.served.compare import Comparison, Pair, whole

_LEAD = 120
"""Characters of what both said that are repeated before each side's own words."""

_ORDER = ("failed", "diverged", "near tie", "identical")


class _Choice(NamedTuple):
    """A candidate where the answers part. share: its probability in percent. own: whether this side chose it."""

    text: str
    share: float
    own: bool


class _Side(NamedTuple):
    """What only one side said: lead, the end of what both did; own, the token where they part; the rest."""

    lead: str
    own: str
    rest: str
    choices: list[_Choice]


class _Row(NamedTuple):
    """both: what both said, all of it where they do not part. hidden: whether the sides' leads leave some of it out."""

    number: int
    pair: Pair
    question: str
    both: str
    sides: list[tuple[str, _Side]]
    hidden: bool = False


def page(a: Capture, b: Capture, comparison: Comparison) -> str:
    """HTML. Everything that a server said is shown as text. What differs most comes first."""
    answers = zip(a.answers, b.answers, comparison.pairs, strict=True)
    rows = [_row(number, x, y, pair) for number, (x, y, pair) in enumerate(answers, 1)]
    rows.sort(key=lambda row: _ORDER.index(row.pair.status))
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["visible"] = visible
    source = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    return environment.from_string(source).render(comparison=comparison, rows=rows, captures=[("A", a), ("B", b)])


def visible(text: str) -> str:
    """A token whose white space can be seen: line ends, tabs, and the spaces around it."""
    inner = text.strip(" ")
    before = len(text) - len(text.lstrip(" "))
    marked = "␣" * before + inner + "␣" * (len(text) - before - len(inner))
    return marked.replace("\n", "⏎").replace("\t", "⇥")


def _row(number: int, a: Answer, b: Answer, pair: Pair) -> _Row:
    question = a.prompt.text or "\n\n".join(f"{m.get('role')}: {m.get('content')}" for m in a.prompt.messages or [])
    x, y = whole(a), whole(b)
    if pair.status == "failed":  # there is nothing to hold the other's answer to
        return _Row(number, pair, question, x or y, [])
    if x == y:
        return _Row(number, pair, question, x, [])
    at = next((i for i, (p, q) in enumerate(zip(x, y, strict=False)) if p != q), min(len(x), len(y)))
    found = pair.divergence
    tokens = (found.a, found.b) if found is not None and found.unit == "token" else ("", "")
    start = min(_start(x, at, tokens[0]), _start(y, at, tokens[1]))
    sides = [
        (name, _side(answer, text, start, token, pair))
        for name, answer, text, token in (("A", a, x, tokens[0]), ("B", b, y, tokens[1]))
    ]
    return _Row(number, pair, question, x[:start], sides, start > _LEAD)


def _start(text: str, at: int, token: str) -> int:
    """Where the token that parts begins: at or before the first character that differs."""
    return next((at - n for n in range(min(len(token), at) + 1) if token and text.startswith(token, at - n)), at)


def _side(answer: Answer, text: str, start: int, token: str, pair: Pair) -> _Side:
    end = start + len(token) if token and text.startswith(token, start) else start + 1
    found = pair.divergence
    choices = []
    if found is not None and found.unit == "token" and found.at < len(answer.tokens):
        told = answer.tokens[found.at]
        if told.text == token:
            choices = [_Choice(c.text, 100 * math.exp(c.logprob), c.text == token) for c in told.top]
    return _Side(text[max(0, start - _LEAD) : start], text[start:end], text[end:], choices)
