"""Written checkpoints: the same for the same seed, whatever the files; sane values; nothing half done."""

import hashlib
import os
from pathlib import Path

import numpy as np
import pytest

from oddrank.checkpoint import Checkpoint
from oddrank.synth import PUBLISHED, describe_release, numbers, write_checkpoint

EVERY = [(family, fmt) for family, formats in PUBLISHED.items() for fmt in formats]


def digest(path: Path) -> dict[str, str]:
    return {n: hashlib.sha256((path / n).read_bytes()).hexdigest() for n in sorted(os.listdir(path))}


@pytest.mark.parametrize(("family", "fmt"), EVERY)
def test_every_release_is_written_whole(family: str, fmt: str, tmp_path: Path) -> None:
    release = describe_release(family, fmt, size="tiny", vision=family == "qwen3_5_moe")
    model = Checkpoint.open(write_checkpoint(release, tmp_path / "m"))
    wanted = {n: (p.dtype, p.shape) for s in release.stored() for n, p in zip(s.names(), s.parts, strict=True)}
    assert {n: (t.dtype, t.shape) for n, t in model.tensors.items()} == wanted
    for name, tensor in model.tensors.items():
        words = model.array(name)
        if tensor.dtype == "BF16":
            values = numbers.from_bf16(words)
        elif tensor.dtype == "F8_E4M3":
            values = numbers.from_e4m3(words)
        elif tensor.dtype == "F32":
            values = words.view(np.float32)
        else:
            assert not name.endswith("weight_scale") or (words.min() > 90 and words.max() < 140), name
            continue
        assert np.isfinite(values).all(), name
        assert "scale" not in name or values.min() > 0, name
        assert values.size < 9 or values.std() > 0, name


def dequantized(model: Checkpoint, base: str) -> np.ndarray:
    """A matrix as float32, from whatever is stored under its name."""
    words = {s: model.array(base + s) for s in SUFFIXES if base + s in model.tensors}
    values = words.get(".weight", words.get(".weight_packed"))
    floats = {s: w.view(np.float32) for s, w in words.items() if model.tensors[base + s].dtype == "F32"}
    scale = words.get(".weight_scale")
    if ".weight_scale_inv" in words:
        scale = words[".weight_scale_inv"]
    if scale is None:
        return numbers.from_bf16(values)
    match model.tensors[base + (".weight" if ".weight" in words else ".weight_packed")].dtype, scale.dtype.itemsize:
        case "U8", _ if ".weight_scale_2" in words or ".weight_global_scale" in words:
            whole = floats[".weight_scale_2"] if ".weight_scale_2" in words else 1 / floats[".weight_global_scale"]
            return numbers.from_packed_e2m1(values) * np.repeat(numbers.from_e4m3(scale), 16, axis=1) * whole
        case "U8", _:
            return numbers.from_packed_e2m1(values) * np.repeat(numbers.from_e8m0(scale), 32, axis=1)
        case _, 4:
            return numbers.from_e4m3(values) * floats[".weight_scale"].reshape(-1, 1)
        case _:
            factor = numbers.from_bf16(scale)
            if factor.shape[1] > 1 or factor.shape[0] < len(values):
                factor = np.kron(factor, np.ones((128, 128), np.float32))[: values.shape[0], : values.shape[1]]
            return numbers.from_e4m3(values) * factor


SUFFIXES = (
    ".weight", ".weight_packed", ".weight_scale", ".weight_scale_inv", ".weight_scale_2", ".weight_global_scale",
)  # fmt: skip


