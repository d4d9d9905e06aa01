"""`oddrank capture`: what a server answers to a suite of prompts, as a file."""

from __future__ import annotations

from pathlib import Path

import click

from oddrank.cli.number import Number
from oddrank.errors import CheckFailedError, OddrankError
from oddrank.words import counted


@click.command("capture", short_help="Keep what a server answers to a suite of prompts")
@click.argument("url")
@click.option(
    "--suite",
    "suite_name",
    default="short",
    show_default=True,
    metavar="short|long|FILE",
    help="Ten short prompts, five of 512 tokens, or a .json, .jsonl or text file of prompts.",
)
@click.option("--concurrency", type=click.IntRange(1, 512), default=1, show_default=True, help="Prompts at a time.")
@click.option("-o", "--output", type=click.Path(dir_okay=False), required=True, help="The file to write.")
@click.option("--model", help="Its name there; by default the first that the server lists.")
@click.option(
    "--api",
    type=click.Choice(("auto", "chat", "completions")),
    default="auto",
    show_default=True,
    help="What to ask: by default chat, where the server has it.",
)
@click.option("--api-key", envvar="OPENAI_API_KEY", help="Sent as a bearer token; by default $OPENAI_API_KEY.")
@click.option(
    "--timeout",
    type=Number(min=0, min_open=True),
    default=600.0,
    show_default=True,
    metavar="SECONDS",
    help="For one answer.",
)
def command(
    url: str, suite_name: str, concurrency: int, output: str, model: str | None, api: str, api_key: str | None,
    timeout: float,
) -> None:  # fmt: skip
    """Ask the OpenAI-compatible server at URL a suite of prompts, greedily, and keep its answers whole: reasoning,
    text, and where it tells them token ids and logprobs. `oddrank compare` compares two such files. Exit code 1 where
    some prompt was not answered."""
    from oddrank.verify.served.answers import Answer, write_capture
    from oddrank.verify.served.client import capture
    from oddrank.verify.served.suites import suite

    path = Path(output)
    if not path.parent.is_dir():
        raise OddrankError(f"{path} cannot be written: there is no directory {path.parent}.")
    prompts = suite(suite_name)
    done = 0

    def tell(answer: Answer) -> None:
        nonlocal done
        done += 1
        said = (
            answer.error
            or f"{counted(answer.completion_tokens or len(answer.tokens), 'token')}, {answer.seconds:.1f} s"
        )
        click.echo(f"{done}/{len(prompts)} {answer.prompt.name}: {said}", err=True)

    found = capture(
        url, prompts, suite=suite_name, model=model, api=api, key=api_key, concurrency=concurrency, timeout=timeout,
        on_answer=tell,
    )  # fmt: skip
    write_capture(found, path)
    failed = [answer for answer in found.answers if answer.error]
    told = (("token ids", any(a.with_ids for a in found.answers)),
            ("logprobs", any(t.top for a in found.answers for t in a.tokens)))  # fmt: skip
    kept = " and ".join(name for name, there in told if there) or "text alone"
    click.echo(
        f"{path}: {counted(len(found.answers) - len(failed), 'answer')} of {found.model}, {found.api}, with {kept}"
    )
    if failed:
        raise CheckFailedError(
            f"{len(failed)} of {counted(len(found.answers), 'prompt')} got no answer; the first of them, "
            f"{failed[0].prompt.name}: {failed[0].error}"
        )
