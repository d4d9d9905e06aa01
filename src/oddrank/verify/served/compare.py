"""Two captures of the same prompts: where each pair of answers parts, and whether that matters.

Two servings that compute the same model round differently, and where two tokens are nearly as likely the greedy one
may then be either: a near tie. After it the answers go separate ways, so only what comes before says anything. A fault
shows as a token that one side was sure of and the other was not, or as distributions that differ where the tokens do
not: the mean of their KL divergence shows faults that move no greedy choice, and is steady over a few hundred tokens.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from contextlib import suppress
from itertools import takewhile

import msgspec

from oddrank.errors import OddrankError
from oddrank.verify.served.answers import Answer, Candidate, Capture, Token

_BYTE = re.compile(rb"\\x([89a-f][0-9a-f])")
"""Of a character, as `capture` writes it in a token's text."""

CONTEXT = 80
"""Characters of what both said before they part."""


class Tolerance(msgspec.Struct, frozen=True):
    """What may be rounding. margin: nats that a near tie's two candidates may be apart, for either side; bf16 logits of
    16 to 32 are 0.125 apart, and a few roundings add up. kl: nats of KL divergence a token, as a mean over the tokens
    of all prompts; two engines in bf16 were seen at 0.0005, and 0.02 with one of 270 attention heads missing."""

    margin: float = 0.5
    kl: float = 0.005

    def kl_of(self, tokens: int) -> float:
        """The most for one prompt, whose mean is over fewer `tokens` and scatters more."""
        return self.kl * (1 + 8 / max(1, tokens))


class Divergence(msgspec.Struct, frozen=True):
    """Where two answers part.

    at: index of the token, or of the character where tokens are not known (unit tells). context: what both said
    before. a, b: what each said there. margin_a, margin_b: nats by which each side preferred its own to the other's,
    None where it did not tell; at_least_a, at_least_b: that is a lower bound, the other's token being beyond the
    candidates told. near_tie: whether that is what it is.
    """

    unit: str
    at: int
    context: str
    a: str
    b: str
    margin_a: float | None
    margin_b: float | None
    at_least_a: bool
    at_least_b: bool
    near_tie: bool


class Pair(msgspec.Struct, frozen=True):
    """One prompt's two answers. status: "identical", "near tie", "diverged", or "failed" where either has none; why, in
    words, where that is not plain from the divergence. kl: mean KL(a || b) in nats over the tokens that have the same
    ones before them, from the candidates told, so never more than the true one; None where none are. kl_tokens: how
    many. kl_most, kl_most_at: the largest of one token, and its index. same_answer: whether the final answers agree."""

    name: str
    status: str
    same_answer: bool
    divergence: Divergence | None = None
    kl: float | None = None
    kl_tokens: int = 0
    kl_most: float | None = None
    kl_most_at: int | None = None
    why: str = ""


class Comparison(msgspec.Struct, frozen=True):
    """ok: no pair diverged beyond a near tie, none failed, and kl is within the tolerance (else `why` says so). kl: the
    mean over the kl_tokens of all pairs."""

    a: str
    b: str
    ok: bool
    identical: int
    near_ties: int
    diverged: int
    failed: int
    kl: float | None
    kl_tokens: int
    tolerance: Tolerance
    why: str
    pairs: list[Pair]


