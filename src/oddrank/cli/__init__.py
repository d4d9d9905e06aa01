"""The `oddrank` command. One file a command; each is imported only when it is called."""

from __future__ import annotations

import errno
import importlib
import signal
import sys
from contextlib import suppress

import click

from oddrank import __version__
from oddrank.errors import OddrankError

COMMANDS = {
    "plan": "How a model is laid out over N ranks, what it costs, and the proof",
    "check": "Coverage: every tensor, its role, its format, its old and new shape",
    "pad": "Write the plan's virtual checkpoint to disk",
    "generate": "Generate text with the runtime, one process per rank",
    "verify": "Compare logits at TP=N, and of the padded checkpoint, with transformers on the original",
    "vllm": "Serve with vLLM at any tensor-parallel size, and see what the plugin finds there",
    "serve": "Serve a model behind an OpenAI-compatible API",
    "capture": "Keep what a served model answers to a suite of prompts",
    "compare": "Compare what two servers answered: where they part, and whether it matters",
    "known": "The families and formats that are known, from their registries",
    "synth": "Write a checkpoint with a published model's geometry and random values",
}


class _Lazy(click.Group):
    """Commands by name: `oddrank plan` imports oddrank.cli.plan and nothing of the others."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command = importlib.import_module(f"oddrank.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl(list(COMMANDS.items()))


@click.group(cls=_Lazy, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="oddrank")
def group() -> None:
    """Run any LLM checkpoint at any tensor-parallel size, and prove that it computes the same thing.

    Exit codes: 0 ok, 1 a check failed, 2 bad usage or input.
    """


def main() -> None:
    """Entry point. Every foreseen error is one paragraph on stderr, never a traceback."""
    with suppress(ValueError):  # not the main thread: whoever runs it there handles its signals
        # so that what is being cleaned up on the way out is, when a supervisor stops it
        signal.signal(signal.SIGTERM, _terminate)
    try:
        group.main(standalone_mode=False)
    except click.exceptions.Exit as stop:
        sys.exit(stop.exit_code)
    except click.ClickException as error:
        error.show()
        sys.exit(2)
    except OddrankError as error:
        _fail(str(error), error.exit_code)
    except _TerminatedError:
        _fail("ended by SIGTERM.", 143)
    except (KeyboardInterrupt, click.exceptions.Abort):
        _fail("interrupted.", 130)
    except BrokenPipeError:
        # the reader of our output has gone; nothing more can be said there, not even at interpreter exit
        sys.stdout = None
        sys.exit(141)
    except MemoryError:
        _fail("out of memory.", 2)
    except OSError as error:
        where = f"{error.filename}: " if error.filename else ""
        full = " Free some space and run the same command again." if error.errno == errno.ENOSPC else ""
        _fail(f"{where}{error.strerror or error}.{full}", 2)


class _TerminatedError(SystemExit):
    """SIGTERM, where a command does not handle it."""


def _terminate(*_: object) -> None:
    raise _TerminatedError(143)


def _fail(message: str, code: int) -> None:
    click.echo(f"oddrank: {message}", err=True)
    sys.exit(code)
