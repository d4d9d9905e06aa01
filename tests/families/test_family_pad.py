"""`oddrank pad` of every other family, as it is published: transformers loads the directory whole, and the text comes
out the same."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from family_models import FAMILIES
from proof.tiny import F64, true_float64
from safetensors.torch import load_file

from oddrank.checkpoint import Checkpoint
from oddrank.planner import make_plan
from oddrank.synth import describe_release, write_checkpoint
from oddrank.transform.pad import pad

REFUSED = {("gemma3", 5), ("minimax_m2", 5)}
"""Sizes at which the tiny model has no layout that its own class would load: test_family_refusals."""
EVERY = [(f, tp) for f in FAMILIES for tp in (3, 5) if f != "deepseek_v2" and (f, tp) not in REFUSED]


def logits(path: Path) -> F64:
    """[tokens, vocab], from a checkpoint on disk, in float64 throughout; nothing is missing or left over."""
    architecture = json.loads((path / "config.json").read_text())["architectures"][0]
    module = json.loads((path / "config.json").read_text())["model_type"].removesuffix("_text")
    with true_float64(module), torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, info = getattr(transformers, architecture).from_pretrained(
            path, output_loading_info=True, dtype=torch.float64, attn_implementation="eager",
            experts_implementation="eager",
        )  # fmt: skip
        assert not any(info.values()), info
        out = model.eval()(input_ids=torch.arange(1, 14)[None], use_cache=False).logits[0]
    assert out.dtype == torch.float64
    return out.numpy().copy()


@pytest.mark.parametrize(("family", "tp"), EVERY)
def test_a_padded_directory(family: str, tp: int, tmp_path: Path) -> None:
    stock = write_checkpoint(describe_release(family, size="tiny"), tmp_path / "stock")
    plan = make_plan(stock, tp, executor="vllm").plan
    assert not plan.is_identity()
    out = Path(pad(plan, Checkpoint.open(stock), tmp_path / "padded").path)
    before, after = (json.loads((p / "config.json").read_text()) for p in (stock, out))
    assert after["num_attention_heads"] % tp == 0
    counts = {key for key in after if after[key] != before.get(key)}
    assert counts and all("num_" in key or "intermediate_size" in key or key == "head_dim" for key in counts), counts
    np.testing.assert_allclose(logits(out), logits(stock), rtol=0, atol=1e-10)


def wrapped(family: str, folder: Path) -> Path:
    """A vision-language (and audio) model as transformers saves it, with random towers around a random text model."""
    text = {
        "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "intermediate_size": 9,
        "vocab_size": 64, "num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 4,
    }  # fmt: skip
    tower = {"hidden_size": 16, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2}
    if family == "gemma3":
        config = transformers.Gemma3Config(
            text_config=text, vision_config={**tower, "patch_size": 14, "image_size": 56}, mm_tokens_per_image=4,
            image_token_index=61, boi_token_index=62, eoi_token_index=63,
        )  # fmt: skip
        model = transformers.Gemma3ForConditionalGeneration(config)
    else:
        text |= {
            "global_head_dim": 8, "num_global_key_value_heads": 1, "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 6, "vocab_size_per_layer_input": 64,
        }  # fmt: skip
        config = transformers.Gemma4Config(
            text_config=text, vision_config={**tower, "num_key_value_heads": 2, "head_dim": 8},
            audio_config={"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "output_proj_dims": 8},
            image_token_id=61, audio_token_id=62, video_token_id=63,
        )  # fmt: skip
        model = transformers.Gemma4ForConditionalGeneration(config)
    torch.manual_seed(1)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.3)
    model.save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_text_and_towers_of_a_wrapped_model(family: str, tmp_path: Path) -> None:
    """By the command; towers are the same bytes. gemma-3 is saved with the prefix of the published files."""
    stock, out = wrapped(family, tmp_path / "stock"), tmp_path / "padded"
    command = [sys.executable, "-m", "oddrank", "pad", str(stock), str(out), "--tp", "3", "--layout", "pad"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    before, after = (load_file(p / "model.safetensors") for p in (stock, out))
    towers = [n for n in before if "tower" in n or "projector" in n or "embed_vision" in n or "embed_audio" in n]
    assert len(towers) > 20 and set(before) == set(after)
    assert all(torch.equal(before[n], after[n]) for n in towers)
    text = [n for n in before if n not in towers and before[n].shape != after[n].shape]
    assert text and all("language_model." in n for n in text)
    new, old = (json.loads((p / "config.json").read_text()) for p in (out, stock))
    assert new["vision_config"] == old["vision_config"]
    assert new["text_config"]["num_attention_heads"] % 3 == 0
    np.testing.assert_allclose(logits(out), logits(stock), rtol=0, atol=1e-10)
