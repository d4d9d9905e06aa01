"""`oddrank vllm`, where vLLM is missing and where something small stands in for it."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest

SHOW = "import json, os, sys\nprint(json.dumps([sys.argv, {k: v for k, v in os.environ.items() if 'ODDRANK' in k}]))\n"


class Ran(NamedTuple):
    code: int
    out: str
    err: str


def oddrank(at: Path, *arguments: str, **environment: str) -> Ran:
    """`python -m oddrank vllm arguments`, with the packages in `at` importable."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ODDRANK", "VLLM_", "PYTHONPATH"))}
    ended = subprocess.run(
        [sys.executable, "-m", "oddrank", "vllm", *arguments],
        env=kept | {"PYTHONPATH": str(at), "COLUMNS": "200"} | environment,
        capture_output=True,
        text=True,
        cwd=at,
    )
    return Ran(ended.returncode, ended.stdout, ended.stderr)


def served(ran: Ran) -> tuple[list[str], dict[str, str]]:
    assert ran.code == 0, ran.err
    arguments, environment = json.loads(ran.out)
    return arguments, environment


@pytest.fixture
def no_vllm(tmp_path: Path) -> Path:
    return tmp_path


@pytest.fixture
def build(tmp_path: Path) -> Path:
    """A vLLM whose distribution has another name, so that its own command does not start."""
    for package, module in (("", ""), ("entrypoints", ""), ("entrypoints/openai", "api_server"),
                            ("entrypoints/cli", "main")):  # fmt: skip
        folder = tmp_path / "vllm" / package
        folder.mkdir(exist_ok=True)
        (folder / "__init__.py").write_text("__version__ = '0.0'\n")
        if module:
            (folder / f"{module}.py").write_text(f"print(end='')\n{SHOW}")
    return tmp_path


@pytest.fixture
def release(build: Path) -> Path:
    """A vLLM under its own name."""
    (build / "vllm-0.0.dist-info").mkdir()
    (build / "vllm-0.0.dist-info" / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.0\n")
    return build


def test_every_argument_but_its_own_is_vllms(release: Path) -> None:
    given = ("some/model", "--tensor-parallel-size", "3", "-O2", "--help", "--no-x", "--hf-overrides", '{"a": 1}')
    arguments, environment = served(oddrank(release, "serve", *given, "--oddrank-layout", "replicate"))
    assert arguments[1:] == ["serve", *given]
    assert environment == {"ODDRANK": "1", "ODDRANK_LAYOUT": "replicate"}


def test_another_build_gets_the_model_as_an_option(build: Path) -> None:
    arguments, environment = served(oddrank(build, "serve", "some/model", "--port", "80"))
    assert arguments[1:] == ["--model", "some/model", "--port", "80"]
    assert environment == {"ODDRANK": "1"}
    arguments, _ = served(oddrank(build, "serve", "--model", "some/model"))
    assert arguments[1:] == ["--model", "some/model"]
    arguments, _ = served(oddrank(build, "serve"))
    assert arguments[1:] == []


def test_options_become_variables(release: Path) -> None:
    arguments, environment = served(
        oddrank(release, "serve", "--oddrank-plan-tp", "6", "m", "--oddrank-constraint", "gqa=6", "--oddrank-drafter",
                "off", "--oddrank-constraint", "mlp_multiple=64", "--oddrank-coverage=warn")
    )  # fmt: skip
    assert arguments[1:] == ["serve", "m"]
    assert environment == {
        "ODDRANK": "1",
        "ODDRANK_PLAN_TP": "6",
        "ODDRANK_CONSTRAINTS": "gqa=6,mlp_multiple=64",
        "ODDRANK_DRAFTER": "off",
        "ODDRANK_COVERAGE": "warn",
    }


def test_an_option_wins_over_its_variable_and_the_command_over_the_switch(release: Path) -> None:
    _, environment = served(
        oddrank(release, "serve", "m", "--oddrank-layout", "pad", ODDRANK="0", ODDRANK_LAYOUT="replicate",
                ODDRANK_DRAFTER="off")
    )  # fmt: skip
    assert environment == {"ODDRANK": "1", "ODDRANK_LAYOUT": "pad", "ODDRANK_DRAFTER": "off"}


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["--oddrank-layout", "ragged"], {}, "--oddrank-layout"),
        (["--oddrank-plan-tp", "0"], {}, "--oddrank-plan-tp"),
        (["--oddrank-constraint", "gqa"], {}, "gqa"),
        (["--oddrank-drafter", "maybe"], {}, "--oddrank-drafter"),
        (["--oddrank-coverage", "off"], {}, "--oddrank-coverage"),
        ([], {"ODDRANK_LAYOUT": "diagonal"}, 'ODDRANK_LAYOUT="diagonal"'),
        ([], {"ODDRANK_SPEED": "11"}, "ODDRANK_SPEED"),
        ([], {"VLLM_PLUGINS": "another"}, 'VLLM_PLUGINS="another"'),
        ([], {"VLLM_PLUGINS": ""}, 'VLLM_PLUGINS=""'),
    ],
)
def test_a_serve_that_makes_no_sense_does_not_start(
    release: Path, arguments: list[str], environment: dict[str, str], said: str
) -> None:
    ran = oddrank(release, "serve", "m", *arguments, **environment)
    assert (ran.code, ran.out) == (2, "") and said in ran.err


def test_a_list_of_plugins_with_this_one_is_fine(release: Path) -> None:
    served(oddrank(release, "serve", "m", VLLM_PLUGINS="another,oddrank"))


def test_serving_without_vllm(no_vllm: Path) -> None:
    ran = oddrank(no_vllm, "serve", "m")
    assert ran.code == 2 and ran.out == ""
    assert "vLLM is not installed in this Python environment" in ran.err and "Traceback" not in ran.err


@pytest.mark.parametrize("folder", [None, "vllm"])
def test_doctor_without_vllm(no_vllm: Path, folder: str | None) -> None:
    """A folder of that name, such as a clone's, is no vLLM."""
    if folder is not None:
        (no_vllm / folder).mkdir()
    found = examined(oddrank(no_vllm, "doctor", "--json"), 1)
    assert found["ok"] is False and found["would_install"] is False
    assert found["versions"]["vllm"] is None and found["places"] == []
    assert "vLLM is not installed in this Python environment" in found["problems"]
    ran = oddrank(no_vllm, "doctor")
    assert ran.code == 1 and "problem: vLLM is not installed" in ran.out and "Traceback" not in ran.err
    assert oddrank(no_vllm, "serve", "m").code == 2


def test_doctor_of_a_vllm_it_does_not_know(release: Path) -> None:
    found = examined(oddrank(release, "doctor", "--json", ODDRANK="1"), 1)
    assert found["versions"]["vllm"] == "0.0" and found["known_version"] is False
    assert found["places"] and not any(p["found"] for p in found["places"])
    assert found["on"] is True and found["would_install"] is False


def test_doctor_names_a_setting_that_makes_no_sense(release: Path) -> None:
    found = examined(oddrank(release, "doctor", "--json", ODDRANK="1", ODDRANK_DRAFTER="maybe"), 1)
    assert any('ODDRANK_DRAFTER="maybe"' in problem for problem in found["problems"])
    assert found["settings"] == {"ODDRANK": "1", "ODDRANK_DRAFTER": "maybe"}


def examined(ran: Ran, code: int) -> dict[str, Any]:
    assert ran.code == code, ran.err
    found: dict[str, Any] = json.loads(ran.out)
    return found


def test_an_unknown_subcommand(no_vllm: Path) -> None:
    assert oddrank(no_vllm, "serv").code == 2