def compare(a: Capture, b: Capture, tolerance: Tolerance = Tolerance()) -> Comparison:  # noqa: B008 (immutable)
    """OddrankError where they are not of the same prompts."""
    _check_same(a, b)
    pairs = [_pair(x, y, tolerance) for x, y in zip(a.answers, b.answers, strict=True)]
    count = {s: sum(p.status == s for p in pairs) for s in ("identical", "near tie", "diverged", "failed")}
    tokens = sum(p.kl_tokens for p in pairs)
    kl = sum((p.kl or 0.0) * p.kl_tokens for p in pairs) / tokens if tokens else None
    why = ""
    if kl is not None and kl > tolerance.kl:
        why = f"KL(A || B) is at least {kl:.2g} nats a token over {tokens} tokens, and {tolerance.kl:g} is allowed"
    return Comparison(
        a=f"{a.model} at {a.url}",
        b=f"{b.model} at {b.url}",
        ok=not why and not count["diverged"] and not count["failed"],
        identical=count["identical"],
        near_ties=count["near tie"],
        diverged=count["diverged"],
        failed=count["failed"],
        kl=kl,
        kl_tokens=tokens,
        tolerance=tolerance,
        why=why,
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
    if not (a.with_ids and b.with_ids):
        a, b = _in_characters(a), _in_characters(b)
    divergence, common = _part(a, b, tolerance)
    kls = _kls(a.tokens[:common], b.tokens[:common])
    kl = sum(kls.values()) / len(kls) if kls else None
    at = max(kls, key=lambda i: kls[i]) if kls else None
    why = ""
    if kl is not None and at is not None and kl > tolerance.kl_of(len(kls)):
        why = f"KL {kl:.2g} nats a token over {len(kls)}, most ({kls[at]:.2g}) at token {at}, {shown(a.tokens[at])!r}"
    if why or (divergence is not None and not divergence.near_tie):
        status = "diverged"
    else:
        status = "identical" if divergence is None else "near tie"
    same = divergence is None or final_answer(a.text) == final_answer(b.text)
    most = None if at is None else kls[at]
    return Pair(a.prompt.name, status, same, divergence, kl, len(kls), most, at, why)


def _in_characters(answer: Answer) -> Answer:
    """Tokens that are parts of a character made one, as servers tell them that know texts alone (llama.cpp's)."""
    made: list[Token] = []
    held: list[Token] = []
    for token in answer.tokens:
        held.append(token)
        data = b"".join(_BYTE.sub(lambda m: bytes.fromhex(m[1].decode()), t.text.encode()) for t in held)
        with suppress(UnicodeDecodeError):
            text = data.decode()
            made.append(token if len(held) == 1 else Token(text))
            held = []
    return msgspec.structs.replace(answer, tokens=made + held)


def _part(a: Answer, b: Answer, tolerance: Tolerance) -> tuple[Divergence | None, int]:
    """Where they part, if they do, and how many tokens have the same ones before them."""
    if not a.tokens or not b.tokens:
        return _part_in_text(a, b), 0
    ids = a.with_ids and b.with_ids
    same = sum(1 for _ in takewhile(lambda p: _is(*p, ids), zip(a.tokens, b.tokens, strict=False)))
    ended = same == min(len(a.tokens), len(b.tokens))
    # the tokens told may not be all, and some servers do not tell the end's: what was said has the last word
    if (ended or not ids) and whole(a) == whole(b):
        return None, same
    if ended:
        return _part_in_text(a, b) if len(a.tokens) == len(b.tokens) else _ended(a, b, same), same
    x, y = a.tokens[same], b.tokens[same]
    margin_a, open_a = _margin(x, y, ids)
    margin_b, open_b = _margin(y, x, ids)
    margins = [m for m in (margin_a, margin_b) if m is not None]
    tie = bool(margins) and max(margins) <= tolerance.margin
    found = Divergence("token", same, _before(a, same), shown(x), shown(y), margin_a, margin_b, open_a, open_b, tie)
    return found, same + 1


def _before(answer: Answer, at: int) -> str:
    return "".join(t.text for t in answer.tokens[:at])[-CONTEXT:]


def _part_in_text(a: Answer, b: Answer) -> Divergence | None:
    x, y = whole(a), whole(b)
    if x == y:
        return None
    at = sum(1 for _ in takewhile(lambda p: p[0] == p[1], zip(x, y, strict=False)))
    return Divergence(
        "character", at, x[:at][-CONTEXT:], x[at : at + 20], y[at : at + 20], None, None, False, False, False
    )


def _ended(a: Answer, b: Answer, at: int) -> Divergence:
    """One side ended where the other went on."""
    x, y = (shown(s.tokens[at]) if len(s.tokens) > at else f"[{s.finish or 'end'}]" for s in (a, b))
    return Divergence("token", at, _before(a, at), x, y, None, None, False, False, False)


def whole(answer: Answer) -> str:
    """All that was said, but for what some servers leave out: white space around it, part of a last character."""
    reasoning, text = answer.reasoning.strip(), answer.text.rstrip("\ufffd").strip()
    return f"{reasoning}\n\n{text}" if reasoning else text


def _is(x: Token, y: Token, ids: bool) -> bool:
    return x.id == y.id if ids else x.text == y.text


def shown(token: Token) -> str:
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


def _kls(a: Sequence[Token], b: Sequence[Token]) -> dict[int, float]:
    """KL(a || b) in nats by index of the token, where both told candidates."""
    found = {i: kl_of(x.top, y.top) for i, (x, y) in enumerate(zip(a, b, strict=False)) if x.top and y.top}
    return {i: kl for i, kl in found.items() if kl is not None}


def kl_of(a: Sequence[Candidate], b: Sequence[Candidate]) -> float | None:
    """KL(a || b) in nats of two distributions of which only the likeliest tokens are known: over the tokens that both
    tell, and all others as one. That is at most the true one (Cover and Thomas, Elements of Information Theory, 2.8:
    the log sum inequality). None where they have none in common."""
    p, q = _told(a), _told(b)
    both = [(p[text], q[text]) for text in p if text in q]
    if not both:
        return None
    total = sum(math.exp(x) * (x - y) for x, y in both)
    rest_p, rest_q = (max(0.0, 1 - sum(math.exp(pair[i]) for pair in both)) for i in (0, 1))
    if rest_p > 1e-6 and rest_q > 1e-6:  # below, what logprobs are rounded to is all there is
        total += rest_p * math.log(rest_p / rest_q)
    return max(0.0, total)


def _told(candidates: Sequence[Candidate]) -> dict[str, float]:
    """Logprobs of the candidates that their text tells apart from all others: parts of characters may share one."""
    texts = [c.text for c in candidates]
    return {c.text: c.logprob for c in candidates if texts.count(c.text) == 1 and "\ufffd" not in c.text}


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
