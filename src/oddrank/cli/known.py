"""`oddrank known`: the families and formats that are known."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec


@click.command("known", short_help="The families and formats that are known")
@click.argument("what", required=False, type=click.Choice(["families", "formats"]))
@click.option("--markdown", is_flag=True, help="Print Markdown.")
@click.option("--write", type=click.Path(), help="Write the tables between the markers of this document.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def command(what: str | None, markdown: bool, write: str | None, as_json: bool) -> None:
    """Families and storage formats as their registries have them, and whether the runtime serves each."""
    from rich.console import Console
    from rich.table import Table

    from oddrank.known import TABLES, rewritten

    if write is not None:
        document = Path(write)
        document.write_text(rewritten(document.read_text()))
        return
    tables = {name: make() for name, make in TABLES.items() if what in (None, name)}
    if as_json:
        named = {
            name: [dict(zip(t.header, (cell.replace("`", "") for cell in row), strict=True)) for row in t.rows]
            for name, t in tables.items()
        }
        click.echo(msgspec.json.encode(named))
        return
    for table in tables.values():
        if markdown:
            click.echo(table.markdown() + "\n")
            continue
        shown = Table(box=None, pad_edge=False, header_style="bold")
        for column in table.header:
            shown.add_column(column, overflow="fold")
        for row in table.rows:
            shown.add_row(*(cell.replace("`", "") for cell in row))
        Console(highlight=False, markup=False).print(shown)
        click.echo()
