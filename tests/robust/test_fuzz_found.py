"""What the fuzzing found, one test a fault."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from fuzz_model import CONFIG, Model, read, write

from oddrank.checkpoint import Checkpoint
from oddrank.cli import group
from oddrank.errors import OddrankError
from oddrank.planner import make_plan
from oddrank.synth import describe_release, write_headers
from oddrank.transform.config import virtual_config

Change = Callable[[dict[str, Any]], object]


def original(tmp_path: Path, family: str, fmt: str = "bf16") -> Model:
    release = describe_release(family, fmt, size="tiny", layers=2, experts=2, vocab=64)
    return read(write_headers(release, tmp_path / "original"), family)


def changed(tmp_path: Path, family: str, fmt: str, **config: Any) -> Path:
    """A tiny release with these config keys, where its text config or itself has them."""
    model = original(tmp_path, family, fmt)
    own = model.documents[CONFIG]
    own.get("text_config", own).update(config)
    return write(model, tmp_path, tmp_path)


def refused(path: Path, *parts: str, tp: int = 2, **options: Any) -> None:
    with pytest.raises(OddrankError) as caught:
        make_plan(path, tp, **options)
    said = str(caught.value)
    assert said.isprintable() and all(part in said for part in parts), said


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("llama", "num_hidden_layers"),
        ("qwen3_5", "num_hidden_layers"),
        ("gemma4", "num_hidden_layers"),
        ("qwen3_moe", "num_experts"),
        ("deepseek_v3", "num_nextn_predict_layers"),
        ("qwen3_5", "mtp_num_hidden_layers"),
    ],
)
def test_more_layers_or_experts_than_any_model_has(tmp_path: Path, family: str, key: str) -> None:
    """Each was given a name: gigabytes of them."""
    refused(changed(tmp_path, family, "bf16", **{key: 2**31 - 1, "layer_types": None}), key, "2147483647")


def test_more_experts_than_the_checkpoint_has_tensors(tmp_path: Path) -> None:
    path = changed(tmp_path, "qwen3_moe", "bf16", num_hidden_layers=10_000, num_experts=10_000)
    refused(path, "config.json implies", "there are 33 tensors")


@pytest.mark.parametrize(
    ("family", "key", "size"),
    [
        ("llama", "vocab_size", 2**28),
        ("llama", "intermediate_size", 2**28),
        ("deepseek_v3", "num_attention_heads", 2**28),
        ("llama", "head_dim", 2**24),
    ],
)
@pytest.mark.parametrize("executor", ["runtime", "vllm"])
def test_tensors_beyond_any_model(tmp_path: Path, family: str, key: str, size: int, executor: str) -> None:
    """Headers and config agree, over files that are one large hole; an index array of such an axis has gigabytes."""
    model = original(tmp_path, family)
    was = model.documents[CONFIG][key]
    model.documents[CONFIG][key] = size
    for shard in model.shards.values():
        for _, entry in shard.entries:
            entry["shape"] = [size if n == was else n for n in entry["shape"]]
        shard.lay()
    refused(write(model, tmp_path, tmp_path), "beyond any model", executor=executor)


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen3_next"])
def test_no_layer_has_experts(tmp_path: Path, family: str) -> None:
    """A KeyError: tensors along an axis that no part had brought."""
    refused(changed(tmp_path, family, "bf16", decoder_sparse_step=64), "config.json implies 2 of", ".mlp.gate_proj")


def test_experts_only_in_the_draft_layer(tmp_path: Path) -> None:
    """The same, where the config gives experts to no layer but the draft layer, which always has them."""
    model = original(tmp_path, "qwen3_next")
    model.documents[CONFIG]["decoder_sparse_step"] = 64
    (shard,) = model.shards.values()
    kept = [(n, e) for n, e in shard.entries if n.startswith("mtp.") or ".mlp." not in n]
    dense, hidden = model.documents[CONFIG]["intermediate_size"], model.documents[CONFIG]["hidden_size"]
    for layer in range(2):
        for name, shape in (("gate", [dense, hidden]), ("up", [dense, hidden]), ("down", [hidden, dense])):
            kept.append((f"model.layers.{layer}.mlp.{name}_proj.weight", {"dtype": "BF16", "shape": shape}))
    shard.entries = kept
    shard.lay()
    plan = make_plan(write(model, tmp_path, tmp_path), 2).plan
    assert {"mlp", "moe", "experts"} <= {axis.name for axis in plan.model.axes}


@pytest.mark.parametrize("name", ["a\nb", os.fsdecode(b"\xff"), "\x1b[2J", "a\u2028b"])
def test_a_directory_whose_name_no_terminal_should_see(tmp_path: Path, name: str) -> None:
    """The error was several lines, or none at all where it could not be encoded."""
    folder = tmp_path / name
    folder.mkdir()
    (folder / CONFIG).write_text("{")
    (folder / "model.safetensors").write_bytes(b"")
    refused(folder, "config.json is not valid JSON")


@pytest.mark.parametrize("executor", ["runtime", "vllm"])
def test_kv_bytes_of_tens_of_thousands_of_heads(tmp_path: Path, executor: str) -> None:
    path = changed(tmp_path, "llama", "int4-ct-asym")
    refused(path, "cannot meet kv_bytes=4194304", tp=5, executor=executor, constraints={"kv_bytes": 1 << 22})


@pytest.mark.parametrize("group", [99_999, 100_000, 10**20])
def test_groups_that_no_name_has_room_for(tmp_path: Path, group: int) -> None:
    """A format's parameters are part of its name, which is read again with at most five digits (blocks: six)."""
    path = changed(
        tmp_path, "qwen2", "gptq", quantization_config={"quant_method": "gptq", "bits": 4, "group_size": group}
    )
    refused(path, "quantization_config", str(group))


