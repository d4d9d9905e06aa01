"""The demo's comparison and exit codes, with canned answers in place of the commands."""

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from oddrank.demo import __main__ as demo
from oddrank.errors import CheckFailedError, OddrankError


class Canned:
    """Answers `oddrank` commands: `tokens` maps a size to its token ids, any other size gets [5, 6, 7]."""

    def __init__(self, tokens: dict[str, list[int]] | None = None) -> None:
        self.tokens = tokens or {}
        self.asked: list[list[str]] = []

    def __call__(self, arguments: Sequence[str]) -> str:
        self.asked.append(list(arguments))
        if arguments[0] == "plan":
            return "the plan table\n"
        tp = arguments[arguments.index("--tp") + 1]
        ids = self.tokens.get(tp, [5, 6, 7])
        answer = {"text": f"[b]text of {tp}", "token_ids": ids, "tp": int(tp), "seconds": 2.0}
        return json.dumps({**answer, "tokens_per_second": 12.345, "more": None})


def shown(command: Canned) -> str:
    console = Console(width=100, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    try:
        demo.demonstrate(console, command, Path("M"), (2, 3), "Hello", 48)
    finally:
        text = console.export_text()
    return text


def test_the_commands_of_a_user() -> None:
    command = Canned()
    text = shown(command)
    assert command.asked[0] == ["plan", "M", "--tp", "2-3"]
    tail = ["--prompt", "Hello", "--max-tokens", "48", "--json"]
    assert command.asked[1:] == [["generate", "M", "--tp", tp, *tail] for tp in ("1", "2", "3")]
    for expected in ("the plan table", "[b]text of 1", "[b]text of 3", "12.3", "All 3 tokens are the same"):
        assert expected in text


@pytest.mark.parametrize(
    ("ids", "said"),
    [
        ([5, 9, 7], "TP=3, no: token 1 is 9, was 6"),
        ([5, 6], "TP=3, no: token 2 is end, was 7"),
        ([5, 6, 7, 8], "TP=3, no: token 3 is 8, was end"),
    ],
)
def test_a_difference_is_named(ids: list[int], said: str) -> None:
    with pytest.raises(CheckFailedError, match=f"1 of 2 sizes .*{said}"):
        shown(Canned({"3": ids}))


@pytest.mark.parametrize(("ids", "code"), [([5, 6, 7], 0), ([5, 6, 8], 1)])
def test_exit_code(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ids: list[int], code: int) -> None:
    monkeypatch.setattr(demo, "run_oddrank", Canned({"2": ids}))
    result = CliRunner().invoke(demo.main, ["--model", str(tmp_path), "--tp", "2"])
    assert result.exit_code == code


@pytest.mark.parametrize("sizes", ["1", "5-2", "two", "0-3"])
def test_bad_sizes(sizes: str) -> None:
    result = CliRunner().invoke(demo.main, ["--tp", sizes])
    assert result.exit_code == 2
    assert "is not a size of at least 2" in result.output


def test_a_failing_command_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OddrankError, match=r"`oddrank plan .* left with exit code [12]: "):
        demo.run_oddrank(["plan", str(tmp_path / "absent"), "--tp", "2"])


def test_output_that_is_not_the_json(tmp_path: Path) -> None:
    with pytest.raises(OddrankError, match="printed no such JSON"):
        demo.generate(lambda _arguments: '{"text": 1}', tmp_path, 2, "Hello", 4)
