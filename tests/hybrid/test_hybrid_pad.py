"""`oddrank pad` of vision-language checkpoints: transformers loads the result whole, text comes out the same, and the
vision tower is the same bytes."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from hybrid.tiny import FAMILIES
from proof.tiny import true_float64
from safetensors import safe_open
from transformers import AutoModelForImageTextToText

from oddrank.checkpoint import Checkpoint
from oddrank.synth import describe_release, write_checkpoint

PLANNED = {
    # 6 query / 2 KV heads, GDN 4 key / 8 value heads
    (3, "pad"): {"num_attention_heads": 9, "num_key_value_heads": 3},
    (3, "replicate"): {"num_attention_heads": 6, "num_key_value_heads": 6},
    (5, "pad"): {"linear_num_key_heads": 5, "linear_num_value_heads": 10},
}


@pytest.fixture(scope="module", params=FAMILIES)
def stock(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    release = describe_release(str(request.param), size="tiny", vision=True)
    return write_checkpoint(release, tmp_path_factory.mktemp(str(request.param)) / "stock")


def pad(model: Path, out: Path, tp: int, layout: str) -> None:
    command = [sys.executable, "-m", "oddrank", "pad", str(model), str(out), "--tp", str(tp), "--layout", layout]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def logits(path: Path) -> np.ndarray:
    """[tokens, vocab] of text alone, from a checkpoint on disk, in float64 throughout."""
    family = json.loads((path / "config.json").read_text())["model_type"]
    with true_float64(family), torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model, info = AutoModelForImageTextToText.from_pretrained(
            path, output_loading_info=True, dtype=torch.float64, attn_implementation="eager",
            experts_implementation="eager",
        )  # fmt: skip
        assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
        assert type(model).__name__.endswith("ForConditionalGeneration")
        out = model(input_ids=torch.arange(1, 14)[None], use_cache=False).logits[0]
    assert out.dtype == torch.float64
    return out.numpy().copy()


@pytest.mark.parametrize(("tp", "layout"), PLANNED)
def test_text_and_vision_of_a_padded_directory(stock: Path, tp: int, layout: str, tmp_path: Path) -> None:
    out = tmp_path / "padded"
    pad(stock, out, tp, layout)
    before, after = (json.loads((p / "config.json").read_text()) for p in (stock, out))
    text = after["text_config"]
    for key, value in PLANNED[tp, layout].items():
        assert text[key] == value
    # nothing but counts changed, and the tower's config not at all
    assert after["vision_config"] == before["vision_config"]
    changed = {k for k in text if text[k] != before["text_config"].get(k)}
    assert {k for k in changed if "num_" not in k and "intermediate_size" not in k} == set()
    a, b = Checkpoint.open(stock), Checkpoint.open(out)
    vision = [n for n in a.tensors if n.startswith("model.visual.")]
    assert len(vision) == 2 * 12 + 9 and set(a.tensors) == set(b.tensors)
    for name in vision:
        assert bytes(a.raw(name)) == bytes(b.raw(name)), name
    np.testing.assert_allclose(logits(out), logits(stock), rtol=0, atol=1e-10)


def test_the_safetensors_library_reads_it(stock: Path, tmp_path: Path) -> None:
    """Dummy heads are zero and real ones in place, as another reader sees them: in_proj_qkv of GDN 4/8 at TP=5."""
    out = tmp_path / "padded"
    pad(stock, out, 5, "pad")
    name, k, v = "model.language_model.layers.0.linear_attn.in_proj_qkv.weight", 4 * 128, 8 * 128
    with safe_open(stock / "model.safetensors", "pt") as before, safe_open(out / "model.safetensors", "pt") as after:
        q0, k0, v0 = before.get_tensor(name).split([k, k, v])
        q1, k1, v1 = after.get_tensor(name).split([5 * 128, 5 * 128, 10 * 128])
        for old, new in ((q0, q1), (k0, k1), (v0, v1)):
            assert torch.equal(new[: len(old)], old) and not new[len(old) :].any()
        a_log = name.replace("in_proj_qkv.weight", "A_log")
        assert after.get_tensor(a_log)[8:].tolist() == [0.0, 0.0]