@pytest.mark.parametrize("block", [[138, 2**24], [10**6, 128], [10**30, 10**30]])
def test_blocks_that_no_name_has_room_for(tmp_path: Path, block: list[int]) -> None:
    """Taken for what cannot be a block, as other nonsense is: what is stored decides."""
    path = changed(
        tmp_path, "qwen3", "fp8-block", quantization_config={"quant_method": "fp8", "weight_block_size": block}
    )
    assert make_plan(path, 2).census.uses[-1].format


@pytest.mark.parametrize("pattern", [r"^(?:(?:\w|[a-z]|\.)+)+[^\w.]", r"(?:(?:\w|\w\w|\.)*)*\W\Z"])
def test_a_pattern_that_takes_for_ever(tmp_path: Path, pattern: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("oddrank.formats.declared.PATIENCE", 0.05)
    scheme = {"num_bits": 8, "type": "int", "strategy": "channel"}
    quantization = {
        "quant_method": "compressed-tensors",
        "ignore": ["re:" + pattern],
        "config_groups": {"a": {"weights": scheme}},
    }
    path = changed(tmp_path, "llama", "int8", quantization_config=quantization)
    done = CliRunner().invoke(group, ["check", str(path), "--tp", "2"])
    assert isinstance(done.exception, OddrankError) and "repeats are nested" in str(done.exception)


@pytest.mark.parametrize("pattern", ["re:" + "(" * 3000, "re:a{99999999999}", "re:(?P<a>.)(?P<a>"])
def test_a_pattern_that_is_none(tmp_path: Path, pattern: str) -> None:
    quantization = {"quant_method": "fp8", "modules_to_not_convert": [pattern]}
    path = changed(tmp_path, "qwen3", "fp8-block", quantization_config=quantization)
    assert CliRunner().invoke(group, ["check", str(path), "--tp", "2"], catch_exceptions=False).exit_code == 0


def test_blocks_of_one_element(tmp_path: Path) -> None:
    """Every weight with a scale of its own: a move for each, planned one by one."""
    path = changed(tmp_path, "qwen3", "fp8-block")
    refused(path, "fewer than 16 elements", "16, 32, 64, 128 can be had", constraints={"block": 1})
    assert make_plan(path, 2, constraints={"block": 16}).plan.refined


@pytest.mark.parametrize("executor", ["runtime", "vllm"])
def test_a_group_size_of_mostly_dummies(tmp_path: Path, executor: str) -> None:
    """Sound (the proof held), and of no use: 3 trained query heads in 99 slots."""
    path = changed(tmp_path, "llama", "bf16")
    for gqa in (7, 99):
        refused(
            path, f"gqa={gqa}", "at most 3 query heads", "At most gqa=6", executor=executor, constraints={"gqa": gqa}
        )
    assert make_plan(path, 2, executor=executor, constraints={"gqa": 6}).plan.layout("q_heads").total() == 12


@pytest.mark.parametrize("key", ["rope_parameters", "rope_scaling"])
def test_a_long_rope_that_is_a_number(tmp_path: Path, key: str) -> None:
    """The padded config of phi3 is looked at before it is written."""
    path = changed(tmp_path, "phi3", "bf16", **{key: 2**32})
    plan = make_plan(path, 3, executor="vllm").plan
    with pytest.raises(OddrankError, match=f"{key} should be an object"):
        virtual_config(plan, Checkpoint.open(path).config)


@pytest.mark.parametrize("found", [[[0]], ["0"], [{}], list(range(9))])
def test_layers_without_experts_that_are_no_numbers(tmp_path: Path, found: list[object]) -> None:
    """A TypeError: they were taken for the members of a set."""
    refused(
        changed(tmp_path, "qwen3_moe", "bf16", mlp_only_layers=found), "mlp_only_layers should be an array of layer"
    )


@pytest.mark.parametrize("key", ["x", "-1", "1" * 5000, "1.0", ""])
def test_layers_of_gemma4_that_are_no_numbers(tmp_path: Path, key: str) -> None:
    path = changed(tmp_path, "gemma4", "bf16", per_layer_config={key: {"head_dim": 64}})
    refused(path, "per_layer_config should be an object by layer numbers")


def test_more_layers_borrow_keys_than_there_are(tmp_path: Path) -> None:
    """A pattern was made of the number of each."""
    refused(changed(tmp_path, "gemma4", "bf16", num_kv_shared_layers=2**31 - 1), "num_kv_shared_layers", "from 0 to 2")


def test_more_heads_asked_for_than_any_that_divide_the_hidden_size(tmp_path: Path) -> None:
    """An IndexError, where the error was to name some that do."""
    path = changed(tmp_path, "gemma3", "bf16")
    plan = make_plan(path, 2, executor="vllm", constraints={"q_heads": 1000}).plan
    with pytest.raises(OddrankError, match=r"has 1000 heads.*No larger number divides it: ask for fewer"):
        virtual_config(plan, Checkpoint.open(path).config)
