"""tests/gpu/interpreted, in a process of its own: Triton looks at TRITON_INTERPRET when it is imported."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def interpreted(marked: str) -> None:
    if importlib.util.find_spec("triton") is None:
        pytest.skip("Triton is not installed; there are builds for Linux only")
    command = [sys.executable, "-m", "pytest", HERE / "interpreted", "-m", marked]
    command += ["-p", "no:cacheprovider", "--tb=short"]
    ended = subprocess.run(
        command, env=os.environ | {"TRITON_INTERPRET": "1"}, cwd=HERE.parents[1], capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout[-20_000:] + ended.stderr[-5_000:]
    assert " passed" in ended.stdout.splitlines()[-1] and "skipped" not in ended.stdout.splitlines()[-1]


def test_kernels_in_the_interpreter() -> None:
    interpreted("not long")


@pytest.mark.long
def test_models_in_the_interpreter() -> None:
    interpreted("long")
