"""What is in a release: counts, shapes and file sizes of the published checkpoints, to the byte where known."""

import json
import os
from pathlib import Path

import pytest

from oddrank.checkpoint import Checkpoint
from oddrank.errors import OddrankError
from oddrank.synth import FORMATS, PUBLISHED, SIZES, describe_release, write_headers
from oddrank.synth.write import entries, files_of, parameters

FULL = {"layers": None, "experts": None, "vocab": None}
EVERY = [(family, fmt) for family, formats in PUBLISHED.items() for fmt in formats]


@pytest.fixture(scope="module")
def moe_fp8(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("moe") / "fp8"
    return write_headers(describe_release("qwen3_5_moe", "fp8-block", vision=True, **FULL), out)


def under(model: Checkpoint, prefix: str) -> int:
    return sum(name.startswith(prefix) for name in model.tensors)


def test_fp8_35b_has_the_published_counts(moe_fp8: Path) -> None:
    model = Checkpoint.open(moe_fp8)
    assert len(model.tensors) == 64_196 and len(model.files) == 42
    assert under(model, "mtp.") == 1_560 and under(model, "model.visual.") == 333
    assert sum(t.end - t.start for t in model.tensors.values()) == pytest.approx(37.5e9, rel=2e-3)
    # 843.7 MB with a delta net, 837.1 MB with attention, 853.9 MB the MTP layer
    sizes = {n: round(os.path.getsize(moe_fp8 / n) / 1e6, 1) for n in model.files}
    assert (sizes["layers-0.safetensors"], sizes["layers-3.safetensors"], sizes["mtp.safetensors"]) == (
        843.7, 837.1, 853.9,
    )  # fmt: skip
    shapes = {name: t.shape for name, t in model.tensors.items()}
    at = "model.language_model.layers"
    assert shapes[f"{at}.3.self_attn.q_proj.weight"] == (8192, 2048)
    assert shapes[f"{at}.3.self_attn.o_proj.weight"] == (2048, 4096)
    assert shapes[f"{at}.0.linear_attn.in_proj_qkv.weight_scale_inv"] == (64, 16)
    assert shapes[f"{at}.0.linear_attn.conv1d.weight"] == (8192, 1, 4)
    assert shapes[f"{at}.39.mlp.experts.255.down_proj.weight"] == (2048, 512)
    assert model.tensors[f"{at}.0.linear_attn.in_proj_a.weight"].dtype == "BF16"


def test_headers_take_little_space(moe_fp8: Path) -> None:
    used = sum(os.stat(moe_fp8 / n).st_blocks * 512 for n in os.listdir(moe_fp8))
    assert used < 40e6


def test_nvfp4_35b_has_the_published_counts() -> None:
    release = describe_release("qwen3_5_moe", "nvfp4-mixed", vision=True, **FULL)
    names = [name for stored in release.stored() for name in stored.names()]
    assert len(names) == len(set(names)) == 124_468
    assert sum(n.startswith("mtp.") for n in names) == 19
    assert sum(n.startswith("model.visual.") for n in names) == 333
    assert sorted(n for n in names if n.startswith("lm_head")) == [
        "lm_head.input_scale", "lm_head.weight", "lm_head.weight_scale", "lm_head.weight_scale_2",
    ]  # fmt: skip


def test_fp8_27b_files_have_the_published_sizes(tmp_path: Path) -> None:
    """Bytes of the files of the published 27B FP8 release: names, dtypes, shapes and their order are all in them."""
    out = write_headers(describe_release("qwen3_5", "fp8-block", vision=True, **FULL), tmp_path / "27b")
    sizes = {n: os.path.getsize(out / n) for n in Checkpoint.open(out).files}
    assert len(sizes) == 66
    for layer in range(64):
        full = (layer + 1) % 4 == 0
        short, long = (372_313_744, 372_313_760) if full else (383_865_448, 383_865_472)
        assert sizes[f"layers-{layer}.safetensors"] == (short if layer < 10 else long), layer
    assert sizes["mtp.safetensors"] == 477_202_224
    # 32 more than the published file, whose header alone has no __metadata__
    assert sizes["outside.safetensors"] == 6_007_102_112 + 32


def test_parameter_counts() -> None:
    # published: 27B with its MTP layer 27.3 G; 35B-A3B 35.5 G; the DFlash2 drafter 1.924 G
    assert parameters(describe_release("qwen3_5", **FULL)) == pytest.approx(27.3e9, rel=2e-3)
    assert parameters(describe_release("qwen3_5_moe", **FULL)) == pytest.approx(35.5e9, rel=2e-3)
    assert parameters(describe_release("dflash", **FULL)) == pytest.approx(1.924e9, rel=5e-4)
    # Llama-3-70B 70.55 G, Qwen2-7B 7.62 G, SmolLM2-135M 134.5 M with its embedding once
    assert parameters(describe_release("llama", size="70B", **FULL)) == pytest.approx(70.55e9, rel=1e-3)
    assert parameters(describe_release("qwen2", **FULL)) == pytest.approx(7.62e9, rel=1e-3)
    assert parameters(describe_release("llama", size="135M", **FULL)) == pytest.approx(134.5e6, rel=1e-3)


def test_mxfp4_of_the_27b() -> None:
    release = describe_release("qwen3_5", "mxfp4", **FULL)
    found = {n: (p.dtype, p.shape) for s in release.stored() for n, p in zip(s.names(), s.parts, strict=True)}
    assert found["model.layers.0.linear_attn.in_proj_a.weight"] == ("U8", (48, 2560))
    assert found["model.layers.0.linear_attn.in_proj_a.weight_scale"] == ("U8", (48, 160))
    assert found["mtp.layers.0.mlp.down_proj.weight"] == ("F8_E4M3", (5120, 17408))
    assert found["mtp.layers.0.mlp.down_proj.weight_scale"] == ("F32", (5120,))
    assert found["lm_head.weight"] == ("BF16", (248320, 5120))


def test_compressed_tensors_says_nothing_of_what_it_left_alone() -> None:
    import re

    for fmt in ("nvfp4-ct", "nvfp4-ct-block"):
        release = describe_release("qwen3_5_moe", fmt, size="tiny", vision=True)
        from oddrank.synth.configs import config

        q = config(release)["quantization_config"]
        ignored = [i.removeprefix("re:") if i.startswith("re:") else re.escape(i) + "$" for i in q["ignore"]]
        for stored in release.stored():
            module = stored.logical.name.removesuffix(".weight")
            if stored.scheme is None or "embed" in module:
                continue
            groups = [
                g["format"]
                for g in q["config_groups"].values()
                if any(re.match(t.removeprefix("re:"), module) for t in g["targets"])
                and not any(re.match(i, module) for i in ignored)
            ]
            names = {"weight_packed": "nvfp4-pack-quantized", "weight_scale": "float-quantized"}
            kinds = [names[p.suffix[1:]] for p in stored.parts if p.suffix[1:] in names][:1]
            assert groups == kinds, module


@pytest.mark.parametrize(("family", "fmt"), EVERY)
def test_every_release_writes_headers(family: str, fmt: str, tmp_path: Path) -> None:
    for vision in (False, True) if family.startswith("qwen3_5") else (False,):
        release = describe_release(family, fmt, size="tiny", vision=vision)
        out = write_headers(release, tmp_path / str(vision))
        model = Checkpoint.open(out)
        wanted = {n: (p.dtype, p.shape) for s in release.stored() for n, p in zip(s.names(), s.parts, strict=True)}
        assert {n: (t.dtype, t.shape) for n, t in model.tensors.items()} == wanted
        assert ("quantization_config" in model.config) == (fmt != "bf16")
        assert (out / "hf_quant_config.json").exists() == (fmt == "nvfp4-mixed")
        assert all(t.start % min(8, {"F32": 4, "BF16": 2}.get(t.dtype, 1)) == 0 for t in model.tensors.values())


def test_modelopt_lists_every_quantized_module() -> None:
    from oddrank.synth.quantization import hf_quant_config

    release = describe_release("qwen3_5_moe", "nvfp4-mixed", size="tiny", vision=True)
    listed = hf_quant_config(release)["quantization"]["quantized_layers"]
    at = "model.language_model.layers"
    assert listed[f"{at}.0.mlp.experts.7.up_proj"] == {"group_size": 16, "quant_algo": "NVFP4"}
    assert listed[f"{at}.3.self_attn.q_proj"] == {"quant_algo": "FP8"}
    assert listed["lm_head"]["quant_algo"] == "NVFP4"
    assert not [m for m in listed if m.startswith("mtp") or "visual" in m or m.endswith("in_proj_a")]


def test_fp8_lists_every_plain_module() -> None:
    from oddrank.synth.configs import config

    listed = config(describe_release("qwen3_5_moe", "fp8-block", size="tiny", vision=True))["quantization_config"]
    plain, at = set(listed["modules_to_not_convert"]), "model.language_model"
    wanted = {"lm_head", f"{at}.embed_tokens", f"{at}.layers.0.linear_attn.in_proj_a", f"{at}.layers.3.mlp.gate"}
    assert wanted | {"mtp.fc", "model.visual.blocks.1.mlp.linear_fc2"} <= plain
    assert not [m for m in plain if "experts" in m or m.endswith(("q_proj", "out_proj"))]


def test_shards(tmp_path: Path) -> None:
    release = describe_release("qwen3_5", "mxfp4", size="tiny")
    for shards in (1, 2, 5, 13):
        files = files_of(release, shards)
        assert len(files) == shards
        assert [s for held in files.values() for s in held] == list(release.stored())
    out = write_headers(release, tmp_path / "out", shards=3)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    assert sorted(set(index["weight_map"].values())) == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)]
    sizes = [os.path.getsize(out / f) for f in set(index["weight_map"].values())]
    assert max(sizes) < 2 * min(sizes)
    count = sum(len(entries(held)) for held in files_of(release, 3).values())
    assert len(index["weight_map"]) == count
    with pytest.raises(OddrankError, match="cannot be spread over 999 files"):
        files_of(release, 999)


def test_names_that_do_not_exist_are_refused() -> None:
    with pytest.raises(OddrankError, match="no family"):
        describe_release("gpt5")
    with pytest.raises(OddrankError, match="known in bf16, fp8-block"):
        describe_release("dflash", "mxfp4")
    with pytest.raises(OddrankError, match="no size 28B"):
        describe_release("qwen3_5", size="28B")
    with pytest.raises(OddrankError, match="0 layers"):
        describe_release("qwen3_5", layers=0)
    with pytest.raises(OddrankError, match="no vision tower"):
        describe_release("llama", vision=True)


def test_formats_and_sizes_are_all_used() -> None:
    assert {fmt for formats in PUBLISHED.values() for fmt in formats} == set(FORMATS)
    assert set(PUBLISHED) == set(SIZES)


def test_an_existing_directory_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("x")
    with pytest.raises(OddrankError, match="not an empty directory"):
        write_headers(describe_release("llama", size="tiny"), tmp_path)
    assert os.listdir(tmp_path) == ["kept"]
