"""The hub's cache: what is in it is not asked for, what is not is fetched, and what is missing offline is named."""

import hashlib
import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from hub_commands import headers, one_file, refusal, run, small
from hub_server import Hub, Repo
from huggingface_hub import constants, snapshot_download

from oddrank import Checkpoint, OddrankError, make_plan
from oddrank.checkpoint.directory import INDEX
from oddrank.engines.vllm.planning import checkpoint_folder

SECOND = "model-00002-of-00003.safetensors"


def digests(folder: Path, names: Iterable[str]) -> dict[str, str]:
    return {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in names}


def weights(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.glob("*.safetensors"))


@pytest.fixture
def model(hub: Hub, tmp_path: Path) -> Path:
    """org/model's files."""
    folder = small(tmp_path / "model")
    hub.repos["org/model"] = Repo(folder)
    return folder


def test_a_cached_model_is_used_without_a_request(
    hub: Hub, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot_download("org/model", allow_patterns=["*.json", "*.safetensors"])
    hub.forget()
    hub.repos["org/model"].refs["main"] = "f" * 40  # the hub is not asked whether it is the latest
    for command in ("plan", "check"):
        code, out, err = run(capsys, command, "org/model", "--tp", 2, "--json")
        assert code == 0 and json.loads(out)["model"] == "model", err
    code, _, err = run(capsys, "pad", "org/model", tmp_path / "padded", "--tp", 3)
    assert code == 0, err
    assert not hub.asked


def test_only_what_is_missing_is_asked_for_and_of_the_cached_commit(
    hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = hub.repos["org/model"].refs["main"]
    snapshot_download("org/model", allow_patterns=["config.json", INDEX, "*-00001-*"])
    hub.forget()
    hub.repos["org/model"].refs.update(main="f" * 40, old=commit)
    checkpoint = Checkpoint.open("org/model")
    assert checkpoint.tensors == Checkpoint.open(model).tensors
    assert sorted({a.file for a in hub.asked}) == ["", SECOND, "model-00003-of-00003.safetensors"]
    assert all(commit in a.path for a in hub.asked if a.host == "hub")
    # what is there is read there
    here = next(n for n, i in checkpoint.tensors.items() if "-00001-" in i.file)
    hub.forget()
    assert bytes(checkpoint.raw(here)) == bytes(Checkpoint.open(model).raw(here))
    assert not hub.asked
    fetched = checkpoint.fetched()
    assert fetched.path.name == commit and fetched.name == "model"
    assert not hub.of("config.json") and not hub.of("model-00001-of-00003.safetensors") and hub.of(SECOND)
    assert digests(fetched.path, weights(model)) == digests(model, weights(model))


def test_pad_plans_first_and_then_fetches_what_belongs_to_the_model(
    hub: Hub, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    refusal(capsys, "pad", "org/model", tmp_path / "out", "--tp", 3, "--constraint", "kv_bytes=33")
    assert not Path(constants.HF_HUB_CACHE).exists()
    code, _, err = run(capsys, "pad", "org/model", tmp_path / "out", "--tp", 3)
    assert code == 0, err
    code, _, err = run(capsys, "pad", model, tmp_path / "local", "--tp", 3)
    assert code == 0, err
    names = [p.name for p in (tmp_path / "local").iterdir() if p.name != "oddrank.json"]
    assert "README.md" in names and weights(tmp_path / "local")
    assert digests(tmp_path / "out", names) == digests(tmp_path / "local", names)
    assert not hub.of("pytorch_model.bin") and not hub.of("original/consolidated.00.pth")
    recorded = json.loads((tmp_path / "out" / "oddrank.json").read_text())
    assert recorded["source"] == "model" and recorded["plan"]["name"] == "model"


@pytest.mark.parametrize("command", [["generate", "--prompt-ids", "1"], ["serve"]])
def test_the_runtime_is_given_what_was_fetched(
    hub: Hub, model: Path, command: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[Checkpoint] = []

    def take(path: Path, *_args: object, **_options: object) -> None:
        given.append(Checkpoint.open(path))
        raise OddrankError("far enough")

    hub.repos["org/model"].refs["v2"] = "b" * 40
    monkeypatch.setattr(
        {"generate": "oddrank.runtime.generate.generate", "serve": "oddrank.server.run.serve"}[command[0]], take
    )
    code, _, err = run(capsys, command[0], "org/model@v2", "--tp", 3, *command[1:])
    assert code == 2 and err.endswith("oddrank: far enough\n")
    (found,) = given
    assert found.name == "model" and found.path.name == "b" * 40
    assert digests(found.path, weights(model)) == digests(model, weights(model))


def test_a_model_that_changes_between_plan_and_download(hub: Hub, model: Path) -> None:
    checkpoint = Checkpoint.open("org/model")
    hub.repos["org/model"].refs["main"] = "f" * 40
    with pytest.raises(OddrankError, match="org/model was changed on the hub while"):
        checkpoint.fetched()


def test_a_fetch_that_fails(hub: Hub, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def gated(handler: Any, _file: str) -> bool:
        if handler.command == "HEAD":
            handler.refuse(403, "GatedRepo", "Access to model org/model is restricted")
        return handler.command == "HEAD"

    hub.faults["hub", SECOND] = gated
    code, _, err = run(capsys, "pad", "org/model", tmp_path / "out", "--tp", 3)
    assert code == 2 and "is gated" in err.splitlines()[-1] and not (tmp_path / "out").exists()


def test_offline_names_what_is_missing(
    hub: Hub, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    said = refusal(capsys, "plan", "org/model", "--tp", 2)
    assert constants.HF_HUB_CACHE in said and "does not hold it" in said and "hf download org/model." in said
    assert "--revision v2" in refusal(capsys, "plan", "org/model@v2", "--tp", 2)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    snapshot_download("org/model", allow_patterns=["config.json", INDEX, "*-00003-*"])
    hub.forget()
    capsys.readouterr()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    for command in (["plan"], ["check"], ["pad"], ["generate"], ["serve"], ["verify"]):
        more = {"pad": [tmp_path / "out"], "generate": ["--prompt", "x"]}.get(command[0], [])
        said = refusal(capsys, *command, "org/model", *more, "--tp", 2)
        assert "HF_HUB_OFFLINE" in said and "lacks 2 files: 'model-00001" in said and SECOND in said
    assert not hub.asked and not (tmp_path / "out").exists()


def test_offline_with_everything_there(
    hub: Hub, model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    snapshot_download("org/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    hub.forget()
    assert make_plan("org/model", 2).plan == make_plan(model, 2).plan
    assert run(capsys, "check", "org/model", "--tp", 2)[0] == 0 and not hub.asked


def test_a_snapshot_of_a_model_without_an_index(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repos["org/one"] = Repo(one_file(tmp_path / "one"))
    snapshot_download("org/one", allow_patterns=["config.json"])
    assert Checkpoint.open("org/one").path == Path("org/one")
    snapshot_download("org/one", allow_patterns=["*.safetensors"])
    hub.forget()
    assert Checkpoint.open("org/one").path.is_dir() and not hub.asked


def test_a_plan_for_a_model_and_a_drafter_of_the_hub(hub: Hub, model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "org/model", "--drafter", "org/model", "--tp", 3, "--executor", "vllm", "--json"]
    code, out, err = run(capsys, *asked)
    assert code == 0 and json.loads(out)["drafter"]["model"] == "model", err


def test_what_was_fetched_computes_what_transformers_computes(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repos["org/one"] = Repo(one_file(tmp_path / "one"))
    code, out, err = run(capsys, "verify", "org/one", "--tp", 2, "--only", "runtime", "--json")
    assert code == 0 and json.loads(out)["ok"], err


def test_the_engine_of_vllm_fetches_by_the_same_way(hub: Hub, model: Path, tmp_path: Path) -> None:
    folder = checkpoint_folder("org/model", None, str(tmp_path / "other"))
    assert folder.is_relative_to((tmp_path / "other").resolve()) and Checkpoint.open(folder).name == "model"
    with pytest.raises(OddrankError, match="no revision 'v2'"):
        checkpoint_folder("org/model", "v2", None)
    with pytest.raises(OddrankError, match="no model org/none"):
        checkpoint_folder("org/none", None, None)


def test_weights_in_the_store_that_repositories_share(hub: Hub, model: Path, tmp_path: Path) -> None:
    """huggingface_hub 2 keeps a weight file once for a whole cache: the repository's blob is a link to it."""
    shared = pytest.importorskip("huggingface_hub.utils._shared_blobs")
    snapshot = Path(snapshot_download("org/model"))
    blob = Path((snapshot / SECOND).parent / (snapshot / SECOND).readlink()).resolve()
    size, cache = blob.stat().st_size, constants.HF_HUB_CACHE
    assert shared.publish_blob_to_shared_store(
        blob_path=str(blob), xet_hash="ab" * 32, cache_dir=cache, expected_size=size
    )
    assert blob.is_symlink() and (snapshot / SECOND).resolve().is_relative_to(Path(cache).resolve() / "blobs")
    assert Checkpoint.open("org/model").tensors == Checkpoint.open(model).tensors
    # another repository's blob in the same store is not the model's, however the link is spelled
    other = Path(cache) / "models--org--other" / "blobs" / "x"
    other.parent.mkdir(parents=True)
    other.symlink_to(blob.resolve())
    (snapshot / SECOND).unlink()
    (snapshot / SECOND).symlink_to(other)
    with pytest.raises(OddrankError, match="leads outside"):
        Checkpoint.open("org/model")


def test_a_large_model_is_planned_beside_a_cached_part(hub: Hub, tmp_path: Path) -> None:
    """The shards that a broken download left behind are not asked for."""
    folder = headers(tmp_path / "big", 5)
    hub.repos["org/big"] = Repo(folder)
    snapshot = Path(constants.HF_HUB_CACHE) / "models--org--big" / "snapshots" / hub.repos["org/big"].refs["main"]
    snapshot.mkdir(parents=True)
    refs = snapshot.parent.parent / "refs"
    refs.mkdir()
    (refs / "main").write_text(snapshot.name)
    for name in ("config.json", "model-00001-of-00005.safetensors", "model-00004-of-00005.safetensors"):
        shutil.copy(folder / name, snapshot / name) if name == "config.json" else (snapshot / name).hardlink_to(
            folder / name
        )
    assert Checkpoint.open("org/big").tensors == Checkpoint.open(folder).tensors
    assert {a.file[:11] for a in hub.asked if a.file} == {INDEX[:11], "model-00002", "model-00003", "model-00005"}