@pytest.mark.parametrize("fmt", ["fp8-block", "nvfp4-mixed", "nvfp4-ct", "nvfp4-ct-block", "mxfp4"])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_a_quantized_release_is_the_bf16_one_rounded(family: str, fmt: str, tmp_path: Path) -> None:
    exact = Checkpoint.open(write_checkpoint(describe_release(family, size="tiny"), tmp_path / "bf16"))
    rounded = Checkpoint.open(write_checkpoint(describe_release(family, fmt, size="tiny"), tmp_path / fmt))
    dense: dict[str, np.ndarray] = {}
    for name in exact.tensors:
        values = numbers.from_bf16(exact.array(name))
        if ".experts." not in name:
            dense[name] = values
        else:
            at, _, kind = name.rpartition(".")
            for e, expert in enumerate(values):
                halves = np.split(expert, 2) if kind == "gate_up_proj" else [expert]
                kinds = ("gate_proj", "up_proj") if kind == "gate_up_proj" else ("down_proj",)
                dense |= {f"{at}.{e}.{k}.weight": h for k, h in zip(kinds, halves, strict=True)}
    compared = 0
    for name, values in dense.items():
        base = name.removesuffix(".weight")
        if base + ".weight_packed" not in rounded.tensors and name not in rounded.tensors:
            assert name.startswith("mtp.") and ".experts." in name  # stays stacked
            continue
        if values.ndim != 2:
            assert np.array_equal(numbers.from_bf16(rounded.array(name)), values)
            continue
        found = dequantized(rounded, base)
        four_bits = rounded.tensors[base + (".weight" if name in rounded.tensors else ".weight_packed")].dtype == "U8"
        error = np.sqrt(np.mean((found - values) ** 2) / np.mean(values**2))
        # relative error of rounding to 1 and to 3 bits of mantissa
        assert error < (0.15 if four_bits else 0.04), (name, error)
        compared += error > 0
    assert compared >= 20


def test_the_seed_decides(tmp_path: Path) -> None:
    made = {}
    for run, seed in (("a", 1), ("b", 1), ("c", 2)):
        release = describe_release("qwen3_5_moe", "nvfp4-mixed", size="tiny", seed=seed)
        made[run] = digest(write_checkpoint(release, tmp_path / run))
    assert made["a"] == made["b"]
    assert made["a"]["config.json"] == made["c"]["config.json"]
    assert made["a"]["model.safetensors"] != made["c"]["model.safetensors"]


def test_the_files_do_not_matter(tmp_path: Path) -> None:
    release = describe_release("qwen3_5", "fp8-block", size="tiny", vision=True)
    one = Checkpoint.open(write_checkpoint(release, tmp_path / "layers"))
    other = Checkpoint.open(write_checkpoint(release, tmp_path / "three", shards=3))
    assert len(one.files) == 6 and len(other.files) == 3
    assert one.tensors.keys() == other.tensors.keys()
    assert all(np.array_equal(one.array(n), other.array(n)) for n in one.tensors)


def test_cutting_layers_leaves_the_others_as_they_were(tmp_path: Path) -> None:
    two = Checkpoint.open(write_checkpoint(describe_release("qwen3", size="tiny"), tmp_path / "2"))
    one = Checkpoint.open(write_checkpoint(describe_release("qwen3", size="tiny", layers=1), tmp_path / "1"))
    assert set(one.tensors) < set(two.tensors)
    assert all(np.array_equal(one.array(n), two.array(n)) for n in one.tensors)


def test_scales_differ(tmp_path: Path) -> None:
    """A scale that ends up in the wrong place must show: neighbours, and tensors that get fused, are not alike."""
    at = "model.layers.3.self_attn"
    made = {}
    for fmt in ("fp8-block", "nvfp4-mixed", "mxfp4"):
        release = describe_release("qwen3_5", fmt, size="tiny")
        made[fmt] = Checkpoint.open(write_checkpoint(release, tmp_path / fmt))
    blocks = numbers.from_bf16(made["fp8-block"].array(f"{at}.q_proj.weight_scale_inv"))
    assert len(np.unique(blocks)) > blocks.size * 0.9
    whole = [made["nvfp4-mixed"].array(f"{at}.{p}_proj.weight_scale").view(np.float32).item() for p in "qkv"]
    assert len(set(whole)) == 3
    assert len(np.unique(made["mxfp4"].array(f"{at}.q_proj.weight_scale"))) >= 4


def test_an_interrupted_run_continues(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from oddrank.synth import write as module

    release = describe_release("qwen3_5", "fp8-block", size="tiny")
    whole = digest(write_checkpoint(release, tmp_path / "whole"))
    real, calls = module.encode, []

    def failing(stored: object, seed: int) -> object:
        calls.append(stored)
        if len(calls) == 30:
            raise KeyboardInterrupt
        return real(stored, seed)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "encode", failing)
    with pytest.raises(KeyboardInterrupt):
        write_checkpoint(release, tmp_path / "m")
    assert not (tmp_path / "m").exists()
    assert digest(write_checkpoint(release, tmp_path / "m")) == whole
    # the files that were finished are not made again
    assert len(calls) < 30 + len(list(release.stored())) - 9
