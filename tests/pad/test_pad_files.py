"""What `oddrank pad` leaves on the disk: index, record, checksums, everything else of the directory, and refusals."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from pad_models import command, config, tree, weights, write_model
from safetensors import safe_open

from oddrank.checkpoint import Checkpoint
from oddrank.errors import OddrankError
from oddrank.layout.plan import Plan
from oddrank.planner import make_plan
from oddrank.transform.pad import pad, read_record

OTHERS = {
    "tokenizer.json": b'{"version": "1.0"}',
    "chat_template.jinja": b"{{ messages }}",
    "LICENSE": b"A licence\n",
    "nested/folder/notes.txt": bytes(range(256)),
    "custom_code.py": b"x = 1\n",
}


def with_others(path: Path) -> Path:
    for name, data in OTHERS.items():
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_bytes(data)
    return path


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("sharded") / "model"
    return with_others(write_model(path, "qwen3", q=12, kv=4, mlp=45, dtype=torch.bfloat16, max_shard_size="30KB"))


@pytest.fixture(scope="module")
def single(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("single") / "model"
    return with_others(write_model(path, "llama", q=9, kv=3, mlp=40, tied=True))


def plan_of(model: Path, tp: int, layout: str = "pad", executor: str = "vllm") -> Plan:
    return make_plan(model, tp, executor=executor, layout=layout).plan


def test_everything_else_is_carried_over(sharded: Path, single: Path, tmp_path: Path) -> None:
    for model in (sharded, single):
        out = tmp_path / f"{model.parent.name}-out"
        pad(plan_of(model, 3), Checkpoint.open(model), out)
        before, after = tree(model), tree(out)
        assert set(after) == set(before) | {"oddrank.json"}
        for name in set(before) - {"config.json", "model.safetensors.index.json"}:
            if not name.endswith(".safetensors"):
                assert after[name] == before[name], name
    assert sorted(os.listdir(tmp_path)) == sorted(f"{m.parent.name}-out" for m in (sharded, single))


def test_the_index_is_of_the_new_files(sharded: Path, tmp_path: Path) -> None:
    pad(plan_of(sharded, 3), Checkpoint.open(sharded), tmp_path / "out")
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    where: dict[str, str] = {}
    size = 0
    for file in sorted((tmp_path / "out").glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
            for name in opened.keys():  # noqa: SIM118 (safe_open is no dict)
                where[name] = file.name
                size += opened.get_tensor(name).nbytes
    assert index["weight_map"] == where
    assert index["metadata"]["total_size"] == size
    old = json.loads((sharded / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == old["weight_map"] and size > old["metadata"]["total_size"]


def test_the_record_holds_the_plan_and_every_checksum(sharded: Path, tmp_path: Path) -> None:
    plan = plan_of(sharded, 5, "replicate")
    done = pad(plan, Checkpoint.open(sharded), tmp_path / "out")
    record = json.loads((tmp_path / "out" / "oddrank.json").read_text())
    assert Plan.from_json(json.dumps(record["plan"])) == plan == read_record(tmp_path / "out")
    files = tree(tmp_path / "out")
    files.pop("oddrank.json")
    listed = {f["name"]: (f["size"], f["sha256"]) for f in record["files"]}
    assert len(listed) == len(record["files"])
    assert listed == {name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in files.items()}
    assert {f.name for f in done.files} == set(files)


def test_the_identity_plan_writes_the_same_model(sharded: Path, tmp_path: Path) -> None:
    plan = plan_of(sharded, 4, "auto")
    # 45 channels do not divide by 4, so not that one: 1 rank is always the stock model
    one = plan_of(sharded, 1, "auto")
    assert one.is_identity() and not plan.is_identity()
    done = pad(one, Checkpoint.open(sharded), tmp_path / "out")
    before, after = tree(sharded), tree(tmp_path / "out")
    assert done.changed == 0
    for name, data in before.items():
        if name.endswith(".json") and "tokenizer" not in name:
            assert (
                json.loads(after[name]).items()
                >= {k: v for k, v in json.loads(data).items() if k != "metadata"}.items()
            )
        else:
            assert after[name] == data, name
    assert config(tmp_path / "out") == config(sharded)


def test_tensors_of_several_dtypes_keep_their_alignment(single: Path, tmp_path: Path) -> None:
    """float32 norms among bf16 matrices: torch can view each tensor of the result."""
    from safetensors.torch import load_file, save_file

    mixed = tmp_path / "mixed"
    mixed.mkdir()
    (mixed / "config.json").write_bytes((single / "config.json").read_bytes())
    tensors = load_file(single / "model.safetensors")
    tensors = {n: t if "norm" in n else t.bfloat16() for n, t in tensors.items()}
    save_file(tensors, mixed / "model.safetensors", {"format": "pt"})
    pad(plan_of(mixed, 2), Checkpoint.open(mixed), tmp_path / "out")
    before, after = weights(mixed), weights(tmp_path / "out")
    assert {n: t.dtype for n, t in before.items()} == {n: t.dtype for n, t in after.items()}
    for name in before:
        if "norm" in name or "embed" in name:
            assert torch.equal(before[name], after[name])


def test_the_runtime_executor_is_refused(single: Path, tmp_path: Path) -> None:
    with pytest.raises(OddrankError, match="no single checkpoint"):
        pad(plan_of(single, 2, "auto", "runtime"), Checkpoint.open(single), tmp_path / "out")
    said = command("pad", single, tmp_path / "out", "--tp", "2", "--executor", "runtime")
    assert said.returncode == 2 and "--executor vllm" in said.stderr
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("kind", ["a directory with something in it", "a file", "the model", "inside", "around"])
def test_refused_places(single: Path, tmp_path: Path, kind: str) -> None:
    out = tmp_path / "out"
    if kind == "a file":
        out.write_text("mine")
    elif kind == "a directory with something in it":
        out.mkdir()
        (out / "mine.txt").write_text("mine")
    else:
        out = {"the model": single, "inside": single / "padded", "around": single.parent}[kind]
    before = tree(single.parent), tree(tmp_path)
    said = command("pad", single, out, "--tp", "2")
    assert said.returncode == 2
    one_line(said.stderr)
    assert (tree(single.parent), tree(tmp_path)) == before


def test_an_empty_directory_is_taken(single: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    said = command("pad", single, tmp_path / "out", "--tp", "2", "--layout", "pad", "--json")
    assert said.returncode == 0, said.stderr
    report = json.loads(said.stdout)
    assert report["path"] == str(tmp_path / "out") and report["tp"] == 2 and report["layout"] == "pad"
    assert report["resumed"] == 0 and report["changed"] == 8 and report["tensors"] == 20
    assert report["bytes_written"] == (tmp_path / "out" / "model.safetensors").stat().st_size


def test_human_output_names_the_result(single: Path, tmp_path: Path) -> None:
    said = command("pad", single, tmp_path / "out", "--tp", "2", "--layout", "pad")
    assert said.returncode == 0 and said.stderr == ""
    assert str(tmp_path / "out") in said.stdout and "8 of 20 tensors" in said.stdout


def test_a_padded_directory_can_be_planned_and_padded_again(single: Path, tmp_path: Path) -> None:
    """It is an ordinary checkpoint: what was padded for 2 goes on to 5 and still has one record, the last."""
    pad(plan_of(single, 2), Checkpoint.open(single), tmp_path / "two")
    pad(plan_of(tmp_path / "two", 5), Checkpoint.open(tmp_path / "two"), tmp_path / "five")
    assert read_record(tmp_path / "five").tp == 5
    assert config(tmp_path / "five")["num_attention_heads"] % 5 == 0


@pytest.mark.parametrize("damage", ["no record", "not JSON", "no plan", "a plan of nothing"])
def test_records_that_are_none(tmp_path: Path, damage: str) -> None:
    content: dict[str, Any] = {"not JSON": "{", "no plan": "{}", "a plan of nothing": '{"plan": {}}'}
    if damage in content:
        (tmp_path / "oddrank.json").write_text(content[damage])
    with pytest.raises(OddrankError):
        read_record(tmp_path)


def one_line(error: str) -> None:
    assert error.startswith("oddrank: ") and error.count("\n") == 1 and "Traceback" not in error, error
