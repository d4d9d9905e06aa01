"""Switched off, the plugin changes nothing in vLLM; switched on, everything is there once; half installed is never."""

import importlib
import pickle
import sys
from types import ModuleType
from typing import Any

import pytest
import vllm.plugins
from conftest import Places, places

import oddrank.engines
from oddrank.engines.vllm import doctor, layout_of_vllm, register
from oddrank.errors import OddrankError

PACKAGE = "oddrank.engines.vllm"


def attributes() -> dict[str, Any]:
    """Every attribute of every loaded module of vLLM, of the classes made there, and the items of its dicts."""
    found: dict[str, Any] = {}
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] != "vllm" or not isinstance(module, ModuleType):
            continue
        for key, value in list(vars(module).items()):
            at = f"{name}.{key}"
            found[at] = value
            if isinstance(value, type) and value.__module__ == name:
                found |= {f"{at}.{k}": v for k, v in vars(value).items()}
            elif isinstance(value, dict):
                found |= {f"{at}[{k!r}]": v for k, v in value.items()}
    return found


def changed(before: dict[str, Any]) -> set[str]:
    after, absent = attributes(), object()
    names = {n for n in {*before, *after} if before.get(n, absent) is not after.get(n, absent)}
    return names - {"vllm.plugins.plugins_loaded"}


@pytest.mark.parametrize("switch", [None, "", "0", "off"])
def test_off_changes_no_attribute_of_vllm(stock: Places, monkeypatch: pytest.MonkeyPatch, switch: str | None) -> None:
    monkeypatch.setattr(oddrank.engines, "vllm", sys.modules[PACKAGE])  # so that the end of the test puts it back
    for name in [n for n in sys.modules if n == PACKAGE or n.startswith(f"{PACKAGE}.")]:
        monkeypatch.delitem(sys.modules, name)
    if switch is not None:
        monkeypatch.setenv("ODDRANK", switch)
        monkeypatch.setenv("ODDRANK_LAYOUT", "pad")
    vllm_modules = {n for n in sys.modules if n.startswith("vllm")}
    before = attributes()
    assert len(before) > 5000
    vllm.plugins.load_general_plugins()
    assert f"{PACKAGE}.settings" in sys.modules, "the plugin was not called at all"
    assert f"{PACKAGE}.hooks" not in sys.modules
    assert {n for n in sys.modules if n.startswith("vllm")} == vllm_modules
    assert changed(before) == set()
    assert stock.differences(places()) == []


def test_on_is_seen_by_the_same_comparison(stock: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODDRANK", "1")
    before = attributes()
    vllm.plugins.load_general_plugins()
    names = changed(before)
    assert "vllm.config.speculative.SpeculativeConfig.__post_init__" in names
    assert "vllm.model_executor.models.config.MODELS_CONFIG_MAP['Qwen3ForCausalLM']" in names
    assert "vllm.model_executor.model_loader._LOAD_FORMAT_TO_MODEL_LOADER['oddrank_auto']" in names
    assert "vllm.model_executor.custom_op.op_registry_oot['VocabParallelEmbedding']" in names


def test_on_replaces_no_loader_and_extends_every_entry(planned: Places, stock: Places) -> None:
    assert {k: v for k, v in planned.loaders.items() if k in stock.loaders} == stock.loaders
    assert set(planned.loaders) - set(stock.loaders) == {"oddrank_auto", "oddrank_hf", "oddrank_safetensors"}
    for architecture, entry in stock.models.items():
        assert issubclass(planned.models[architecture], entry)
    for architecture in ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3_5MoeForConditionalGeneration",
                         "TransformersForCausalLM", "TransformersMoEForCausalLM"):  # fmt: skip
        assert "verify_and_update_config" in vars(planned.models[architecture])


def test_a_second_load_installs_nothing_more(planned: Places, stock: Places) -> None:
    vllm.plugins.plugins_loaded = False
    vllm.plugins.load_general_plugins()
    register()
    assert planned.differences(places()) == []
    assert planned.drafters.__wrapped__ is stock.drafters


def test_a_setting_that_makes_no_sense_stops_the_load(stock: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODDRANK", "1")
    monkeypatch.setenv("ODDRANK_LAYOUT", "diagonal")
    with pytest.raises(OddrankError, match=r'ODDRANK_LAYOUT="diagonal"'):
        vllm.plugins.load_general_plugins()
    assert stock.differences(places()) == []


class NoHooks:
    """Stands where a class of vLLM was."""


PLACES = [
    "vllm.model_executor.models.config.MODELS_CONFIG_MAP",
    "vllm.model_executor.models.config.VerifyAndUpdateConfig",
    "vllm.config.ModelConfig",
    "vllm.model_executor.model_loader.register_model_loader",
    "vllm.model_executor.model_loader.default_loader.DefaultModelLoader",
    "vllm.model_executor.layers.linear.ColumnParallelLinear",
    "vllm.model_executor.layers.vocab_parallel_embedding.VocabParallelEmbedding",
    "vllm.model_executor.layers.vocab_parallel_embedding.ParallelLMHead",
    "vllm.config.speculative.SpeculativeConfig",
]


@pytest.mark.parametrize("replaced", [False, True], ids=["gone", "another"])
@pytest.mark.parametrize("place", PLACES)
def test_another_layout_of_vllm_installs_nothing(
    stock: Places, monkeypatch: pytest.MonkeyPatch, place: str, replaced: bool
) -> None:
    module, _, name = place.rpartition(".")
    at = importlib.import_module(module)
    if replaced:
        monkeypatch.setattr(at, name, NoHooks() if name == "register_model_loader" else NoHooks)
    else:
        monkeypatch.delattr(at, name)
    monkeypatch.setenv("ODDRANK", "1")
    with pytest.raises(OddrankError, match="Nothing was installed") as raised:
        vllm.plugins.load_general_plugins()
    assert place in str(raised.value)
    assert stock.differences(places()) == []


def test_a_drafter_config_that_works_otherwise_installs_nothing(stock: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(self: Any, more: int) -> None:
        """Takes an argument that the patch knows nothing about."""

    monkeypatch.setattr("vllm.config.speculative.SpeculativeConfig.__post_init__", other)
    monkeypatch.setenv("ODDRANK", "1")
    with pytest.raises(OddrankError, match="other arguments"):
        vllm.plugins.load_general_plugins()
    assert places().models == stock.models and places().layers == stock.layers and places().loaders == stock.loaders


def test_every_place_is_found_in_this_vllm() -> None:
    found = layout_of_vllm.places()
    assert [p.name for p in found if p.problem is not None] == []
    assert {p.name.removesuffix(".__post_init__") for p in found} == set(PLACES)


def test_what_the_registries_are_given_pickles(planned: Places) -> None:
    for loader in set(planned.loaders.values()) | set(planned.layers.values()):
        assert pickle.loads(pickle.dumps(loader)) is loader


@pytest.mark.parametrize("on", [False, True])
def test_the_doctor_finds_everything_here(monkeypatch: pytest.MonkeyPatch, on: bool) -> None:
    monkeypatch.setenv("ODDRANK", "1" if on else "0")
    found = doctor.examine()
    assert found["problems"] == [] and found["ok"] is True
    assert (found["on"], found["would_install"]) == (on, on)
    assert found["versions"]["vllm"].startswith("0.32") and found["known_version"] is True
    assert found["entry_point"] == "oddrank.engines.vllm:register"


def test_the_doctor_sees_that_the_plugin_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PLUGINS", "another")
    found = doctor.examine()
    assert found["ok"] is False and 'VLLM_PLUGINS="another" leaves the plugin out' in found["problems"]
