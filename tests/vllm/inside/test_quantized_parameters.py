"""At TP=3, vLLM's own parameters take every streamed tensor, in every format; so do its MTP and DFlash2 drafters.

vLLM's weight loaders assert shapes, and the stream checks that all that the config implies has passed.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from one_rank import any_kernel, load, pages, rank_of

from oddrank.engines.vllm import marker
from oddrank.synth import describe_release, write_checkpoint

FORMATS = ["bf16", "fp8-block", "nvfp4-mixed", "nvfp4-ct", "mxfp4"]
COMPUTED = ("_scale_ub", "input_scale", "input_global_scale")
"""Parameters that no checkpoint of these formats has to carry, nor any of the attention's own (its cache's scales)."""


OF_THE_TARGET = {"lm_head.weight", "model.embed_tokens.weight", "model.mask_embedding"}
"""What a DFlash2 drafter shares with its target where it has none of its own."""


@pytest.fixture(scope="module")
def synthetic(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    def folder(family: str, form: str) -> Path:
        path = tmp_path_factory.mktemp(f"{family}-{form}") / "model"
        write_checkpoint(describe_release(family, form, layers=4, experts=6, vocab=512, size="tiny"), path)
        return path

    return folder


def not_loaded(model: Any, loaded: set[str]) -> list[str]:
    wanted = {n for n, p in model.named_parameters() if p.numel() and not n.endswith(COMPUTED) and ".attn." not in n}
    return sorted(wanted - loaded)


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_every_format_is_accepted(
    family: str, form: str, planned: object, synthetic: Callable[..., Path], configured: Callable[..., Any]
) -> None:
    spec = {"method": "mtp", "num_speculative_tokens": 1}
    config = configured(synthetic(family, form), 3, dtype="bfloat16", speculative_config=spec)
    target, drafter = config.model_config, config.speculative_config.draft_model_config
    assert marker.plan_of(target.hf_config) == marker.plan_of(drafter.hf_config) is not None
    for rank in range(3):
        with rank_of(rank, 3), any_kernel():
            model, loaded = load(config, target)
            assert loaded and not not_loaded(model, loaded)
            mine = pages(config)
            model, loaded = load(config, drafter)
            assert type(model).__name__ in ("Qwen3_5MTP", "Qwen3_5MoeMTP")
            assert loaded and not not_loaded(model, loaded)
            its = pages(config)
        full = {size for name, size in mine.items() if name.startswith("FullAttentionSpec")}
        assert full == set(its.values()) and len(full) == 1


@pytest.mark.parametrize(
    ("family", "form"),
    [
        ("qwen2", "gptq"), ("qwen2", "gptq-int8"), ("mistral", "awq"), ("qwen3", "auto-round"),
        ("qwen3", "auto-round-awq"), ("llama", "int4-ct"), ("llama", "int4-ct-asym"), ("llama", "int8-ct"),
        ("llama", "int8"), ("qwen3", "mxfp8"), ("qwen3_5", "gptq"), ("qwen3_5_moe", "int4-ct"),
    ],
)  # fmt: skip
def test_integers_are_accepted(
    family: str, form: str, planned: object, synthetic: Callable[..., Path], configured: Callable[..., Any]
) -> None:
    """Every byte of every rank's parameters is written, by vLLM's loaders, from streams of padded words and groups."""
    config = configured(synthetic(family, form), 3, dtype="bfloat16")
    plan = marker.plan_of(config.model_config.hf_config)
    assert plan is not None and plan.tp == 3
    for rank in range(3):
        with rank_of(rank, 3), any_kernel():
            model, loaded = load(config, config.model_config)
            assert loaded and not not_loaded(model, loaded)


def test_a_dflash2_drafter_is_accepted_with_its_target(
    planned: object,
    synthetic: Callable[..., Path],
    configured: Callable[..., Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # the only runner that drafts with it wants Triton, which this machine's vLLM has not; nothing is run here
    monkeypatch.setenv("VLLM_USE_V2_MODEL_RUNNER", "1")
    for module in [m for n, m in sys.modules.items() if n.startswith("vllm.config") and hasattr(m, "HAS_TRITON")]:
        monkeypatch.setattr(module, "HAS_TRITON", True)
    spec = {"method": "dflash", "model": str(synthetic("dflash", "bf16")), "num_speculative_tokens": 3}
    config = configured(synthetic("qwen3_5", "mxfp4"), 3, dtype="bfloat16", speculative_config=spec)
    drafter = config.speculative_config.draft_model_config
    plan = marker.plan_of(drafter.hf_config)
    assert plan is not None and plan.tp == 3
    for rank in range(3):
        with rank_of(rank, 3), any_kernel():
            load(config, config.model_config)
            mine = pages(config)
            model, loaded = load(config, drafter)
            assert loaded and not set(not_loaded(model, loaded)) - OF_THE_TARGET
            its = pages(config)
        full = {size for name, size in mine.items() if name.startswith("FullAttentionSpec")}
        assert full == set(its.values()) and len(full) == 1
