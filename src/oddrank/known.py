"""What is known, as tables made from the registries: families and formats. The README holds them between markers.

A new file in `families/` or `formats/` is a new row; nothing else lists them. One more table is a function and an
entry in TABLES.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

from oddrank.errors import OddrankError
from oddrank.families import Family, families
from oddrank.formats.base import described
from oddrank.formats.declared import kind_of
from oddrank.layout.executors import RUNTIME


class Known(NamedTuple):
    """A table. Cells are Markdown."""

    header: tuple[str, ...]
    rows: list[tuple[str, ...]]

    def markdown(self) -> str:
        lines = [self.header, ("---",) * len(self.header), *self.rows]
        return "\n".join("|" + "|".join(f" {cell} " if cell else " " for cell in line) + "|" for line in lines)


def known_families() -> Known:
    """Every family: what its file says first, and whether the runtime has a model of it."""
    rows: list[tuple[str, ...]] = []
    for family in families().values():
        title, _, what = _first_sentence(family).partition(": ")
        types = f"any, with `{family.marker}`" if family.marker else ", ".join(f"`{t}`" for t in family.model_types)
        rows.append((title, types, what, _served(family.name in RUNTIME.families)))
    return Known(("family", "model_type", "what it is", "runtime"), sorted(rows, key=lambda row: row[0].lower()))


def known_formats() -> Known:
    """Every format: its dialects, and whether the runtime has kernels for it."""
    rows: list[tuple[str, ...]] = [
        (about.name, about.dialects, _served(all(kind_of(f.name) in RUNTIME.formats for f in forms)))
        for about, forms in described()
    ]
    return Known(("format", "dialects", "runtime"), rows)


TABLES: Mapping[str, Callable[[], Known]] = {"families": known_families, "formats": known_formats}


def rewritten(text: str) -> str:
    """A document with the tables between its markers (`<!-- known: formats -->` to `<!-- /known -->`) as they are now.

    Raises OddrankError for a marker of no table, one that is not closed, and a document without any.
    """
    found = re.findall(r"<!-- known: (.*?) -->", text)
    unknown = [name for name in found if name not in TABLES]
    pairs = re.compile(r"(<!-- known: (\w+) -->\n).*?(\n<!-- /known -->)", re.DOTALL)
    if unknown or not found or len(pairs.findall(text)) != len(found):
        wrong = f"names {unknown[0]}" if unknown else "is not closed" if found else "is missing"
        raise OddrankError(
            f"a marker {wrong}. A table goes between <!-- known: NAME --> and <!-- /known -->, each on a line of its "
            f"own, NAME one of {', '.join(TABLES)}."
        )
    return pairs.sub(lambda at: at[1] + TABLES[at[2]]().markdown() + at[3], text)


def _first_sentence(family: Family) -> str:
    said = importlib.import_module(family.build.__module__).__doc__ or ""
    first = " ".join(said.partition("\n\n")[0].split())
    return re.split(r"\.(?:\s+(?=[A-Z`])|$)", first)[0]


def _served(yes: bool) -> str:
    return "yes" if yes else ""
