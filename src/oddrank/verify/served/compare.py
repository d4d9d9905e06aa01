"""Two captures of the same prompts: where each pair of answers parts, and whether that matters.

Two servings that compute the same model round differently, and where two tokens are nearly as likely the greedy one
may then be either: a near tie. After it the answers go separate ways, so only what comes before says anything. A fault
shows as a token that one side was sure of and the other was not, or as distributions that differ before the answers do.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from itertools import takewhile

import msgspec

from oddrank.errors import OddrankError
from oddrank.verify.served.answers import Answer, Candidate, Capture, Token

CONTEXT = 80
"""Characters of what both said before they part."""


class Tolerance(msgspec.Struct, frozen=True):
    """margin: nats that a near tie's two candidates may be apart, for either side. bf16 logits of 16 to 32 are 0.125
    apart, and a few roundings add up. kl: nats of KL divergence, averaged over the tokens before, that rounding may
    bring."""

    margin: float = 0.5
    kl: float = 0.05


class Divergence(msgspec.Struct, frozen=True):
    """Where two answers part.

    at: index of the token, or of the character where tokens are not known (unit tells). context: what both said
    before. a, b: what each said there. margin_a, margin_b: nats by which each side preferred its own to the other's,
    None where it did not tell; at_least: a margin is a lower bound, the other's token being beyond the candidates told.
    near_tie: whether that is what it is.
    """

    unit: str
    at: int
    context: str
    a: str
    b: str
    margin_a: float | None
    margin_b: float | None
    at_least: bool
    near_tie: bool


class Pair(msgspec.Struct, frozen=True):
    """One prompt's two answers. status: "identical", "near tie", "diverged", or "failed" where either has none (why).
    kl: mean KL(a || b) in nats over the tokens that have the same ones before them, from the candidates told, so never
    more than the true one; None where none are. kl_tokens: how many. same_answer: whether the final answers agree."""

    name: str
    status: str
    same_answer: bool
    divergence: Divergence | None = None
    kl: float | None = None
    kl_tokens: int = 0
    why: str = ""


class Comparison(msgspec.Struct, frozen=True):
    """ok: no pair diverged beyond a near tie, and none failed."""

    a: str
    b: str
    ok: bool
    identical: int
    near_ties: int
    diverged: int
    failed: int
    kl: float | None
    tolerance: Tolerance
    pairs: list[Pair]


def compare(a: Capture, b: Capture, tolerance: Tolerance = Tolerance()) -> Comparison:  # noqa: B008 (immutable)
    """OddrankError where they are not of the same prompts."""
    _check_same(a, b)
    pairs = [_pair(x, y, tolerance) for x, y in zip(a.answers, b.answers, strict=True)]
    count = {s: sum(p.status == s for p in pairs) for s in ("identical", "near tie", "diverged", "failed")}
    tokens = sum(p.kl_tokens for p in pairs)
    kl = sum((p.kl or 0.0) * p.kl_tokens for p in pairs) / tokens if tokens else None
    return Comparison(
        a=f"{a.model} at {a.url}",
        b=f"{b.model} at {b.url}",
        ok=not count["diverged"] and not count["failed"],
        identical=count["identical"],
        near_ties=count["near tie"],
        diverged=count["diverged"],
        failed=count["failed"],
        kl=kl,
        tolerance=tolerance,
        pairs=pairs,
    )


def _check_same(a: Capture, b: Capture) -> None:
    if a.prompts != b.prompts:
        at = next((i for i, (x, y) in enumerate(zip(a.prompts, b.prompts, strict=False)) if x != y), None)
        which = f"prompt {at + 1} differs" if at is not None else f"{len(a.prompts)} against {len(b.prompts)} prompts"
        raise OddrankError(
            f"The captures are of different prompts ({which}: suites {a.suite} and {b.suite}), so there is nothing to "
            "compare. Capture both with the same --suite."
        )
    if a.api != b.api:
        raise OddrankError(
            f"One capture is of chat and the other of completions ({a.api}, {b.api}): the model saw different text. "
            "Capture both with the same --api."
        )


def _pair(a: Answer, b: Answer, tolerance: Tolerance) -> Pair:
    for answer, side in ((a, "A"), (b, "B")):
        if answer.error:
            return Pair(a.prompt.name, "failed", False, why=f"{side}: {answer.error}")
    divergence, common = _part(a, b, tolerance)
    kl, counted = _mean_kl(a.tokens, b.tokens, common)
    if divergence is None:
        # the same words out of another distribution: a fault that did not reach a greedy choice yet
        status = "identical" if kl is None or kl <= tolerance.kl else "diverged"
        why = "" if status == "identical" else f"the same text, but KL {kl:.3g} nats a token"
        return Pair(a.prompt.name, status, True, None, kl, counted, why)
    tie = divergence.near_tie and (kl is None or kl <= tolerance.kl)
    why = f"a small margin, but KL {kl:.3g} nats a token before it" if divergence.near_tie and not tie else ""
    status = "near tie" if tie else "diverged"
    same = final_answer(a.text) == final_answer(b.text)
    return Pair(a.prompt.name, status, same, divergence, kl, counted, why)


def _part(a: Answer, b: Answer, tolerance: Tolerance) -> tuple[Divergence | None, int]:
    """Where they part, if they do, and how many tokens have the same ones before them."""
    if not a.tokens or not b.tokens:
        return _part_in_text(a, b), 0
    ids = a.with_ids and b.with_ids
    known = min(len(a.tokens), len(b.tokens))
    same = sum(1 for _ in takewhile(lambda p: _is(*p, ids), zip(a.tokens, b.tokens, strict=False)))
    if same == known:
        if len(a.tokens) == len(b.tokens):
            # the tokens told may not be all: what was said has the last word
            return _part_in_text(a, b), same
        if not ids and _whole(a) == _whole(b):  # an end token told by one side only
            return None, same
        return _ended(a, b, same), same
    x, y = a.tokens[same], b.tokens[same]
    margin_a, open_a = _margin(x, y, ids)
    margin_b, open_b = _margin(y, x, ids)
    margins = [m for m in (margin_a, margin_b) if m is not None]
    context = "".join(t.text for t in a.tokens[:same])[-CONTEXT:]
    tie = bool(margins) and max(margins) <= tolerance.margin
    found = Divergence("token", same, context, _shown(x), _shown(y), margin_a, margin_b, open_a or open_b, tie)
    return found, same + 1


def _part_in_text(a: Answer, b: Answer) -> Divergence | None:
    x, y = _whole(a), _whole(b)
    if x == y:
        return None
    at = sum(1 for _ in takewhile(lambda p: p[0] == p[1], zip(x, y, strict=False)))
    return Divergence("character", at, x[:at][-CONTEXT:], x[at : at + 20], y[at : at + 20], None, None, False, False)


def _ended(a: Answer, b: Answer, at: int) -> Divergence:
    """One side ended where the other went on."""
    context = "".join(t.text for t in a.tokens[:at])[-CONTEXT:]
    x, y = (_shown(s.tokens[at]) if len(s.tokens) > at else f"[{s.finish or 'end'}]" for s in (a, b))
    return Divergence("token", at, context, x, y, None, None, False, False)


def _whole(answer: Answer) -> str:
    return f"{answer.reasoning}\n\n{answer.text}" if answer.reasoning else answer.text


def _is(x: Token, y: Token, ids: bool) -> bool:
    return x.id == y.id if ids else x.text == y.text


def _shown(token: Token) -> str:
    return token.text or f"[{token.id}]"


def _margin(own: Token, other: Token, ids: bool) -> tuple[float | None, bool]:
    """Nats by which a side preferred its own token to the other's, and whether that is only a lower bound: the other's
    is then less likely than every candidate told."""
    if own.logprob is None or not own.top:
        return None, False
    if own.text == other.text and any(c.id is None for c in own.top):
        return None, False  # two tokens of one text: the candidates do not tell which is which
    for candidate in own.top:
        named = candidate.id is not None and ids
        if candidate.id == other.id if named else candidate.text == other.text:
            return max(0.0, own.logprob - candidate.logprob), False
    return max(0.0, own.logprob - own.top[-1].logprob), True


def _mean_kl(a: Sequence[Token], b: Sequence[Token], common: int) -> tuple[float | None, int]:
    found = [
        kl for x, y in zip(a[:common], b[:common], strict=False) if x.top and y.top
        for kl in [kl_of(x.top, y.top)] if kl is not None
    ]  # fmt: skip
    return (sum(found) / len(found), len(found)) if found else (None, 0)


def kl_of(a: Sequence[Candidate], b: Sequence[Candidate]) -> float | None:
    """KL(a || b) in nats of two distributions of which only the likeliest tokens are known: over the tokens that both
    tell, and all others as one. That is at most the true one (Cover and Thomas, Elements of Information Theory, 2.8:
    the log sum inequality). None where they have none in common."""
    q = {c.text: c.logprob for c in b}
    both = [(c.logprob, q[c.text]) for c in a if c.text in q]
    if not both:
        return None
    total = sum(math.exp(p) * (p - r) for p, r in both)
    rest_p, rest_q = (max(0.0, 1 - sum(math.exp(one[i]) for one in both)) for i in (0, 1))
    if rest_p > 1e-6 and rest_q > 1e-6:  # below, what logprobs are rounded to is all there is
        total += rest_p * math.log(rest_p / rest_q)
    return max(0.0, total)


_BOXED = re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}")
_NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?")
_SAID = re.compile(r"(?:final answer|answer)\s*(?:is|:)\s*([^\n]+)", re.IGNORECASE)


def final_answer(text: str) -> str:
    """What an answer comes to, for comparing: what is boxed, else what follows "answer is" or "answer:", else its last
    line; of that the last number if there is one, else the words in lower case without marks."""
    boxed, said = _BOXED.findall(text), _SAID.findall(text)
    lines = [line for line in text.splitlines() if line.strip()]
    last = (boxed or said or lines or [""])[-1]
    numbers = _NUMBER.findall(last)
    if numbers:
        digits = str(numbers[-1]).replace(",", "")
        return digits.rstrip("0").rstrip(".") if "." in digits else digits
    return " ".join(re.findall(r"\w+", last.lower()))
