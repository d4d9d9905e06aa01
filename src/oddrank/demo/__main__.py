"""The demonstration: `python -m oddrank.demo`, or `make demo`.

SmolLM2-135M-Instruct has 9 query and 3 KV heads, so an engine that needs the same number of whole heads on
every rank can't serve it at 2, 4 or 5 ranks. It is fetched, planned for each size and run at each, every rank
a process of its own, by the commands a user would type; the texts are compared with that of a single rank.
"""

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import click
import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from oddrank.demo.smollm2 import DEFAULT_OUT, ensure_model
from oddrank.errors import CheckFailedError, OddrankError

DEFAULT_PROMPT = "Once upon a time"


class Generation(msgspec.Struct, frozen=True):
    """What the demo reads of `oddrank generate --json`."""

    tp: int
    text: str
    token_ids: list[int]
    tokens_per_second: float


Command = Callable[[Sequence[str]], str]
"""Runs `oddrank` with these arguments and returns its standard output."""


def run_oddrank(arguments: Sequence[str]) -> str:
    """Runs the command line in a process of its own; OddrankError with its last words if it fails."""
    command = [sys.executable, "-m", "oddrank", *arguments]
    environment = {
        "ODDRANK_LOG": "warning",  # an error's last words are its own
        **os.environ,
        "COLUMNS": str(shutil.get_terminal_size().columns),
    }
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode != 0:
        said = done.stderr.strip() or done.stdout.strip() or "it said nothing"
        raise OddrankError(f"`oddrank {shlex.join(arguments)}` left with exit code {done.returncode}: {said}")
    return done.stdout


def generate(command: Command, model: Path, tp: int, prompt: str, max_tokens: int) -> Generation:
    """Greedy text of `model` over `tp` ranks."""
    arguments = ["generate", str(model), "--tp", str(tp), "--prompt", prompt]
    out = command([*arguments, "--max-tokens", str(max_tokens), "--json"])
    try:
        return msgspec.json.decode(out, type=Generation)
    except msgspec.DecodeError as error:
        raise OddrankError(f"`oddrank generate --tp {tp} --json` printed no such JSON: {error}") from error


def first_difference(reference: Sequence[int], other: Sequence[int]) -> int | None:
    """Index of the first token at which two sequences part, None if they are the same.

    Where one is the beginning of the other they part where the shorter one ends.
    """
    for i, (a, b) in enumerate(zip(reference, other, strict=False)):
        if a != b:
            return i
    return None if len(reference) == len(other) else min(len(reference), len(other))


def verdict(reference: Generation, other: Generation) -> str:
    """ "yes", or where the token sequences part and with which ids ("end": there is no token)."""
    at = first_difference(reference.token_ids, other.token_ids)
    if at is None:
        return "yes"
    theirs, ours = (str(ids[at]) if at < len(ids) else "end" for ids in (reference.token_ids, other.token_ids))
    return f"no: token {at} is {ours}, was {theirs}"


def comparison(generations: Sequence[Generation]) -> Table:
    """The texts side by side; the first generation is the reference."""
    reference = generations[0]
    table = Table(show_lines=True)
    table.add_column("TP", justify="right")
    table.add_column("text", ratio=1)
    table.add_column(f"as TP={reference.tp}?")
    table.add_column("tokens/s", justify="right")
    for generation in generations:
        same = "-" if generation is reference else verdict(reference, generation)
        # Text: generated text may contain what rich would read as markup.
        speed = f"{generation.tokens_per_second:.1f}"
        table.add_row(str(generation.tp), Text(generation.text), same, speed)
    return table


def demonstrate(
    console: Console, command: Command, model: Path, sizes: Sequence[int], prompt: str, max_tokens: int
) -> None:
    """Plans and runs `model` at every size; CheckFailedError names the sizes whose text is not TP=1's."""
    console.rule("oddrank plan", align="left")
    console.out(command(["plan", str(model), "--tp", _spell(sizes)]).rstrip(), highlight=False)
    console.rule("oddrank generate, one process per rank", align="left")
    console.print(Text(f"prompt: {prompt!r}, greedy, at most {max_tokens} tokens"))
    generations = []
    for tp in (1, *sizes):
        with console.status(f"generating at TP={tp}"):
            generations.append(generate(command, model, tp, prompt, max_tokens))
    console.print(comparison(generations))
    reference, others = generations[0], generations[1:]
    wrong = [other for other in others if verdict(reference, other) != "yes"]
    if wrong:
        listed = "; ".join(f"TP={other.tp}, {verdict(reference, other)}" for other in wrong)
        raise CheckFailedError(f"{len(wrong)} of {len(others)} sizes do not give the tokens of TP=1: {listed}")
    named = ", ".join(str(tp) for tp in sizes)
    console.print(f"All {len(reference.token_ids)} tokens are the same at TP=1 and at TP={named}.")


def _spell(sizes: Sequence[int]) -> str:
    """ "2-5" for a run of sizes, as `oddrank plan --tp` takes it."""
    return f"{sizes[0]}-{sizes[-1]}" if len(sizes) > 1 else str(sizes[0])


def _parse_sizes(_context: click.Context, _option: click.Parameter, value: str) -> tuple[int, ...]:
    first, _, last = value.partition("-")
    try:
        sizes = tuple(range(int(first), int(last or first) + 1))
    except ValueError:
        sizes = ()
    if not sizes or sizes[0] < 2:
        raise click.BadParameter(f"{value!r} is not a size of at least 2 or a range of them such as 2-5")
    return sizes


@click.command()
@click.option(
    "--model",
    type=click.Path(path_type=Path, file_okay=False),
    help=f"A model directory. Default: {DEFAULT_OUT}, made there if it is missing.",
)
@click.option("--tp", "sizes", default="2-5", show_default=True, callback=_parse_sizes, help="Sizes to run.")
@click.option("--prompt", default=DEFAULT_PROMPT, show_default=True)
@click.option("--max-tokens", type=click.IntRange(min=1), default=48, show_default=True)
def main(model: Path | None, sizes: tuple[int, ...], prompt: str, max_tokens: int) -> None:
    """Run a model at several tensor-parallel sizes and compare the texts with TP=1.

    Exit code 0 if all agree, 1 if one differs, 2 if something could not be run.
    """
    console = Console()
    try:
        if model is None:
            model = DEFAULT_OUT
            with console.status("fetching and converting SmolLM2-135M-Instruct"):
                made = ensure_model(model)
            console.print(f"{model}: {'fetched and converted' if made else 'already there'}", highlight=False)
        demonstrate(console, run_oddrank, model, sizes, prompt, max_tokens)
    except OddrankError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(error.exit_code)


if __name__ == "__main__":
    main()
