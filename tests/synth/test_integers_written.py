"""Releases of integers: what is written is the bf16 release, rounded to the formats' steps; their configs say so."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.mxfp8.base import MXFP8QuantizationCompressor
from compressed_tensors.compressors.naive_quantized.base import IntQuantizationCompressor
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationConfig
from formats.codec import Raw
from formats.integers import awq, gptq
from formats.packed_models import tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from oddrank.checkpoint import Checkpoint
from oddrank.formats.declared import declared
from oddrank.layout.coverage import disagreements
from oddrank.planner import quantization_of, study
from oddrank.synth import PUBLISHED, describe_release, numbers, write_checkpoint
from oddrank.synth.configs import config

NEW = (
    "int8", "int4-ct", "int4-ct-asym", "int8-ct", "gptq", "gptq-int8", "awq", "auto-round", "auto-round-awq", "mxfp8",
)  # fmt: skip
RELEASES = [(family, fmt) for family, formats in PUBLISHED.items() for fmt in formats if fmt in NEW]


def compressed(fmt: str, release: Any, parts: dict[str, Raw]) -> np.ndarray[Any, Any]:
    """As compressed-tensors reads it by the release's own config."""
    said = config(release)["quantization_config"]
    read = QuantizationConfig.model_validate({k: v for k, v in said.items() if k != "format"})
    scheme = read.config_groups["group_0"]
    compressor = {"int8": IntQuantizationCompressor, "mxfp8": MXFP8QuantizationCompressor}
    state = {s[1:]: tensor(raw) for s, raw in parts.items()}
    if fmt == "int8":
        state["weight_scale"] = state["weight_scale"].float()
    made = compressor.get(fmt, PackedQuantizationCompressor).decompress(state, scheme)["weight"]
    return made.float().numpy()


def decoded(fmt: str, release: Any, parts: dict[str, Raw]) -> np.ndarray[Any, Any]:
    group = config(release)["quantization_config"].get("group_size")
    match fmt:
        case "gptq" | "gptq-int8":
            return gptq(8 if fmt == "gptq-int8" else 4, group).decode(parts)
        case "auto-round":
            return gptq(4, group, index=False).decode(parts)
        case "awq" | "auto-round-awq":
            return awq(group).decode(parts)
    return compressed(fmt, release, parts)


def allowed(fmt: str) -> float:
    """The largest error as a part of the matrix's largest number: half a step of 15 or 255 over a range of at most
    twice that, and what rounding scales to 16 bits adds."""
    return {"int8": 1 / 100, "int8-ct": 1 / 100, "gptq-int8": 1 / 100, "mxfp8": 1 / 15}.get(fmt, 1 / 14)


@pytest.mark.parametrize(("family", "fmt"), RELEASES)
def test_it_is_the_bf16_release_rounded(family: str, fmt: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"size": "tiny", "layers": 1 if family != "qwen3_5" else 4, "experts": 2}
    release = describe_release(family, fmt, **options)
    plain = {s.logical.name: s for s in describe_release(family, **options).stored()}
    made = Checkpoint.open(write_checkpoint(release, tmp_path / "m"))
    exact = Checkpoint.open(write_checkpoint(describe_release(family, **options), tmp_path / "bf16"))
    compared = 0
    for stored in release.stored():
        name = stored.logical.name
        if stored.base == name:
            continue  # left in bf16
        parts = {p.suffix: Raw(p.dtype, made.array(stored.base + p.suffix)) for p in stored.parts}
        assert all(made.tensors[stored.base + p.suffix].shape == p.shape for p in stored.parts)
        found = decoded(fmt, release, parts)
        if name not in plain:
            assert ".experts." in name  # stacked there
            at, expert, kind = re.fullmatch(r"(.*experts)\.(\d+)\.(.*)\.weight", name).groups()
            stack = f"{at}.{'down_proj' if kind == 'down_proj' else 'gate_up_proj'}"
            x = numbers.from_bf16(exact.array(stack))[int(expert)]
            x = x if kind == "down_proj" else np.split(x, 2)[kind == "up_proj"]
        else:
            x = numbers.from_bf16(exact.array(name))
        assert found.shape == x.shape
        assert np.abs(found - x).max() <= allowed(fmt) * np.abs(x).max(), name
        compared += 1
    assert compared >= 6


def test_stacked_blocks_are_the_bf16_experts_rounded(tmp_path: Path) -> None:
    """[E, K, N] in bf16, [E, N, K/32, 16] in MXFP4, which transformers turns back."""
    options: dict[str, Any] = {"size": "tiny", "layers": 1, "experts": 2}
    made = Checkpoint.open(write_checkpoint(describe_release("gpt_oss", "mxfp4-experts", **options), tmp_path / "m"))
    exact = Checkpoint.open(write_checkpoint(describe_release("gpt_oss", **options), tmp_path / "bf16"))
    for name in ("gate_up_proj", "down_proj"):
        at = f"model.layers.0.mlp.experts.{name}"
        parts = (torch.from_numpy(made.array(at + suffix).copy()) for suffix in ("_blocks", "_scales"))
        found, x = convert_moe_packed_tensors(*parts, dtype=torch.float32).numpy(), numbers.from_bf16(exact.array(at))
        # the largest gap of e2m1 is from 4 to 6: half of it, of a group's largest number of at least 3.5 steps
        largest = np.repeat(np.abs(x.reshape(len(x), -1, 32, x.shape[2])).max(axis=2), 32, axis=1)
        assert found.shape == x.shape and (np.abs(found - x) <= largest / 3.4).all() and np.abs(found - x).mean() < 0.05
        assert np.corrcoef(found.ravel(), x.ravel())[0, 1] > 0.98


@pytest.mark.parametrize(("family", "fmt"), RELEASES)
def test_the_config_says_what_is_stored(family: str, fmt: str, tmp_path: Path) -> None:
    made = Checkpoint.open(write_checkpoint(describe_release(family, fmt, size="tiny"), tmp_path / "m"))
    subject = study(made)
    said = declared(quantization_of(made))
    assert not subject.census.problems and not list(disagreements(subject.model, subject.census, said))
    kinds = {use.format.partition("-")[0] for use in subject.census.uses} - {"dense"}
    assert len(kinds) == 1 and said("model.layers.0.mlp.down_proj") in (*kinds, None)
