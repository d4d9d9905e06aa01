"""What the plugin makes of a serve's config: planned once, told to child processes, refused where it does not fit."""

import copy
import logging
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import Places

from oddrank.engines.vllm import config as plugin_config
from oddrank.engines.vllm import marker
from oddrank.errors import OddrankError
from oddrank.layout.plan import Plan
from oddrank.planner import make_plan

Tiny = Callable[..., Path]
Configured = Callable[..., Any]


def counts(config: Any) -> tuple[int, int, int, int, int]:
    return (
        config.num_attention_heads, config.num_key_value_heads, config.head_dim, config.intermediate_size,
        config.vocab_size,
    )  # fmt: skip


def test_stock_refuses_three_ranks(stock: Places, tiny: Tiny, configured: Configured) -> None:
    with pytest.raises(ValueError, match=r"attention heads \(10\) must be divisible by tensor parallel size \(3\)"):
        configured(tiny("qwen3"), 3)


def test_three_ranks_get_the_plan(planned: Places, tiny: Tiny, configured: Configured) -> None:
    # 10 query heads over 5 KV heads: 2 KV heads a rank, with the 2 query heads each that the stock ratio has
    serve = configured(tiny("qwen3"), 3)
    model = serve.model_config
    assert counts(model.hf_text_config) == (12, 6, 32, 204, 1000)
    assert model.model_arch_config.total_num_attention_heads == 12
    assert model.get_num_kv_heads(serve.parallel_config) == 2
    assert model.get_num_attention_heads(serve.parallel_config) == 4
    assert serve.load_config.load_format == "oddrank_auto"


@pytest.mark.parametrize(("given", "streamed"), [("hf", "oddrank_hf"), ("safetensors", "oddrank_safetensors"),
                                                 ("dummy", "dummy")])  # fmt: skip
def test_load_formats(planned: Places, tiny: Tiny, configured: Configured, given: str, streamed: str) -> None:
    assert configured(tiny("qwen3"), 3, load_format=given).load_config.load_format == streamed


@pytest.mark.parametrize("given", ["pt", "npcache", "sharded_state", "fastsafetensors"])
def test_a_foreign_load_format_is_refused(planned: Places, tiny: Tiny, configured: Configured, given: str) -> None:
    with pytest.raises(OddrankError, match=f"--load-format {given} .*q_heads 10 -> 12.*oddrank pad"):
        configured(tiny("qwen3"), 3, load_format=given)


def test_planning_again_changes_nothing(planned: Places, tiny: Tiny, configured: Configured) -> None:
    serve = configured(tiny("qwen3"), 3)
    before = (serve.model_config.hf_config.to_dict(), serve.load_config.load_format)
    for config in (serve, pickle.loads(pickle.dumps(serve)), copy.deepcopy(serve)):
        planned.models["Qwen3ForCausalLM"].verify_and_update_config(config)
        assert (config.model_config.hf_config.to_dict(), config.load_config.load_format) == before


def test_the_marker_travels(planned: Places, tiny: Tiny, configured: Configured) -> None:
    expected = make_plan(tiny("qwen3"), 3, executor="vllm").plan
    config = configured(tiny("qwen3"), 3).model_config.hf_config
    again = type(config)(**config.to_dict())
    for carried in (config, pickle.loads(pickle.dumps(config)), copy.deepcopy(config), again):
        plan = marker.plan_of(carried)
        assert plan is not None and plan.to_json() == expected.to_json()
    assert marker.plan_of(type(config)()) is None


def test_a_plan_is_written_once(planned: Places, tiny: Tiny, configured: Configured) -> None:
    model = configured(tiny("qwen3"), 3).model_config
    plugin_config.apply(model, make_plan(tiny("qwen3"), 4, executor="vllm").plan, tiny("qwen3"))
    assert counts(model.hf_text_config) == (12, 6, 32, 204, 1000)


def test_a_size_that_divides_is_left_alone(planned: Places, tiny: Tiny, configured: Configured) -> None:
    folder = tiny("qwen3", num_attention_heads=12, num_key_value_heads=6, intermediate_size=192)
    serve = configured(folder, 3)
    assert counts(serve.model_config.hf_text_config) == (12, 6, 32, 192, 1000)
    assert serve.load_config.load_format == "auto"
    assert not hasattr(serve.model_config.hf_config, marker.NAME)


def test_overrides_that_contradict_the_plan_are_refused(planned: Places, tiny: Tiny, configured: Configured) -> None:
    with pytest.raises(OddrankError, match=r"num_key_value_heads = 10; config.json there says 5.*--hf-overrides"):
        configured(tiny("qwen3"), 3, hf_overrides={"num_key_value_heads": 10})


