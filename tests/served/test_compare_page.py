"""The page of a comparison, as a browser's parser reads it."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest

from oddrank.verify.served import Answer, Candidate, Capture, Prompt, Token, compare
from oddrank.verify.served.page import page, visible


class Read(HTMLParser):
    """Its elements, their attributes, and the text of each kind of element."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: dict[str, list[str]] = {}
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open, f"{self._open} are not closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in ("meta", "br"):
            self._open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        for tag in self._open[-1:]:
            self.texts.setdefault(tag, []).append(data)

    @property
    def text(self) -> str:
        return "\n".join(t for texts in self.texts.values() for t in texts)


HOSTILE = "\"'><script src=//x>alert({0})</script><img src=x onerror=alert({0})>&amp;{{{{ {0} }}}}"


def hostile(where: str) -> str:
    return HOSTILE.format(where)


def made(side: str, *answers: Answer) -> Capture:
    url = f"http://h/{hostile(f'url {side}')}"
    return Capture("oddrank-capture-1", url, hostile(f"model {side}"), "chat", "own", "", list(answers))


def token(text: str, *others: tuple[str, float]) -> Token:
    return Token(text, None, -0.1, [Candidate(text, -0.1), *(Candidate(*o) for o in others)])


def said(prompt: Prompt, *tokens: Token, reasoning: str = "") -> Answer:
    return Answer(prompt, "".join(t.text for t in tokens), reasoning, "stop", list(tokens))


@pytest.fixture(scope="module")
def read() -> Read:
    parted, failed, same = (Prompt(hostile(f"name {n}"), hostile(f"question {n}")) for n in range(3))
    chat = Prompt("chat", messages=[{"role": "user", "content": hostile("message")}])
    common = "Lorem ipsum. " * 30
    a = made("a", said(parted, token(common), token(hostile("own a"), ("b", -3.0)), token(hostile("rest a"))),
             Answer(failed, error=hostile("error")), said(same, token(hostile("same"))),
             said(chat, token("x"), reasoning=hostile("reasoning")))  # fmt: skip
    b = made("b", said(parted, token(common), token(" b", (hostile("candidate"), -2.5)), token("\n\t")),
             said(failed, token(hostile("other"))), said(same, token(hostile("same"))),
             said(chat, token("x"), reasoning="no"))  # fmt: skip
    return Read(page(a, b, compare(a, b)))


def test_what_servers_said_is_text(read: Read) -> None:
    whole = " ".join(read.text.split())
    for where in ("model a", "model b", "url a", "url b", "name 0", "name 1", "name 2", "question 0", "question 1",
                  "question 2", "own a", "rest a", "error", "same", "other", "candidate", "message"):  # fmt: skip
        assert hostile(where) in whole, where
    assert "reasoning" in whole  # cut where it parts from the other's
    assert not read.tags & {"script", "img", "b", "i", "iframe", "object", "link", "form", "svg"}


def test_the_page_needs_nothing_else(read: Read) -> None:
    assert {(tag, value[:2]) for tag, name, value in read.attributes if name in ("href", "src")} == {("a", "#p")}
    assert not [name for _, name, _ in read.attributes if name.startswith("on") or name == "style"]
    (style,) = read.texts["style"]
    assert "url(" not in style and "@import" not in style
    assert ("meta", "http-equiv", "Content-Security-Policy") in read.attributes
    assert ("meta", "content", "default-src 'none'; style-src 'unsafe-inline'") in read.attributes


def test_links_lead_to_the_prompts_that_differ_first(read: Read) -> None:
    links = [value for tag, name, value in read.attributes if (tag, name) == ("a", "href")]
    places = [f"#{value}" for tag, name, value in read.attributes if (tag, name) == ("section", "id")]
    assert links == places == ["#p2", "#p1", "#p4", "#p3"]


def test_the_tokens_that_part_are_marked_with_their_margins(read: Read) -> None:
    assert read.texts["mark"][:2] == [hostile("own a"), " b"]
    text = " ".join(read.text.split())
    # neither told the other's as a candidate, so a margin is at least that to the least likely it told
    assert "They part at token 1: A preferred its own by ≥ 2.90 nats, B by ≥ 2.40." in text
    assert "Both: 390 characters before they part" in text and "90.5 %" in text


@pytest.mark.parametrize(
    ("text", "want"),
    [(" a b ", "␣a b␣"), ("\n    ", "⏎␣␣␣␣"), ("   ", "␣␣␣"), ("\tx", "⇥x"), ("", ""), ("a", "a")],
)
def test_white_space_of_a_token_is_visible(text: str, want: str) -> None:
    assert visible(text) == want
