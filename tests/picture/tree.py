"""HTML as a tree, read by the standard library, and what a page of `oddrank plan --html` says in it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from html.parser import HTMLParser
from typing import NamedTuple

VOID = {"meta", "br", "link", "img", "hr", "input"}


class Node:
    def __init__(self, tag: str, attributes: dict[str, str]) -> None:
        self.tag, self.attributes = tag, attributes
        self.children: list[Node | str] = []

    @property
    def classes(self) -> list[str]:
        return self.attributes.get("class", "").split()

    def walk(self) -> Iterator[Node]:
        yield self
        for child in self.children:
            if isinstance(child, Node):
                yield from child.walk()

    def all(self, tag: str, of: str | None = None) -> list[Node]:
        """Descendants by tag, and class."""
        return [n for n in self.walk() if n is not self and n.tag == tag and (of is None or of in n.classes)]

    def one(self, tag: str, of: str | None = None) -> Node:
        found = self.all(tag, of)
        assert len(found) == 1, (tag, of, len(found))
        return found[0]

    def text(self) -> str:
        """Everything in it, white space collapsed."""
        inner = "".join(c if isinstance(c, str) else f" {c.text()} " for c in self.children)
        return " ".join(inner.split())


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Node("document", {})
        self.open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        node = Node(tag, {k: v or "" for k, v in attrs})
        self.open[-1].children.append(node)
        if tag not in VOID:
            self.open.append(node)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.open[-1].children.append(Node(tag, {k: v or "" for k, v in attrs}))

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"</{tag}> closes <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        self.open[-1].children.append(data)


def read(html: str) -> Node:
    """The document; AssertionError where tags do not nest."""
    reader = _Reader()
    reader.feed(html)
    reader.close()
    assert reader.open == [reader.root], [n.tag for n in reader.open]
    return reader.root


class Box(NamedTuple):
    """A group of heads: its label, what it says of copies, and the heads in it, -1 = a dummy."""

    label: str
    copies: str
    heads: list[int]


def boxes(rank: Node) -> list[Box]:
    """Of one rank's row."""
    found = []
    for group in rank.one("div", "groups").all("span", "group"):
        heads: list[int] = []
        for chip in group.all("i"):
            said = chip.text()
            if "d" in chip.classes:
                count = re.fullmatch(r"dummy|(\d+) dummies", said)
                assert count, said
                heads += [-1] * int(count[1] or 1)
            else:
                heads.append(int(said))
        label = [n.text() for n in group.all("b")]
        copies = [n.text() for n in group.all("small")]
        found.append(Box(label[0] if label else "", copies[0] if copies else "", heads))
    return found


def ranks_of(figure: Node) -> list[list[Box]]:
    """A list of ranks, each with its boxes; rank i is called so."""
    rows = [n for n in figure.children if isinstance(n, Node)]
    for number, row in enumerate(rows):
        assert row.one("div", "rank").text().startswith(f"rank {number} ")
    return [boxes(row) for row in rows]


def numbers(said: str) -> list[int]:
    """Ranges as the page has them, "0, 2–4": [0, 2, 3, 4]; nothing for "none"."""
    found: list[int] = []
    for part in said.replace("none", "").split(", "):
        ends = [int(end.replace(",", "")) for end in part.split("–") if end]
        found += range(ends[0], ends[-1] + 1) if ends else []
    return found


def is_about(said: str, value: int) -> bool:
    """Whether an amount of bytes as it is shown (one digit after the point) is this one."""
    number, unit = said.split()
    size = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[unit]
    return abs(float(number) * size - value) <= (0.0501 * size if size > 1 else 0)
