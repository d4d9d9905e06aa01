"""Models really built and loaded by vLLM in this process, on one rank, through the plan's stream."""

import logging
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Places
from safetensors.torch import load_file, save_file
from vllm.config import set_current_vllm_config
from vllm.distributed import cleanup_dist_env_and_memory, init_distributed_environment, initialize_model_parallel
from vllm.model_executor.model_loader import base_loader, get_model
from vllm.model_executor.models import qwen3

from oddrank.engines.vllm import config as plugin_config
from oddrank.errors import OddrankError

Tiny = Callable[..., Path]
Configured = Callable[..., Any]


@pytest.fixture
def load(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[Any], torch.nn.Module]]:
    """load(VllmConfig of one rank): the model, its weights in place."""

    monkeypatch.setattr(torch.accelerator, "empty_cache", lambda: None)  # as vLLM's own CPU worker does
    # which would pack the weights for its kernels
    monkeypatch.setattr(base_loader, "process_weights_after_loading", lambda *given: None)

    def loaded(serve: Any) -> torch.nn.Module:
        with set_current_vllm_config(serve):
            init_distributed_environment(1, 0, f"file://{tmp_path}/group", 0, "gloo")
            initialize_model_parallel(1, 1)
            return get_model(vllm_config=serve)

    yield loaded
    cleanup_dist_env_and_memory()


@pytest.fixture(autouse=True)
def plan_for_three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ODDRANK_PLAN_TP", "3")


