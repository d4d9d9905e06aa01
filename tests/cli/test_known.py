"""`oddrank known`, and the README's tables: what the registries hold, no less and no more."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest
from cli.test_cli import run

from oddrank.errors import OddrankError
from oddrank.families import families
from oddrank.formats import base, formats
from oddrank.known import TABLES, rewritten
from oddrank.layout.executors import RUNTIME

README = Path(__file__).resolve().parents[2] / "README.md"


def test_the_readme_holds_the_tables_of_the_registries() -> None:
    """If this fails: oddrank known --write README.md"""
    text = README.read_text()
    assert rewritten(text) == text
    assert all(f"<!-- known: {name} -->" in text for name in TABLES)


def test_every_family_and_every_format_has_its_row(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "known", "--json")
    found = json.loads(out)
    assert code == 0 and found.keys() == {"families", "formats"}
    types_of = {t for f in families().values() if f.marker is None for t in f.model_types}
    assert {t for row in found["families"] for t in row["model_type"].split(", ")} - types_of == {
        "any", *(f"with {f.marker}" for f in families().values() if f.marker)
    }  # fmt: skip
    assert types_of <= {t for row in found["families"] for t in row["model_type"].split(", ")}
    assert len(found["families"]) == len(families()) and all(row["what it is"] for row in found["families"])
    assert sum(row["runtime"] == "yes" for row in found["families"]) == len(RUNTIME.families)
    modules = [m.__name__.rpartition(".")[2] for m in base._modules()]
    assert len(found["formats"]) == len(modules)
    assert {f for m in base._modules() for f in m.forms({})} == {*formats().values()}
    served = {row["format"] for row in found["formats"] if row["runtime"]}
    assert {"NVFP4", "MXFP4", "fp8 (e4m3)"} <= served


def test_a_new_file_is_a_new_row(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    made = types.ModuleType("oddrank.formats.int2")
    made.ABOUT = base.About("INT2", "a tool's `two_bits`")  # type: ignore[attr-defined]
    made.forms = lambda said: (base.Format("int2", (base.Stored(".weight_2", ("U8",), (1, 4)),)),)  # type: ignore[attr-defined]
    modules = (*base._modules(), made)
    monkeypatch.setattr(base, "_modules", lambda: modules)
    code, out, _ = run(capsys, "known", "formats", "--markdown")
    assert code == 0 and "| INT2 | a tool's `two_bits` | |\n" in out and "| family" not in out
    text = README.read_text()
    assert rewritten(text) != text and "INT2" in rewritten(text)
    assert "two_bits" in run(capsys, "known", "formats")[1]
    assert made.__name__ not in sys.modules


def test_a_document_is_rewritten_between_its_markers_only(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = tmp_path / "d.md"
    document.write_text("before\n<!-- known: formats -->\nold\n| rows |\n<!-- /known -->\nafter\n")
    assert run(capsys, "known", "--write", document)[0] == 0
    text = document.read_text()
    assert text == f"before\n<!-- known: formats -->\n{TABLES['formats']().markdown()}\n<!-- /known -->\nafter\n"
    assert run(capsys, "known", "--write", document)[0] == 0 and document.read_text() == text


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("no marker\n", "a marker is missing"),
        ("<!-- known: colours -->\nx\n<!-- /known -->\n", "names colours"),
        ("<!-- known: formats -->\nx\n", "is not closed"),
        ("<!-- known: formats -->\nx\n<!-- known: families -->\ny\n<!-- /known -->\n", "is not closed"),
    ],
)
def test_markers_that_make_no_sense_change_nothing(
    text: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OddrankError, match=words):
        rewritten(text)
    document = tmp_path / "d.md"
    document.write_text(text)
    code, out, err = run(capsys, "known", "--write", document)
    assert code == 2 and not out and words in err and document.read_text() == text