def test_other_overrides_are_kept(planned: Places, tiny: Tiny, configured: Configured) -> None:
    text = configured(tiny("qwen3"), 3, hf_overrides={"rms_norm_eps": 0.25}).model_config.hf_text_config
    assert text.rms_norm_eps == 0.25 and text.num_attention_heads == 12


def test_lora_is_refused_where_it_would_meet_padding(planned: Places, tiny: Tiny, configured: Configured) -> None:
    with pytest.raises(OddrankError, match=r"LoRA adapters have the trained sizes.*q_heads 10 -> 12"):
        configured(tiny("qwen3"), 3, enable_lora=True)
    folder = tiny("qwen3", num_attention_heads=12, num_key_value_heads=6, intermediate_size=192)
    assert configured(folder, 3, enable_lora=True).lora_config is not None


def test_a_class_that_ignores_head_dim_is_replaced(planned: Places, tiny: Tiny, configured: Configured) -> None:
    model = configured(tiny("qwen2"), 3).model_config
    assert model.hf_config.architectures == ["LlamaForCausalLM"] and model.architecture == "LlamaForCausalLM"
    assert model.hf_text_config.head_dim == 32 and model.get_head_size() == 32
    assert model.hf_text_config.qkv_bias is True and model.hf_text_config.attention_bias is False


def test_an_unknown_family_is_left_to_vllm_where_it_divides(
    planned: Places, tiny: Tiny, configured: Configured, tmp_path: Path
) -> None:
    folder = tmp_path / "gpt2"
    folder.mkdir()
    (folder / "config.json").write_text(
        '{"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"], "n_embd": 48, "n_head": 6, "n_layer": 2,'
        ' "vocab_size": 100, "n_positions": 256}'
    )
    (folder / "model.safetensors").write_bytes(b"\x02\x00\x00\x00\x00\x00\x00\x00{}")
    assert configured(folder, 3).load_config.load_format == "auto"
    with pytest.raises(OddrankError, match=r"at TP=4 as it is \(6 attention heads\).*no plan for it.*gpt2"):
        configured(folder, 4)


def test_knobs_reach_the_plan(
    planned: Places, tiny: Tiny, configured: Configured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ODDRANK_PLAN_TP", "3")
    assert counts(configured(tiny("qwen3"), 1).model_config.hf_text_config)[:2] == (12, 6)
    monkeypatch.setenv("ODDRANK_CONSTRAINTS", "mlp_multiple=64")
    assert configured(tiny("qwen3"), 1).model_config.hf_text_config.intermediate_size == 384  # of 3 x 64
    monkeypatch.setenv("ODDRANK_CONSTRAINTS", "height=2")
    with pytest.raises(OddrankError, match="height"):
        configured(tiny("qwen3"), 1)


@pytest.mark.parametrize(("heads", "mode"), [(4, "data"), (6, "weights")])
def test_a_vision_tower_that_does_not_divide_is_kept_whole(
    planned: Places, vision_model: Callable[[int], Path], configured: Configured, caplog: pytest.LogCaptureFixture,
    heads: int, mode: str,
) -> None:  # fmt: skip
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.INFO, logger="vllm"):
        serve = configured(vision_model(heads), 3, dtype="bfloat16", language_model_only=True)
    assert serve.model_config.multimodal_config.mm_encoder_tp_mode == mode
    assert serve.model_config.hf_text_config.num_key_value_heads == 6
    assert serve.model_config.hf_config.vision_config.num_heads == heads
    assert (f"the vision tower's {heads} heads do not divide by 3" in caplog.text) is (mode == "data")


@pytest.fixture
def vision_model(tmp_path: Path) -> Callable[[int], Path]:
    import torch
    from tiny_models import BASE, GDN
    from transformers import AutoConfig, AutoModelForImageTextToText

    def write(heads: int) -> Path:
        vision = {"depth": 1, "hidden_size": 48, "num_heads": heads, "intermediate_size": 96, "out_hidden_size": 128}
        text = {k: v for k, v in (BASE | GDN).items() if not k.endswith("token_id")}
        config = AutoConfig.for_model("qwen3_5", text_config=text, vision_config=vision)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(tmp_path / "vision")
        return tmp_path / "vision"

    return write


def test_the_log_says_what_is_served(
    planned: Places, tiny: Tiny, configured: Configured, caplog: pytest.LogCaptureFixture
) -> None:
    logging.getLogger("vllm").propagate = True
    with caplog.at_level(logging.INFO, logger="vllm"):
        configured(tiny("qwen3"), 3)
    assert "at TP=3 (q_heads 10 -> 12, kv_heads 5 -> 6, mlp 200 -> 204)" in caplog.text


def test_plans_read_back_as_plans(planned: Places, tiny: Tiny, configured: Configured) -> None:
    assert isinstance(marker.plan_of(configured(tiny("qwen3"), 3).model_config.hf_text_config), Plan)
