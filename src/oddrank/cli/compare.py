"""`oddrank compare`: two servings side by side."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from oddrank.cli.number import Number
from oddrank.errors import CheckFailedError, OddrankError
from oddrank.words import counted

if TYPE_CHECKING:
    from oddrank.verify.served.answers import Capture
    from oddrank.verify.served.compare import Comparison, Pair


@click.command("compare", short_help="Compare what two servers answer")
@click.argument("a")
@click.argument("b")
@click.option(
    "--suite", "suite_name", metavar="short|long|FILE", help="For URLs; by default the other side's prompts, or short."
)
@click.option("--model-a", help="Its name at A, where that is a URL.")
@click.option("--model-b", help="Its name at B, where that is a URL.")
@click.option("--api", type=click.Choice(("auto", "chat", "completions")), help="For URLs, as for `oddrank capture`.")
@click.option("--api-key", envvar="OPENAI_API_KEY", help="For URLs; by default $OPENAI_API_KEY.")
@click.option(
    "--concurrency", type=click.IntRange(1, 512), default=1, show_default=True, help="For URLs: prompts at a time."
)
@click.option(
    "--near-tie",
    type=Number(min=0),
    default=0.5,
    show_default=True,
    metavar="NATS",
    help="How far apart two candidates may be, on either side, for their difference to be rounding.",
)
@click.option(
    "--max-kl",
    type=Number(min=0),
    default=0.005,
    show_default=True,
    metavar="NATS",
    help="How much KL divergence a token may be rounding, as a mean over all that both said. The default is "
    "for half precision; 1e-7 is enough where both sides compute in fp32, and finds far smaller faults.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@click.option("--html", type=click.Path(dir_okay=False), help="Write a page with the answers side by side.")
def command(
    a: str, b: str, suite_name: str | None, model_a: str | None, model_b: str | None, api: str | None,
    api_key: str | None, concurrency: int, near_tie: float, max_kl: float, as_json: bool, html: str | None,
) -> None:  # fmt: skip
    """Compare A and B: files of `oddrank capture`, or URLs of servers, which are asked now.

    For each prompt: identical, a near tie, or diverged, with the first token that differs, what came before it, by
    how much either side preferred its own, and how far apart their distributions were so far. Exit code 1 where they
    differ by more than rounding.
    """
    from oddrank.verify.served.compare import Tolerance, compare

    if html is not None and not Path(html).parent.is_dir():
        raise OddrankError(f"{html} cannot be written: there is no directory {Path(html).parent}.")
    first, second = _sides((a, model_a), (b, model_b), suite_name, api, api_key, concurrency)
    found = compare(first, second, Tolerance(near_tie, max_kl))
    if html is not None:
        from oddrank.checkpoint.wholefile import write_whole
        from oddrank.verify.served.page import page

        write_whole(Path(html), page(first, second, found).encode())
    if as_json:
        click.echo(msgspec.json.encode(found))
    else:
        _show(found)
    if not found.ok:
        raise CheckFailedError(_why(found))


def _sides(
    a: tuple[str, str | None], b: tuple[str, str | None], suite_name: str | None, api: str | None, key: str | None,
    concurrency: int,
) -> tuple[Capture, Capture]:  # fmt: skip
    from oddrank.verify.served.answers import read_capture
    from oddrank.verify.served.client import capture
    from oddrank.verify.served.suites import suite

    files = [read_capture(Path(where)) if not _is_url(where) else None for where, _ in (a, b)]
    if suite_name is not None and None not in files:
        raise OddrankError("--suite is for URLs, and both sides are files: their prompts are in them.")
    given = next((f for f in files if f is not None), None)
    if given is not None and suite_name is None:
        prompts, name, asked = given.prompts, given.suite, api or given.api
    else:
        name = suite_name or "short"
        prompts, asked = suite(name), api or (given.api if given is not None else "auto")
    found: list[Capture] = []
    for file, (where, model) in zip(files, (a, b), strict=True):
        if file is None:
            file = capture(where, prompts, suite=name, model=model, api=asked, key=key, concurrency=concurrency)
            asked = file.api  # the other side is asked the same way
        found.append(file)
    return found[0], found[1]


def _is_url(where: str) -> bool:
    return where.startswith(("http://", "https://"))


def _show(found: Comparison) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    out = Console(highlight=False)
    out.print(Text(f"A: {found.a}\nB: {found.b}"))
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for column, width in (("prompt", 16), ("outcome", None), ("at", None), ("A", 12), ("B", 12)):
        table.add_column(column, max_width=width, no_wrap=True)
    for column in ("margins", "answer", "KL"):
        table.add_column(column, no_wrap=True)
    colours = {"identical": "green", "near tie": "yellow"}
    for pair in found.pairs:
        d = pair.divergence
        table.add_row(
            Text(pair.name),
            Text(pair.status, colours.get(pair.status, "red")),
            "" if d is None else str(d.at) if d.unit == "token" else f"char {d.at}",
            Text(repr(d.a) if d else ""),
            Text(repr(d.b) if d else ""),
            _margins(pair),
            "" if pair.status == "failed" else "same" if pair.same_answer else "differs",
            "" if pair.kl is None else f"{pair.kl:.2g}",
        )
    out.print(table)
    for pair in found.pairs:
        d = pair.divergence
        if d is not None:
            context = d.context.replace("\n", "⏎")
            out.print(Text(f"{pair.name}: ...{context}", "dim"), Text(f"A {d.a!r} | B {d.b!r}"))
        if pair.why:
            out.print(Text(f"{pair.name}: {pair.why}"))
    kl = "" if found.kl is None else f"; KL(A || B) at least {found.kl:.2g} nats a token over {found.kl_tokens}"
    counts = f"{found.identical} identical, {counted(found.near_ties, 'near tie')}, {found.diverged} diverged"
    out.print(f"{counts}, {found.failed} failed{kl}")


def _margins(pair: Pair) -> str:
    d = pair.divergence
    if d is None:
        return ""
    if d.margin_a is None and d.margin_b is None:
        return "not told"
    sides = ((d.margin_a, d.at_least_a), (d.margin_b, d.at_least_b))
    return " / ".join("?" if m is None else f"{'>= ' if at_least else ''}{m:.2f}" for m, at_least in sides)


def _why(found: Comparison) -> str:
    """Why two servings are not the same: the prompt that parts with the largest margin, and the distributions."""
    parts = []
    bad = [p for p in found.pairs if p.status in ("diverged", "failed")]
    if bad:
        worst = max(bad, key=_worst)
        count = f"{found.diverged} of {counted(len(found.pairs), 'prompt')} diverged beyond a near tie"
        if found.failed:
            count += f" and {found.failed} got no answer"
        d = worst.divergence
        if d is None or d.near_tie:
            parts.append(f"{count}; {worst.name}: {worst.why}")
        else:
            where = f"{worst.name} at {d.unit} {d.at}: {d.a!r} against {d.b!r}, margins {_margins(worst)} nats"
            parts.append(f"{count}; {where}")
    return ". ".join([*parts, *([found.why] if found.why else [])]) + "."


def _worst(pair: Pair) -> tuple[bool, float, float]:
    """Orders those that differ: first that there is no answer, then by margin, then by KL."""
    d = pair.divergence
    margins = [m for m in (d.margin_a, d.margin_b) if m is not None] if d is not None and not d.near_tie else []
    return pair.status == "failed", max(margins, default=0.0), pair.kl or 0.0
