"""Run by vLLM's own Python (tests/vllm/test_vllm_inside.py starts it): vLLM with and without the plugin, no engine."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import tiny_models
import vllm.plugins
from vllm.config.speculative import SpeculativeConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.custom_op import op_registry_oot
from vllm.model_executor.model_loader import _LOAD_FORMAT_TO_MODEL_LOADER
from vllm.model_executor.models.config import MODELS_CONFIG_MAP


class Places(NamedTuple):
    """What the four places hold that the plugin writes to."""

    models: dict[str, Any]
    loaders: dict[str, Any]
    layers: dict[str, Any]
    drafters: Any

    def differences(self, other: "Places") -> list[str]:
        """Where `other` does not hold the very same objects."""
        found = [] if self.drafters is other.drafters else ["SpeculativeConfig.__post_init__"]
        for name, mine, its in zip(self._fields, self[:3], other[:3], strict=False):
            found += [f"{name}[{key}]" for key in {*mine, *its} if mine.get(key) is not its.get(key)]
        return found


def places() -> Places:
    return Places(
        dict(MODELS_CONFIG_MAP), dict(_LOAD_FORMAT_TO_MODEL_LOADER), dict(op_registry_oot),
        SpeculativeConfig.__dict__["__post_init__"],
    )  # fmt: skip


STOCK = places()


def back_to_stock() -> None:
    for registry, stock in zip((MODELS_CONFIG_MAP, _LOAD_FORMAT_TO_MODEL_LOADER, op_registry_oot), STOCK, strict=False):
        registry.clear()
        registry.update(stock)
    SpeculativeConfig.__post_init__ = STOCK.drafters
    vllm.plugins.plugins_loaded = False
    if "oddrank.engines.vllm.hooks" in sys.modules:
        sys.modules["oddrank.engines.vllm.hooks"]._installed = False


@pytest.fixture
def stock() -> Iterator[Places]:
    """vLLM as it came, plugins not loaded yet; and again so afterwards."""
    back_to_stock()
    yield STOCK
    back_to_stock()


@pytest.fixture
def planned(stock: Places, monkeypatch: pytest.MonkeyPatch) -> Places:
    """vLLM with its plugins loaded and the switch on."""
    monkeypatch.setenv("ODDRANK", "1")
    vllm.plugins.load_general_plugins()
    return places()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """tiny("qwen3", num_attention_heads=12): the folder of such a model, written once."""
    written: dict[str, Path] = {}

    def folder(model_type: str, **changes: Any) -> Path:
        key = repr((model_type, sorted(changes.items())))
        if key not in written:
            written[key] = tiny_models.write_tiny(model_type, tmp_path_factory.mktemp(model_type) / "model", **changes)
        return written[key]

    return folder


@pytest.fixture
def configured() -> Callable[..., Any]:
    """configured(folder, 3): the VllmConfig of a serve of `folder` on three ranks, everything checked."""

    def config(folder: Path, ranks: int, **arguments: Any) -> Any:
        given = {"dtype": "float32", "enforce_eager": True, "skip_tokenizer_init": True, "max_model_len": 128}
        return EngineArgs(model=str(folder), tensor_parallel_size=ranks, **(given | arguments)).create_engine_config()

    return config
