"""transformers builds the model from config.json, finds every tensor under its name, and runs it."""

from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from oddrank.synth import PUBLISHED, describe_release, write_checkpoint

CAUSAL = [f for f in PUBLISHED if f != "dflash"]


def logits(model: torch.nn.Module, vocab: int) -> torch.Tensor:
    ids = torch.arange(1, 13).remainder(vocab)[None]
    with torch.no_grad():
        return model(input_ids=ids).logits[0].float()


def sane(x: torch.Tensor) -> None:
    """Finite, neither dead nor exploding, and different from one token to the next."""
    assert torch.isfinite(x).all()
    assert 0.05 < x.std() < 50
    assert (x[0] - x[1]).abs().max() > 0.05


@pytest.mark.parametrize("family", CAUSAL)
def test_bf16_loads_whole_and_runs(family: str, tmp_path: Path) -> None:
    out = write_checkpoint(describe_release(family, size="tiny"), tmp_path / "m")
    assert AutoConfig.from_pretrained(out).num_hidden_layers >= 2
    model, info = AutoModelForCausalLM.from_pretrained(out, output_loading_info=True, dtype="auto")
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    assert model.dtype == torch.bfloat16
    sane(logits(model, 512))


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_vision_language_bf16_loads_whole_and_runs(family: str, tmp_path: Path) -> None:
    out = write_checkpoint(describe_release(family, size="tiny", vision=True), tmp_path / "m")
    model, info = AutoModelForImageTextToText.from_pretrained(out, output_loading_info=True, dtype="auto")
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"]
    sane(logits(model, 512))
    pixels = torch.randn(16, 3 * 2 * 16 * 16, dtype=torch.bfloat16)
    with torch.no_grad():
        seen = model.model.visual(pixels, grid_thw=torch.tensor([[1, 4, 4]]))
    assert torch.isfinite(seen.pooler_output.float()).all() and seen.pooler_output.shape == (4, 256)


@pytest.mark.parametrize("fmt", ["nvfp4-ct", "nvfp4-ct-block"])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_compressed_tensors_reads_its_config(family: str, fmt: str, tmp_path: Path) -> None:
    from compressed_tensors.quantization import QuantizationConfig

    from oddrank.synth.configs import config

    made = config(describe_release(family, fmt, size="tiny"))["quantization_config"]
    read = QuantizationConfig.model_validate({k: v for k, v in made.items() if k != "format"})
    assert read.config_groups["group_1"].weights.group_size == 16
    assert read.config_groups["group_0"].weights.num_bits == 8
