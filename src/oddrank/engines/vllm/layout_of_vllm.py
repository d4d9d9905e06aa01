"""Does the installed vLLM have the places where the plugin hooks in? Asked before anything is installed."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any, NamedTuple

from oddrank.engines.vllm import patches
from oddrank.errors import OddrankError


class Place(NamedTuple):
    """A place in vLLM. kind: "extension point" or "patch". problem: why it cannot be used, None where it can."""

    name: str
    kind: str
    what: str
    problem: str | None


def version() -> str | None:
    """vLLM's version, None where it is not installed."""
    try:
        found = getattr(importlib.import_module("vllm"), "__version__", None)
    except ImportError:
        return None
    return None if found is None else str(found)  # a mere folder of that name imports too


def places() -> list[Place]:
    """Every place the plugin uses, in the order of installation."""
    config, loader = "vllm.model_executor.models.config", "vllm.model_executor.model_loader"
    embedding = "vllm.model_executor.layers.vocab_parallel_embedding"
    return [
        _place(
            f"{config}.MODELS_CONFIG_MAP", "plans the served model just before vLLM checks its heads",
            lambda m: None if isinstance(m, dict) and m else "it is no dict of architectures",
        ),
        _place(
            f"{config}.VerifyAndUpdateConfig", "what an entry of the map must be",
            lambda c: None if callable(getattr(c, "verify_and_update_config", None)) else
            "it has no verify_and_update_config",
        ),
        _place(
            "vllm.config.ModelConfig", "where the changed config is read again",
            lambda c: None if callable(getattr(c, "get_model_arch_config", None)) else
            "it has no get_model_arch_config",
        ),
        _place(f"{loader}.register_model_loader", "streams the weights as the plan lays them out", _callable),
        _place(
            f"{loader}.default_loader.DefaultModelLoader", "the loader that is extended",
            lambda c: None if callable(getattr(c, "get_all_weights", None)) else "it has no get_all_weights",
        ),
        _place(
            "vllm.model_executor.layers.linear.ColumnParallelLinear",
            "replicates a gathered layer that does not divide",
            _registers,
        ),
        _place(f"{embedding}.VocabParallelEmbedding", "pads the vocabulary in vLLM's own buffers", _registers),
        _place(f"{embedding}.ParallelLMHead", "pads the vocabulary in vLLM's own buffers", _registers),
        Place("vllm.config.speculative.SpeculativeConfig.__post_init__", "patch",
              "plans a draft model with its target", patches.drafter_problem()),
    ]  # fmt: skip


def require() -> None:
    """Raises OddrankError naming every place that is missing."""
    missing = [p for p in places() if p.problem is not None]
    if missing:
        known = ", ".join(f"{v}.x" for v in patches.KNOWN)
        raise OddrankError(
            f"this vLLM ({version()}) is laid out in a way that oddrank's plugin does not know: "
            f"{'; '.join(f'{p.name}: {p.problem}' for p in missing)}. Nothing was installed. The plugin was written "
            f"for vLLM {known}; serve with ODDRANK=0, or pad the checkpoint on disk with `oddrank pad`."
        )


def _place(name: str, what: str, problem: Callable[[Any], str | None]) -> Place:
    module, _, attribute = name.rpartition(".")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        return Place(name, "extension point", what, str(error))
    return Place(name, "extension point", what, problem(found))


def _callable(found: Any) -> str | None:
    return None if callable(found) else "it cannot be called"


def _registers(found: Any) -> str | None:
    return None if callable(getattr(found, "register_oot", None)) else "it has no register_oot"
