"""Mixtures of experts as they are published, from files: oddrank's runtime against transformers, both in fp32; and what
a config means that leaves things out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from transformers import AutoModelForCausalLM, Mxfp4Config

from oddrank.checkpoint import Checkpoint
from oddrank.layout.solver import Request
from oddrank.planner import plan_subject, study
from oddrank.runtime.models import MODELS
from oddrank.runtime.worker import local_logits
from oddrank.synth import describe_release, write_checkpoint

RELEASES = [
    ("qwen3_moe", "bf16"), ("mixtral", "bf16"), ("glm4_moe", "bf16"), ("gpt_oss", "bf16"), ("gpt_oss", "mxfp4-experts"),
]  # fmt: skip
TOKENS = [3, 141, 59, 26, 5, 358, 97, 93, 238, 46]


@pytest.mark.parametrize(("family", "fmt"), RELEASES)
def test_logits_of_a_release(family: str, fmt: str, tmp_path: Path) -> None:
    folder = write_checkpoint(describe_release(family, fmt, size="tiny", layers=3), tmp_path / "m")
    options: dict[str, Any] = {"quantization_config": Mxfp4Config(dequantize=True)} if "mxfp4" in fmt else {}
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager", **options)
    with torch.inference_mode():
        want = model(input_ids=torch.tensor([TOKENS])).logits[0].float()
    checkpoint = Checkpoint.open(folder)
    subject = study(checkpoint)
    for tp in (1, 2, 3):
        for layout in ("ragged", "pad"):
            got = local_logits(plan_subject(subject, Request(tp=tp, layout=layout)).plan, checkpoint, TOKENS, "fp32")
            assert (got - want).abs().max() < 2e-4 * want.abs().max(), (tp, layout)


@pytest.mark.parametrize("changes", [{}, {"rms_norm_eps": 1e-3, "tie_word_embeddings": True}])
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "gpt_oss", "glm4_moe"])
def test_absent_keys_mean_what_transformers_takes_them_for(family: str, changes: dict[str, Any]) -> None:
    hf = transformers.AutoConfig.for_model(family, num_hidden_layers=3, num_attention_heads=64, **changes)
    needed = (
        "hidden_size", "vocab_size", "num_attention_heads", "intermediate_size", "moe_intermediate_size",
        "num_experts_per_tok", "num_local_experts", "num_experts", "n_routed_experts",
    )  # fmt: skip
    stated = {key: getattr(hf, key) for key in needed if hasattr(hf, key)}
    stated |= {"model_type": family, "num_hidden_layers": 3, **changes}
    model = MODELS[family]
    ours: Any = model.CONFIG.read(stated, model.DEFAULTS)
    assert ours.head_dim == (getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads)
    assert (ours.eps, ours.activation, ours.tied) == (hf.rms_norm_eps, hf.hidden_act, hf.tie_word_embeddings)
    assert ours.max_positions == hf.max_position_embeddings
    assert ours.attention_bias == getattr(hf, "attention_bias", False)
    theirs = {k: v for k, v in hf.rope_parameters.items() if v is not None and k != "partial_rotary_factor"}
    assert {k: ours.rope[k] for k in theirs} == theirs
    assert ours.rotary == int(ours.head_dim * hf.rope_parameters.get("partial_rotary_factor", 1.0))
    kinds = getattr(hf, "layer_types", None) or ["sliding_attention"] * 3
    window = getattr(hf, "sliding_window", None)
    assert list(ours.windows) == [window if kind == "sliding_attention" else None for kind in kinds]
    assert (ours.sizes.count, ours.sizes.chosen) == (hf.num_local_experts, hf.num_experts_per_tok)
    if family == "glm4_moe":
        found = (ours.groups, ours.kept_groups, ours.scale, ours.dense, ours.shared, ours.qk_norm)
        assert found == (
            hf.n_group, hf.topk_group, hf.routed_scaling_factor, hf.first_k_dense_replace, hf.n_shared_experts,
            hf.use_qk_norm,
        )  # fmt: skip
    if family in ("glm4_moe", "qwen3_moe"):
        assert ours.normed == hf.norm_topk_prob
    if family == "gpt_oss":
        assert (ours.unit.alpha, ours.unit.limit) == (hf.swiglu_alpha, hf.swiglu_limit)


def test_qwen3_moe_windows_are_every_layer_s() -> None:
    """As transformers has it, whatever layer_types and max_window_layers say."""
    asked = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1}
    stated = {
        "model_type": "qwen3_moe", "hidden_size": 64, "vocab_size": 99, "num_attention_heads": 4,
        "num_hidden_layers": 2, "moe_intermediate_size": 32, "num_experts": 4, "num_experts_per_tok": 2, **asked,
    }  # fmt: skip
    model = MODELS["qwen3_moe"]
    assert model.CONFIG.read(stated, model.DEFAULTS).windows == (7, 7)
    stated["use_sliding_window"] = False
    assert model.CONFIG.read(stated, model.DEFAULTS).windows == (None, None)
