"""Comparisons of captures whose outcome is worked out by hand."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from cli.test_cli import run
from served.fake_server import chat_reply, serving

from oddrank.errors import OddrankError
from oddrank.verify.served import Answer, Candidate, Capture, Pair, Prompt, Token, Tolerance, compare, write_capture
from oddrank.verify.served.compare import final_answer, kl_of

PROMPT = Prompt("p", "?")


def token(text: str, logprob: float, *others: tuple[str, float], number: int | None = None) -> Token:
    top = [Candidate(text, logprob), *(Candidate(*o) for o in others)]
    return Token(text, number, logprob, sorted(top, key=lambda c: -c.logprob))


def answer(*tokens: Token, text: str | None = None, finish: str = "stop") -> Answer:
    said = "".join(t.text for t in tokens) if text is None else text
    return Answer(PROMPT, text=said, tokens=list(tokens), finish=finish)


def taken(*answers: Answer, api: str = "chat") -> Capture:
    return Capture("oddrank-capture-1", "http://h/v1", "m", api, "own", "", list(answers))


def pair(a: Answer, b: Answer, tolerance: Tolerance = Tolerance()) -> Pair:  # noqa: B008
    return compare(taken(a), taken(b), tolerance).pairs[0]


A = token("A", -0.1, ("B", -3.0))


def test_identical() -> None:
    found = compare(taken(answer(A, A)), taken(answer(A, A)))
    assert found.ok and found.identical == 1 and found.pairs[0].kl == 0.0 and found.pairs[0].kl_tokens == 2


def test_a_near_tie_on_both_sides() -> None:
    x = answer(A, token("B", -0.7, ("C", -0.75)), token("X", -0.1))
    y = answer(A, token("C", -0.69, ("B", -0.72)), token("Y", -0.1))
    found = pair(x, y)
    assert found.status == "near tie"
    d = found.divergence
    assert d is not None and (d.unit, d.at, d.a, d.b, d.context) == ("token", 1, "B", "C", "A")
    assert d.margin_a == pytest.approx(0.05) and d.margin_b == pytest.approx(0.03)
    assert not d.at_least_a and not d.at_least_b


def test_counts_of_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x, y = answer(A, token("B", -0.7, ("C", -0.75))), answer(A, token("C", -0.69, ("B", -0.72)))
    for name, captured in (("x", taken(x)), ("y", taken(y)), ("other", taken(answer(token("C", -0.01, ("A", -9.0)))))):
        write_capture(captured, tmp_path / name)
    code, out, _ = run(capsys, "compare", tmp_path / "x", tmp_path / "y", "--max-kl", 1)
    assert code == 0 and "0 identical, 1 near tie, 0 diverged, 0 failed" in out
    code, out, err = run(capsys, "compare", tmp_path / "x", tmp_path / "other")
    assert code == 1 and "0 near ties, 1 diverged" in out and "1 of 1 prompt diverged" in err


def test_one_side_that_was_sure_is_no_near_tie() -> None:
    x, y = answer(token("B", -0.7, ("C", -0.75))), answer(token("C", -0.01, ("B", -5.0)))
    found = pair(x, y)
    assert found.status == "diverged" and found.divergence is not None
    assert found.divergence.margin_a == pytest.approx(0.05) and found.divergence.margin_b == pytest.approx(4.99)


def test_a_candidate_beyond_those_told_bounds_the_margin() -> None:
    found = pair(answer(token("B", -0.2, ("D", -2.2))), answer(token("C", -0.2, ("B", -0.3))))
    d = found.divergence
    assert d is not None and d.at_least_a and not d.at_least_b
    assert d.margin_a == pytest.approx(2.0) and d.margin_b == pytest.approx(0.1)
    assert found.status == "diverged"


def test_a_small_margin_after_distributions_that_differ_is_no_near_tie() -> None:
    early_x, early_y = token("A", math.log(0.9), ("B", math.log(0.1))), token("A", math.log(0.5), ("B", math.log(0.5)))
    x = answer(early_x, token("B", -0.7, ("C", -0.75)))
    y = answer(early_y, token("C", -0.69, ("B", -0.72)))
    found = pair(x, y)
    assert found.status == "diverged" and "KL" in found.why
    assert pair(x, y, Tolerance(0.5, 1.0)).status == "near tie"


def test_the_same_text_out_of_another_distribution() -> None:
    x = answer(token("A", math.log(0.9), ("B", math.log(0.1))))
    y = answer(token("A", math.log(0.6), ("B", math.log(0.4))))
    found = pair(x, y)
    assert found.status == "diverged" and found.divergence is None
    assert found.kl == pytest.approx(0.9 * math.log(0.9 / 0.6) + 0.1 * math.log(0.1 / 0.4))


def slightly_apart(count: int, name: str = "p") -> tuple[Answer, Answer]:
    """Two answers of `count` tokens, each 0.00806 nats apart."""
    p, q = (token("A", math.log(x), ("B", math.log(1 - x))) for x in (0.8, 0.75))
    x, y = (Answer(Prompt(name, "?"), text="A" * count, tokens=[t] * count) for t in (p, q))
    return x, y


def test_the_mean_kl_of_a_prompt_may_be_larger_the_fewer_its_tokens() -> None:
    nats = 0.8 * math.log(0.8 / 0.75) + 0.2 * math.log(0.2 / 0.25)
    assert nats == pytest.approx(0.0070, abs=1e-4)
    few, many = pair(*slightly_apart(4)), pair(*slightly_apart(100))
    assert few.kl == pytest.approx(nats) and few.status == "identical" and few.why == ""  # 0.005 x (1 + 8/4)
    assert many.kl == pytest.approx(nats) and many.status == "diverged"  # 0.005 x (1 + 8/100)
    assert "KL 0.007 nats a token over 100, most (0.007) at token 0, 'A'" in many.why


def test_distributions_that_differ_a_little_at_every_prompt() -> None:
    both = [slightly_apart(4, str(n)) for n in range(9)]
    found = compare(taken(*(x for x, _ in both)), taken(*(y for _, y in both)))
    assert found.identical == 9 and found.diverged == 0
    assert not found.ok and found.kl_tokens == 36 and "0.007 nats a token over 36 tokens, and 0.005" in found.why
    assert compare(taken(both[0][0]), taken(both[0][1]), Tolerance(kl=0.008)).ok


def test_a_token_much_further_apart_than_the_others() -> None:
    far_x, far_y = token("A", math.log(0.9), ("B", math.log(0.1))), token("A", math.log(0.5), ("B", math.log(0.5)))
    found = pair(answer(*[A] * 30, far_x, *[A] * 30), answer(*[A] * 30, far_y, *[A] * 30))
    assert found.kl_most_at == 30 and found.kl_most == pytest.approx(0.9 * math.log(1.8) + 0.1 * math.log(0.2))


def test_candidates_of_one_text_are_not_told_apart() -> None:
    for text in ("\ufffd", "x"):
        same = [Candidate("a", math.log(0.6)), Candidate(text, math.log(0.2)), Candidate(text, math.log(0.1))]
        assert kl_of(same, same) == 0.0
        other = [Candidate("a", math.log(0.6)), Candidate(text, math.log(0.25))]
        assert kl_of(same, other) == pytest.approx(0.0, abs=1e-12)  # of the rest only its sum is known, 0.4 twice
    one, another = ([Candidate("a", math.log(0.6)), Candidate("\ufffd", math.log(p))] for p in (0.3, 0.1))
    assert kl_of(one, another) == pytest.approx(0.0, abs=1e-12)  # perhaps not the same part of a character


def test_unknown_margins_are_no_near_tie() -> None:
    x, y = answer(Token("", 1), Token("", 2), text="ab"), answer(Token("", 1), Token("", 3), text="ac")
    found = pair(x, y)
    assert found.status == "diverged" and found.divergence is not None and found.divergence.at == 1
    assert (found.divergence.a, found.divergence.b, found.divergence.margin_a) == ("[2]", "[3]", None)


def test_text_alone() -> None:
    x = Answer(PROMPT, text="The sum is 12.", reasoning="let me see")
    y = Answer(PROMPT, text="So it is 12", reasoning="let me see")
    found = pair(x, y)
    assert found.status == "diverged" and found.same_answer and found.divergence is not None
    assert (found.divergence.unit, found.divergence.at, found.divergence.a[:3]) == ("character", 12, "The")
    assert pair(x, x).status == "identical"


def test_ids_tell_tokens_of_the_same_text_apart() -> None:
    x, y = answer(token("a", -0.1, number=1)), answer(token("a", -0.1, number=2))
    assert pair(x, y).status == "diverged"


def test_an_end_token_that_one_side_does_not_tell() -> None:
    x, y = answer(A, A), answer(A, A, token("", -0.1))
    assert pair(x, y).status == "identical"
    assert pair(answer(A, A), answer(A, A, A)).status == "diverged"
    numbered = token("A", -0.1, ("B", -3.0), number=7)
    end = token("", -0.1, number=2)
    assert pair(answer(numbered), answer(numbered, end)).status == "identical"
    assert pair(answer(numbered), answer(numbered, numbered)).status == "diverged"


def test_a_server_that_tells_characters_beside_one_that_tells_their_bytes() -> None:
    hi, end = token("Hi", -0.1, number=5), token("!", -0.1, number=6)
    bytes_of_it = [Token(t, n, -0.1) for n, t in enumerate((r" \xf0\x9f", r"\x91", r"\x8c"))]
    parts = answer(hi, *bytes_of_it, end, text="Hi 👌!")
    whole = answer(hi, Token(" 👌"), end)
    found = pair(parts, whole)
    assert found.status == "identical" and found.kl_tokens == 2
    cut = answer(*parts.tokens, bytes_of_it[0], text="Hi 👌!\ufffd", finish="length")
    assert pair(cut, answer(*whole.tokens, text="Hi 👌!", finish="length")).status == "identical"
    other = answer(hi, Token(" 🙂"), end)
    divergence = pair(parts, other).divergence
    assert divergence is not None and (divergence.at, divergence.a, divergence.b) == (1, " 👌", " 🙂")


def test_white_space_that_one_server_cuts() -> None:
    assert pair(answer(A, A, text="AA\n"), answer(A, A, text=" AA")).status == "identical"
    assert pair(answer(A, A, text="A A"), answer(A, A, text="AA")).status == "diverged"


def test_reasoning_that_differs_without_tokens_told_for_it() -> None:
    x, y = answer(A), answer(A)
    other = Answer(PROMPT, text=y.text, reasoning="other", tokens=y.tokens)
    assert pair(x, other).status == "diverged"


def test_failures() -> None:
    found = compare(taken(answer(A)), taken(Answer(PROMPT, error="500, boom")))
    assert not found.ok and found.failed == 1 and found.pairs[0].why == "B: 500, boom"


def test_captures_that_cannot_be_compared() -> None:
    with pytest.raises(OddrankError, match="1 against 2 prompts"):
        compare(taken(answer(A)), taken(answer(A), answer(A)))
    with pytest.raises(OddrankError, match="prompt 1 differs"):
        compare(taken(answer(A)), taken(Answer(Prompt("q", "!"))))
    with pytest.raises(OddrankError, match="completions"):
        compare(taken(answer(A)), taken(answer(A), api="completions"))


def test_kl_is_never_more_than_the_true_one() -> None:
    p, q = [0.5, 0.3, 0.15, 0.05], [0.4, 0.2, 0.3, 0.1]
    true = sum(x * math.log(x / y) for x, y in zip(p, q, strict=True))
    names = "abcd"
    for told in (4, 3, 2, 1):
        a = [Candidate(names[i], math.log(p[i])) for i in range(told)]
        b = [Candidate(names[i], math.log(q[i])) for i in range(told)]
        rest = 1 - sum(p[:told]), 1 - sum(q[:told])
        want = sum(x * math.log(x / y) for x, y in zip(p[:told], q[:told], strict=True))
        want += rest[0] * math.log(rest[0] / rest[1]) if told < 4 else 0
        found = kl_of(a, b)
        assert found is not None and found == pytest.approx(want, abs=1e-9) and found <= true + 1e-9
    assert kl_of([Candidate("a", -1.0)], [Candidate("b", -1.0)]) is None


@pytest.mark.parametrize(
    ("text", "want"),
    [
        ("The sum is 1,234.", "1234"),
        ("first 3\nso \\boxed{42} it is 7", "42"),
        ("Answer: Yes, they are.\nBecause 3 > 2", "yes they are"),
        ("The final answer is 3.50", "3.5"),
        ("**Canberra**", "canberra"),
        ("", ""),
    ],
)
def test_final_answers(text: str, want: str) -> None:
    assert final_answer(text) == want


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    x = answer(A, token("<b>", -0.7, ("C", -0.75)), token("X", -0.1))
    y = answer(A, token("C", -0.01, ("<b>", -6.0)))
    for name, one in (("x", x), ("y", y)):
        write_capture(taken(one), tmp_path / f"{name}.json")
    html = tmp_path / "out.html"
    code, out, err = run(capsys, "compare", tmp_path / "x.json", tmp_path / "y.json", "--html", html)
    assert code == 1 and "diverged" in out and "margins 0.05 / 5.99" in err
    text = html.read_text()
    assert "<mark>&lt;b&gt;</mark>" in text and "<mark>C</mark>" in text and "<b>" not in text.partition("<body>")[2]
    both = tmp_path / "x.json", tmp_path / "y.json"
    code, out, err = run(capsys, "compare", *both, "--json", "--near-tie", 6, "--max-kl", 9)
    found = json.loads(out)
    assert code == 0 and found["near_ties"] == 1 and found["pairs"][0]["divergence"]["at"] == 1
    code, out, err = run(capsys, "compare", *both, "--max-kl", "nan")
    assert code == 2 and "nan is no number" in err and not out
    code, _, err = run(capsys, "compare", tmp_path / "x.json", tmp_path / "y.json", "--suite", "long")
    assert code == 2 and "both sides are files" in err
    code, _, err = run(capsys, "compare", tmp_path / "x.json", tmp_path / "none.json")
    assert code == 2 and "none.json" in err


def test_urls_are_asked_the_prompts_of_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with serving(lambda p, b: (200, chat_reply(b))) as (url, asked):
        own = tmp_path / "own.txt"
        own.write_text("Capital?\n")
        assert run(capsys, "capture", url, "--suite", own, "-o", tmp_path / "a.json")[0] == 0
        code, out, err = run(capsys, "compare", tmp_path / "a.json", url)
        assert code == 0 and "1 identical" in out, err
        assert len(asked) == 2
        code, out, _ = run(capsys, "compare", url, url, "--suite", own)
        assert code == 0 and len(asked) == 4
