"""Tests of the vLLM plugin. Those that need vLLM run it in an environment of its own: `.venv-vllm`, or VLLM_PYTHON."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_models import write_tiny
from vllm_runs import ROOT, Vllm

collect_ignore = ["inside"]  # collected by vLLM's own Python, see test_vllm_inside.py

NEEDED = """
import importlib.util, pathlib, sys
missing = [m for m in ("vllm", "openai", "pytest", "oddrank") if importlib.util.find_spec(m) is None]
if missing:
    sys.exit("has no " + ", ".join(missing))
if pathlib.Path(sys.argv[1]) not in pathlib.Path(importlib.util.find_spec("oddrank").origin).resolve().parents:
    sys.exit("has oddrank of another checkout")
"""


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory) -> Vllm:
    """vLLM in its own environment. Without one: a skip, and a failure where VLLM_REQUIRED says it must be there."""
    python = Path(os.environ.get("VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python").absolute()
    problem = _problem(python)
    if problem is not None and os.environ.get("VLLM_REQUIRED"):
        pytest.fail(f"{problem}, and VLLM_REQUIRED is set", pytrace=False)
    if problem is not None:
        pytest.skip(f"{problem}; `make install-vllm` makes one, VLLM_PYTHON names another")
    return Vllm(python, tmp_path_factory.mktemp("vllm"))


def _problem(python: Path) -> str | None:
    if not python.is_file():
        return f"no vLLM environment: {python} is not there"
    found = subprocess.run([python, "-I", "-c", NEEDED, ROOT], capture_output=True, text=True)
    return None if found.returncode == 0 else f"no vLLM environment: {python} {found.stderr.strip()}"


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny("qwen3", num_attention_heads=12): the folder of such a model, written once, so stock answers are kept."""
    written: dict[str, Path] = {}

    def folder(model_type: str, *dtype: Any, **changes: Any) -> Path:
        key = repr((model_type, dtype, sorted(changes.items())))
        if key not in written:
            written[key] = write_tiny(model_type, tmp_path_factory.mktemp(model_type) / "model", *dtype, **changes)
        return written[key]

    return folder
