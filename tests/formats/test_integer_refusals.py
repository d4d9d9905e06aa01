"""Packed integers that cannot be read or moved: what, where, the numbers, what would work instead."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from cli.test_cli import run
from formats.integers import PACKINGS, auto_round
from formats.moves import Tensor
from formats.packed_models import model_config, write

from oddrank.checkpoint.config import ConfigView
from oddrank.errors import OddrankError
from oddrank.families import family_of
from oddrank.formats import candidates, format_named, formats
from oddrank.formats.declared import declared
from oddrank.layout.census import Census, take_census

_HOME = TemporaryDirectory(prefix="oddrank-refused-")
Table = dict[str, Tensor]
DOWN = "model.layers.0.mlp.down_proj"


@cache
def written(name: str) -> Path:
    return write(Path(_HOME.name) / name.replace(" ", "-"), PACKINGS[name]).path


def census(name: str, change: Callable[[Table], object], said: dict[str, Any] | None = None) -> Census:
    """Of a model in this packing after a change of its tensors."""
    from oddrank.checkpoint import Checkpoint

    table = {n: Tensor(t.dtype, t.shape) for n, t in Checkpoint.open(written(name)).tensors.items()}
    change(table)
    view = ConfigView(model_config(PACKINGS[name]))
    return take_census(family_of(view).build(view, "model."), table, said or PACKINGS[name].config)


@pytest.mark.parametrize(
    ("name", "suffix", "wanted"),
    [
        ("GPTQ", ".scales", "BF16 or F16 or F32 or F64 [9, 128]"),
        ("GPTQ", ".qzeros", "I32 [9, 16]"),
        ("GPTQ, 8 bits", ".qzeros", "I32 [9, 32]"),
        ("AWQ", ".qzeros", "I32 [9, 16]"),
        ("AWQ, 64 columns", ".scales", "[18, 128]"),
        ("AutoRound as GPTQ", ".scales", "[9, 128]"),
        ("compressed-tensors int4", ".weight_scale", "[128, 9]"),
        ("compressed-tensors int4", ".weight_shape", "I64 or I32 [2]"),
        ("compressed-tensors int8, channels", ".weight_scale", "[128, 1]"),
        ("compressed-tensors int4, asymmetric", ".weight_zero_point", "I32 [16, 9]"),
        ("compressed-tensors int8, asymmetric", ".weight_zero_point", "I32 [32, 18]"),
    ],
)
@pytest.mark.parametrize("how", ["missing", "misshapen", "of another type"])
def test_a_companion_that_is_missing_or_wrong_is_named(name: str, suffix: str, wanted: str, how: str) -> None:
    key = DOWN + suffix

    def change(table: Table) -> None:
        found = table.pop(key)
        if how == "misshapen":
            table[key] = Tensor(found.dtype, (*found.shape[:-1], found.shape[-1] + 1))
        elif how != "missing":
            table[key] = Tensor("U8", found.shape)

    (problem,) = census(name, change).problems
    assert f"is stored as {PACKINGS[name].format}, but {key}" in problem and wanted in problem
    assert problem.endswith("is missing") or f" instead of {wanted}" in problem or f" or F64 {wanted}" in problem


def test_groups_of_another_size_than_the_config_says_are_refused_with_both() -> None:
    """128 in the config, 32 in the file: engines would read the wrong scale for three groups of four."""
    (problem, *_) = census("GPTQ, 32 columns", lambda t: None, PACKINGS["GPTQ"].config).problems
    assert "q_proj.qweight is stored as int4-gptq-g128, but" in problem
    assert "q_proj.scales is F16 [4, 1024] instead of" in problem and "F64 [1, 1024], and" in problem
    assert problem.endswith("q_proj.qzeros is I32 [4, 128] instead of I32 [1, 128]")


def test_values_of_an_unknown_kind_are_shown_with_all_that_lies_beside_them() -> None:
    def change(table: Table) -> None:
        table[f"{DOWN}.qweight"] = Tensor("I16", (288, 128))

    (problem,) = census("GPTQ", change).problems
    assert f"{DOWN} is stored as" in problem and ".qweight I16 [288, 128]" in problem and "int4-gptq-g128" in problem


CT = PACKINGS["compressed-tensors int4"].config


def ct_with(**weights: Any) -> dict[str, Any]:
    group = CT["config_groups"]["group_0"]
    return CT | {"config_groups": {"group_0": group | {"weights": group["weights"] | weights}}}


@pytest.mark.parametrize(
    ("said", "words"),
    [
        ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "GPTQ of 3 bits; oddrank moves words of 4 and 8 bits"),
        ({"quant_method": "gptq", "bits": 2, "group_size": 128}, "of 2 bits"),
        ({"quant_method": "gptq", "group_size": 128}, "of None bits"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 100}, "per group of 100 columns; 4-bit words hold 8"),
        ({"quant_method": "gptq", "bits": 4, "group_size": "128"}, "per group of '128' columns"),
        ({"quant_method": "gptq", "bits": 4, "dynamic": {"+:.*down": {"bits": 3}}}, "of 3 bits"),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "marlin"}, 'checkpoint_format "marlin"'),
        ({"quant_method": "gptq", "bits": 4, "is_marlin_format": True}, 'checkpoint_format "marlin"'),
        ({"quant_method": "gptq", "bits": 4, "checkpoint_format": "bitblas"}, '"gptq" and "gptq_v2" are known'),
        ({"quant_method": "awq", "bits": 8, "group_size": 128}, "AWQ of 8 bits; oddrank moves it with 4"),
        ({"quant_method": "awq", "w_bit": 3}, "AWQ of 3 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, 'AWQ of version "gemv"'),
        ({"quant_method": "awq", "bits": 4, "version": "GEMV_FAST"}, 'version "gemv_fast"'),
        (auto_round("auto_round:tequila"), 'packing_format "auto_round:tequila"'),
        (auto_round("auto_round:auto_gptq", bits=2), "AutoRound of 2 bits"),
        (auto_round("auto_round:auto_awq", bits=3), "AutoRound packed as AWQ of 3 bits"),
        (auto_round("auto_round", extra_config={"lm_head": {"bits": 6}}), "AutoRound of 6 bits"),
        (ct_with(num_bits=3), "compressed-tensors pack-quantized weights of 3 bits"),
        (ct_with(num_bits=6), "of 6 bits"),
        (ct_with(strategy="tensor", group_size=None), 'with the strategy "tensor"'),
        (ct_with(group_size=12), "per group of 12 columns"),
    ],
)
def test_what_nobody_moves_is_refused_by_name(
    said: dict[str, Any], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(OddrankError) as caught:
        candidates(said)
    assert words in str(caught.value) and "quantization_config says" in str(caught.value)
    config = json.loads((written("GPTQ") / "config.json").read_text()) | {"quantization_config": said}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").hardlink_to(written("GPTQ") / "model.safetensors")
    for command in (["plan", tmp_path, "--tp", 3], ["check", tmp_path, "--tp", 3], ["pad", tmp_path, tmp_path / "o"]):
        code, out, err = run(capsys, *command, *(["--tp", 3] if command[0] == "pad" else []))
        assert code == 2 and not out and words in err, command
    assert not (tmp_path / "o").exists()


def test_configs_that_make_no_sense_are_no_traceback() -> None:
    """Whatever a config holds, its integers are known or refused in a sentence."""
    junk: list[Any] = [None, True, 4.0, "four", [], {}, -1, 0, 1 << 70, [[]]]
    for method in ("gptq", "awq", "auto-round", "compressed-tensors"):
        for key in ("bits", "group_size", "desc_act", "dynamic", "extra_config", "packing_format", "checkpoint_format",
                    "version", "config_groups", "w_bit", "modules_in_block_to_quantize", "block_name_to_quantize",
                    "modules_to_not_convert", "data_type"):  # fmt: skip
            for value in junk:
                said = {"quant_method": method, "bits": 4, "group_size": 128, key: value}
                try:
                    assert candidates(said)
                except OddrankError as error:
                    assert "quantization_config says" in str(error)
                declared(said)("model.layers.0.mlp.up_proj")
    for value in junk:
        for key in ("num_bits", "group_size", "symmetric", "strategy", "actorder", "type"):
            try:
                assert candidates(ct_with(**{key: value}))
            except OddrankError as error:
                assert "quantization_config says" in str(error)


# -- what a config says of single layers -----------------------------------------------------------------------------


def names(said: dict[str, Any]) -> set[str]:
    return {f.name for f in candidates(said)} - {f.name for f in candidates(None)}


def test_forms_are_those_of_the_config_and_of_its_exceptions() -> None:
    gptq: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    assert names(gptq) == {"int4-gptq-g128"}
    assert names(gptq | {"group_size": -1, "desc_act": True}) == {"int4-gptq-channel"}  # one group has no order
    assert names(gptq | {"desc_act": True}) == {"int4-gptq-g128", "int4-gptq-scattered-g128"}
    assert names(gptq | {"desc_act": True, "static_groups": True}) == {"int4-gptq-g128"}
    dynamic = {"-:.*lm_head.*": {}, "+:.*down.*": {"bits": 8, "group_size": 64}, r".*\.0\..*": {"group_size": -1}}
    assert names(gptq | {"dynamic": dynamic}) == {"int4-gptq-g128", "int8-gptq-g64", "int4-gptq-channel"}
    extra = {"model.layers.0.mlp.up_proj": {"bits": 8}, "lm_head": {"bits": 16, "group_size": -1}}
    assert names(auto_round("auto_round:auto_gptq", extra_config=extra)) == {"int4-gptq-g128", "int8-gptq-g128"}
    assert names(auto_round("auto_round:gptqmodel")) == names(auto_round("auto_round")) == {"int4-gptq-v2-g128"}
    assert names(auto_round("auto_round:llm_compressor", data_type="mx_fp", bits=8)) == set()
    assert names({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}) == {"int4-awq-g64"}
    both = {"group_0": CT["config_groups"]["group_0"], "group_1": ct_with(num_bits=8, strategy="channel",
            symmetric=False)["config_groups"]["group_0"]}  # fmt: skip
    assert names(CT | {"config_groups": both}) == {"int4-pack-asym-g128", "int4-pack-g128", "int8-pack-asym-channel"}
    assert names(ct_with(actorder="group")) == {
        "int4-pack-asym-scattered-g128", "int4-pack-scattered-g128", "int4-pack-asym-g128", "int4-pack-g128",
    }  # fmt: skip
    assert names(ct_with(actorder="weight")) == names(CT)


def test_every_name_makes_its_format_again() -> None:
    every = [*formats().values(), *(f for p in PACKINGS.values() for f in candidates(p.config))]
    every += candidates(ct_with(actorder="group", symmetric=False)) + candidates({"quant_method": "gptq", "bits": 8,
                        "group_size": 32, "desc_act": True, "checkpoint_format": "gptq_v2"})  # fmt: skip
    assert all(format_named(f.name) == f for f in every)
    for name in ("int4-gptq", "int3-gptq-g128", "int4-awq-v2-g128", "int4-pack-g0", "int4-gptq-g-1", "int4-gptq-g128x"):
        with pytest.raises(KeyError):
            format_named(name)


def test_modules_that_the_config_leaves_alone_are_declared_dense() -> None:
    up, head = "model.layers.3.mlp.up_proj", "lm_head"
    gptq: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 128}
    said = declared(gptq | {"dynamic": {r"-:.*\.3\.": {}, r"+:.*\.4\.": {"bits": 8}}})
    four, five = up.replace("3", "4"), up.replace("3", "5")
    assert [said(n) for n in (up, four, five, head)] == ["dense", "int8", "int4", "dense"]
    said = declared(gptq | {"lm_head": True, "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]})
    assert [said(n) for n in (up, up.replace("up", "down"))] == ["int4", "dense"]
    said = declared({"quant_method": "awq", "bits": 4, "modules_to_not_convert": ["mlp", "lm_head"]})
    assert [said(n) for n in (up, head, "model.layers.0.self_attn.q_proj")] == ["dense", "dense", "int4"]
    extra = {up: {"bits": 16}, r".*layers\.4.*": {"bits": 8}}
    said = declared(auto_round("auto_round", extra_config=extra, block_name_to_quantize="model.layers"))
    four, five = up.replace("3", "4"), up.replace("3", "5")
    assert [said(n) for n in (up, four, five, head)] == ["dense", "int8", "int4", "dense"]
    assert declared(auto_round("auto_round:llm_compressor", data_type="mx_fp"))(up) == "mxfp4"


def test_a_config_beside_the_model_s_is_read_where_that_says_nothing(tmp_path: Path) -> None:
    """Older exporters wrote quantize_config.json, and nothing into config.json."""
    from oddrank.planner import make_plan

    source = written("GPTQ")
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").hardlink_to(source / "model.safetensors")
    with pytest.raises(OddrankError, match="only where quantization_config says so"):
        make_plan(tmp_path, 3)
    (tmp_path / "quantize_config.json").write_text(json.dumps({"bits": 4, "group_size": 128, "desc_act": False}))
    assert "int4-gptq-g128" in {use.format for use in make_plan(tmp_path, 3).plan.uses}


# -- what AutoGPTQ writes beside -------------------------------------------------------------------------------------


def test_biases_that_a_model_has_not_are_passed_on(tmp_path: Path) -> None:
    """AutoGPTQ writes one beside every layer; readers leave it out. A bias beside anything else is still an error."""
    import numpy as np
    from formats.codec import Raw

    import oddrank
    from oddrank.planner import make_plan

    def change(base: str, parts: dict[str, Raw]) -> dict[str, Raw]:
        return parts | {".bias": Raw("F16", np.zeros(parts[".scales"].words.shape[1], dtype=np.uint16))}

    made = write(tmp_path / "m", PACKINGS["GPTQ"], change=change)
    planned = make_plan(made.path, 3, executor="vllm")
    biases = sorted(n for n in made.tensors if n.endswith(".bias"))
    assert biases and sorted(planned.census.ignored) == biases
    streamed = dict(oddrank.stream(planned.plan, ((n, made.array(n)) for n in made.tensors)))
    assert all(np.array_equal(streamed[n], made.array(n)) for n in planned.census.ignored)
    table = {n: Tensor(t.dtype, t.shape) for n, t in made.tensors.items()}
    table["model.norm.bias"] = Tensor("F16", (128,))
    view = ConfigView(made.config)
    found = take_census(family_of(view).build(view, "model."), table, PACKINGS["GPTQ"].config)
    assert found.unmatched == ("model.norm.bias",)
