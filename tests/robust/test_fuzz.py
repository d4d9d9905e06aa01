"""Loading and planning mutated model directories: see fuzz_run.py, which does it in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from fuzz_planted import PLANTED

RUN = Path(__file__).with_name("fuzz_run.py")
SEED = 8
AT_ONCE = 4000
GROWTH = 128
"""MiB that a run may hold more at its end than after its first tenth. What is cached is bounded; 4000 cases that each
keep a header or two would keep more."""


def fuzz(first: int, count: int, *more: str) -> dict[str, Any]:
    done = subprocess.run(
        [sys.executable, str(RUN), "--seed", str(SEED), "--first", str(first), "--count", str(count), *more],
        capture_output=True,
        text=True,
        timeout=1800,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def growth(found: dict[str, Any]) -> float:
    held: list[float] = found["resident_mib"]
    return held[-1] - held[len(held) // 10]


def sound(found: dict[str, Any], count: int) -> None:
    assert not found["failures"], json.dumps(found["failures"][:3], indent=1).replace("\\n", "\n")
    assert found["cases"] == count == found["refused"] + found["proven"] + found["commands"]
    assert found["refused"] > count // 2 and found["proven"] > count // 20, found
    assert growth(found) < GROWTH, found["resident_mib"]


def test_a_sample() -> None:
    sound(fuzz(0, 400), 400)


@pytest.mark.long
@pytest.mark.parametrize("part", range(25))
def test_a_hundred_thousand(part: int) -> None:
    sound(fuzz(part * AT_ONCE, AT_ONCE), AT_ONCE)


def test_the_same_again() -> None:
    """A case is told by seed and number, wherever a run begins."""
    assert fuzz(10, 20, "--tell")["told"][10:] == fuzz(20, 10, "--tell")["told"]


@pytest.mark.parametrize(
    ("fault", "failures", "noticed"),
    [
        ("anywhere", 10, "outside the model directory: open"),
        ("another_exception", 1, "KeyError"),
        ("hang", 1, "Hung"),
        ("unproven", 1, "AssertionError"),
    ],
)
def test_a_planted_fault_is_noticed(fault: str, failures: int, noticed: str) -> None:
    assert fault in PLANTED
    found = fuzz(0, 800, "--plant", fault, "--enough", str(failures))["failures"]
    failure = next((f for f in found if noticed in f["error"]), None)
    assert failure is not None and len(failure["mutations"]) > 1, found
    if fault == "another_exception":
        _, *arguments = failure["repeat"].split()
        assert arguments[:3:2] == ["--seed", "--first"] and arguments[1] == str(SEED)
        (again,) = fuzz(int(arguments[3]), 1, "--plant", fault, "--enough", "1")["failures"]
        assert again["mutations"] == failure["mutations"]


def test_a_planted_leak_is_noticed() -> None:
    assert growth(fuzz(0, 200, "--plant", "leak")) > GROWTH