def stored(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model.safetensors")


@contextmanager
def changed_tensors(folder: Path, to: Path) -> Iterator[dict[str, torch.Tensor]]:
    """A copy of a checkpoint whose tensors are what the caller makes of them."""
    shutil.copytree(folder, to)
    tensors = stored(to)
    yield tensors
    save_file(tensors, to / "model.safetensors", {"format": "pt"})


def test_weights_are_padded_while_they_load(
    planned: Places, tiny: Tiny, configured: Configured, load: Callable[[Any], torch.nn.Module]
) -> None:
    # 10 query and 5 KV heads of 32, planned as 12 and 6: 5 groups of 2 query heads and 1 KV head, and one of zeros
    model, mine = load(configured(tiny("qwen3"), 1)), stored(tiny("qwen3"))
    layer, name = model.model.layers[0], "model.layers.0"
    qkv = layer.self_attn.qkv_proj.weight
    q, k, v = qkv.split([12 * 32, 6 * 32, 6 * 32])
    for part, key, heads in ((q, "q", 10), (k, "k", 5), (v, "v", 5)):
        trained = mine[f"{name}.self_attn.{key}_proj.weight"]
        kept = part.reshape(-1, 32, 128)
        real = kept[kept.flatten(1).any(dim=1)]
        assert torch.equal(real.reshape(-1, 128), trained) and len(real) == heads
    assert layer.self_attn.o_proj.weight.shape == (128, 12 * 32)
    gate = layer.mlp.gate_up_proj.weight[:204]
    assert torch.equal(gate[gate.any(dim=1)], mine[f"{name}.mlp.gate_proj.weight"])
    down = layer.mlp.down_proj.weight
    assert torch.equal(down[:, down.any(dim=0)], mine[f"{name}.mlp.down_proj.weight"])
    assert torch.equal(model.lm_head.weight[:1000], mine["lm_head.weight"])


def test_model_code_that_ignores_head_dim_is_refused(
    planned: Places, tiny: Tiny, configured: Configured, load: Callable[[Any], torch.nn.Module],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(plugin_config, "IGNORES_HEAD_DIM", {})  # or the plugin takes llama's class for it
    # a width that 12 heads divide as well, so that nothing else of qwen2's class objects
    folder = tiny("qwen2", hidden_size=480)
    with pytest.raises(OddrankError, match=r"Qwen2ForCausalLM built .*\n?.* head_dim 40 per rank.* 12, 6 and 48"):
        load(configured(folder, 1))


def test_the_class_taken_instead_loads(
    planned: Places, tiny: Tiny, configured: Configured, load: Callable[[Any], torch.nn.Module]
) -> None:
    model = load(configured(tiny("qwen2", hidden_size=480), 1))
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.model.layers[0].self_attn.attn.head_size == 48


EXTRA = "model.layers.0.mlp.gate_proj.bias"
"""A tensor that vLLM's qwen3 skips without a word, so only the plan's own account can notice it."""


def with_extra(folder: Path, to: Path) -> Path:
    with changed_tensors(folder, to) as tensors:
        tensors[EXTRA] = torch.ones(200)
    return to


def without_norm(folder: Path, to: Path) -> Path:
    with changed_tensors(folder, to) as tensors:
        del tensors["model.layers.1.input_layernorm.weight"]
    return to


def test_stock_vllm_skips_the_extra_tensor(
    stock: Places, tiny: Tiny, configured: Configured, load: Callable[[Any], torch.nn.Module], tmp_path: Path
) -> None:
    model = load(configured(with_extra(tiny("qwen3"), tmp_path / "model"), 1))
    assert torch.equal(model.model.norm.weight, stored(tiny("qwen3"))["model.norm.weight"])


@pytest.mark.parametrize(("fault", "said"), [(with_extra, rf"{EXTRA}.*no role"),
                                             (without_norm, "input_layernorm.weight is missing")])  # fmt: skip
def test_coverage_is_strict_by_default(
    planned: Places, tiny: Tiny, configured: Configured, tmp_path: Path,
    fault: Callable[[Path, Path], Path], said: str,
) -> None:  # fmt: skip
    with pytest.raises(OddrankError, match=said):
        configured(fault(tiny("qwen3"), tmp_path / "model"), 1)


@pytest.mark.parametrize(("fault", "said"), [(with_extra, rf"{EXTRA}.*no role"),
                                             (without_norm, "input_layernorm.weight: 1 of 2")])  # fmt: skip
def test_coverage_is_checked_again_while_loading(
    planned: Places, tiny: Tiny, configured: Configured, load: Callable[[Any], torch.nn.Module], tmp_path: Path,
    fault: Callable[[Path, Path], Path], said: str,
) -> None:  # fmt: skip
    shutil.copytree(tiny("qwen3"), tmp_path / "model")
    serve = configured(tmp_path / "model", 1)
    shutil.rmtree(tmp_path / "model")
    fault(tiny("qwen3"), tmp_path / "model")
    with pytest.raises(OddrankError, match=said):
        load(serve)


def test_coverage_can_warn(
    planned: Places, tiny: Tiny, configured: Configured, load: Callable[[Any], torch.nn.Module], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setenv("ODDRANK_COVERAGE", "warn")
    serve = configured(with_extra(tiny("qwen3"), tmp_path / "model"), 1)
    assert serve.model_config.hf_text_config.num_attention_heads == 12
    with pytest.warns(UserWarning, match=rf"{EXTRA}.*no role"):
        model = load(serve)
    assert torch.equal(model.model.norm.weight, stored(tiny("qwen3"))["model.norm.weight"])


def test_another_checkpoint_than_the_planned_one_is_noticed(
    planned: Places, tiny: Tiny, configured: Configured, load: Callable[[Any], torch.nn.Module], tmp_path: Path
) -> None:
    with changed_tensors(tiny("qwen3"), tmp_path / "other"):
        pass
    serve = configured(tmp_path / "other", 1)
    tensors = stored(tmp_path / "other")
    tensors["model.layers.0.mlp.down_proj.weight"] = torch.zeros(128, 201)
    save_file(tensors, tmp_path / "other" / "model.safetensors", {"format": "pt"})
    with pytest.raises(OddrankError, match=r"down_proj.weight comes as .*\[128, 201\]"):
        load(serve)


def test_weights_from_a_second_place_are_refused(
    planned: Places, tiny: Tiny, configured: Configured, load: Callable[[Any], torch.nn.Module],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(qwen3.Qwen3ForCausalLM, "secondary_weights", ["another"], raising=False)
    with pytest.raises(OddrankError, match="Qwen3ForCausalLM reads weights from a second place"):
        load(configured(tiny("qwen3"), 1))


def test_an_identity_serve_meets_stock_vllms_loader(
    planned: Places, tiny: Tiny, configured: Configured, load: Callable[[Any], torch.nn.Module],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.delenv("ODDRANK_PLAN_TP")
    monkeypatch.setattr("oddrank.engines.vllm.loader.PlannedModelLoader.__init__", None)
    model = load(configured(tiny("qwen3"), 1))
    assert torch.equal(model.model.norm.weight, stored(tiny("qwen3"))["model.norm.weight"])


def test_what_was_streamed_is_logged(
    planned: Places, tiny: Tiny, configured: Configured, load: Callable[[Any], torch.nn.Module],
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.INFO, logger="vllm"):
        load(configured(tiny("qwen3"), 1))
    # 11 tensors a layer, 2 layers, embedding, head and norm; q, k, v, o, gate, up, down of each layer are padded
    assert "25 tensors of model streamed for TP=1, 14 of them padded; coverage complete" in caplog.text
