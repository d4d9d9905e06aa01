"""The comparison of two captures as one self-contained page, answers side by side."""

from __future__ import annotations

from importlib.resources import files
from typing import NamedTuple

from jinja2 import Environment, StrictUndefined

from oddrank.verify.served.answers import Answer, Capture
from oddrank.verify.served.compare import Comparison, Pair


class _Side(NamedTuple):
    """An answer cut where it parts from the other: what both said, what only this one says, and the rest."""

    common: str
    own: str
    rest: str


class _Row(NamedTuple):
    pair: Pair
    question: str
    a: _Side
    b: _Side


def page(a: Capture, b: Capture, comparison: Comparison) -> str:
    """HTML. Everything that a server said is shown as text."""
    rows = [_row(x, y, pair) for x, y, pair in zip(a.answers, b.answers, comparison.pairs, strict=True)]
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    source = files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    return environment.from_string(source).render(comparison=comparison, rows=rows, a=a, b=b)


def _row(a: Answer, b: Answer, pair: Pair) -> _Row:
    question = a.prompt.text or "\n".join(f"{m.get('role')}: {m.get('content')}" for m in a.prompt.messages or [])
    x, y = _said(a), _said(b)
    at = next((i for i, (p, q) in enumerate(zip(x, y, strict=False)) if p != q), min(len(x), len(y)))
    if x == y:
        return _Row(pair, question, _Side(x, "", ""), _Side(y, "", ""))
    found = pair.divergence
    own = (found.a, found.b) if found is not None and found.unit == "token" else ("", "")
    return _Row(pair, question, _cut(x, at, own[0]), _cut(y, at, own[1]))


def _cut(text: str, at: int, token: str) -> _Side:
    """The token that parts begins at or before the first character that differs."""
    start = at
    for back in range(min(len(token), at) + 1):
        if token and text.startswith(token, at - back):
            start = at - back
            break
    end = start + len(token) if token and text.startswith(token, start) else at + 1
    return _Side(text[:start], text[start:end], text[end:])


def _said(answer: Answer) -> str:
    if answer.error:
        return f"[{answer.error}]"
    return f"{answer.reasoning}\n\n{answer.text}" if answer.reasoning else answer.text
