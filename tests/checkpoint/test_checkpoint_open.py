"""Model directories: what opens, what is refused, and that the views show the stored bytes."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_files import library_file, model, write_index
from safetensors import deserialize
from safetensors.numpy import load_file

from oddrank.checkpoint import Checkpoint
from oddrank.errors import OddrankError

TWO = {"model-00001-of-00002.safetensors": ["a", "b"], "model-00002-of-00002.safetensors": ["c"]}


def refused(path: Path | str, *parts: str) -> str:
    with pytest.raises(OddrankError) as error:
        Checkpoint.open(path)
    message = str(error.value)
    for part in parts:
        assert part in message
    assert "\n" not in message
    return message


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("shards", [TWO, {"model.safetensors": ["a", "b", "c"]}])
def test_arrays_equal_what_the_library_loads(tmp_path: Path, shards: dict[str, list[str]], index: bool) -> None:
    path = model(tmp_path / "m", shards, index)
    with Checkpoint.open(path) as checkpoint:
        assert checkpoint.files == tuple(shards)
        assert checkpoint.config == {"model_type": "llama"}
        assert set(checkpoint.tensors) == {"a", "b", "c"}
        for shard in shards:
            assert checkpoint.metadata[shard] == {"format": "pt"}
            for name, value in load_file(path / shard).items():
                array = checkpoint.array(name)
                assert array.dtype == np.uint32 and array.shape == (2, 3)
                assert np.array_equal(array.view(np.float32), value)
                assert bytes(checkpoint.raw(name)) == value.tobytes()


def test_every_dtype_is_seen_as_its_bytes(tmp_path: Path) -> None:
    path = model(tmp_path / "m", {})
    (path / "model.safetensors.index.json").unlink()
    rng = np.random.default_rng(0)
    names = [
        "bool",
        "uint8",
        "int8",
        "int16",
        "uint16",
        "float16",
        "bfloat16",
        "int32",
        "uint32",
        "float32",
        "float64",
    ]
    names += [
        "int64",
        "uint64",
        "complex64",
        "float8_e4m3fn",
        "float8_e5m2",
        "float8_e8m0fnu",
        "float8_e4m3fnuz",
    ]
    width = {"16": 2, "32": 4, "64": 8}
    tensors = {}
    for name in names:
        size = width.get(name[-2:], 1) * 15
        tensors[name] = (name, [3, 5], rng.integers(0, 256, size, np.uint8).tobytes())
    tensors["packed"] = ("float4_e2m1fn_x2", [3, 4], bytes(range(12)))
    tensors["scalar"] = ("float32", [], b"\1\2\3\4")
    tensors["empty"] = ("float32", [4, 0, 2], b"")
    library_file(path / "model.safetensors", tensors)
    checkpoint = Checkpoint.open(path)
    loaded = dict(deserialize((path / "model.safetensors").read_bytes()))
    assert set(loaded) == set(checkpoint.tensors) == set(tensors)
    for name, found in loaded.items():
        info, array = checkpoint.tensors[name], checkpoint.array(name)
        assert info.dtype == found["dtype"] and list(info.shape) == found["shape"]
        assert array.tobytes() == bytes(found["data"]) == tensors[name][2]
        if name not in ("packed", "empty", "scalar"):
            assert array.shape == (3, 5) and array.dtype.kind == "u"
    assert checkpoint.array("packed").shape == (3, 4)
    assert checkpoint.array("scalar").shape == ()
    assert checkpoint.array("empty").shape == (4, 0, 2)


def test_views_are_read_only_and_share_the_mapping(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(model(tmp_path / "m", TWO))
    first, again = checkpoint.array("a"), checkpoint.array("a")
    assert np.shares_memory(first, again)
    with pytest.raises(ValueError, match="read-only"):
        first[0, 0] = 1
    with pytest.raises(ValueError, match="WRITEABLE"):
        first.flags.writeable = True


def test_views_outlive_release_and_close(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(model(tmp_path / "m", TWO))
    view = checkpoint.array("c")
    before = view.copy()
    checkpoint.release()
    checkpoint.release(["a", "c"])
    assert np.array_equal(view, before)
    checkpoint.close()
    assert np.array_equal(view, before)
    assert np.array_equal(checkpoint.array("c"), before)


def resident(path: Path) -> int:
    """Bytes of the file mapped into this process now."""
    total, here = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            here = line.endswith(str(path))
        elif here and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


def test_release_gives_pages_back(tmp_path: Path) -> None:
    path = model(tmp_path / "m", {})
    (path / "model.safetensors.index.json").unlink()
    size = 8 << 20
    library_file(path / "model.safetensors", {n: ("uint8", [size], bytes(size)) for n in ("a", "b")})
    checkpoint = Checkpoint.open(path)
    file = checkpoint.location("model.safetensors")
    assert resident(file) == 0
    assert checkpoint.array("a").sum() + checkpoint.array("b").sum() == 0
    assert resident(file) >= 2 * size
    checkpoint.release(["a"])
    assert size <= resident(file) < size + (1 << 20)
    checkpoint.release()
    assert resident(file) == 0


def test_unknown_tensor(tmp_path: Path) -> None:
    checkpoint = Checkpoint.open(model(tmp_path / "m", TWO))
    with pytest.raises(OddrankError, match="no tensor 'x' among its 3"):
        checkpoint.array("x")


def test_a_file_that_changed_is_not_mapped(tmp_path: Path) -> None:
    path = model(tmp_path / "m", {"model.safetensors": ["a"]})
    checkpoint = Checkpoint.open(path)
    os.truncate(path / "model.safetensors", 20)
    with pytest.raises(OddrankError, match="20 bytes now"):
        checkpoint.array("a")


def test_no_such_path(tmp_path: Path) -> None:
    refused(tmp_path / "x", "There is no")
    refused("some-org/some-model", "some-org/some-model", "HF_HUB_OFFLINE", "hf download some-org/some-model")
    refused("a\0b", "not a path")


def test_a_file_is_not_a_directory(tmp_path: Path) -> None:
    path = model(tmp_path / "m", {"model.safetensors": ["a"]})
    refused(path / "model.safetensors", "is a file", repr(str(path)))
    refused(path / "model.safetensors" / "x", "There is no")


def test_no_config(tmp_path: Path) -> None:
    path = model(tmp_path / "m", TWO)
    (path / "config.json").unlink()
    refused(path, "no config.json")


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("{", "not valid JSON"),
        ("", "not valid JSON"),
        ("\xff", "not valid JSON"),
        ("[]", "array where an object"),
        ("null", "null where an object"),
        ('{"a":' * 100_000 + "1" + "}" * 100_000, "nested too deeply"),
        ('{"a":' * 100 + "1" + "}" * 100, "nested too deeply"),
        ("[NaN," * 100_000, "nested too deeply"),
        ('{"a": NaN, "b": "\\ud800"}', "not valid Unicode"),
    ],
)
def test_broken_config(tmp_path: Path, text: str, part: str) -> None:
    path = model(tmp_path / "m", TWO)
    (path / "config.json").write_text(text, encoding="latin-1")
    refused(path, part, "config.json")


def test_python_json_numbers_are_read(tmp_path: Path) -> None:
    path = model(tmp_path / "m", TWO, config={"time_step_limit": [0.0, float("inf")]})
    assert Checkpoint.open(path).config == {"time_step_limit": [0.0, float("inf")]}


def test_config_that_is_a_directory(tmp_path: Path) -> None:
    path = model(tmp_path / "m", TWO)
    (path / "config.json").unlink()
    (path / "config.json").mkdir()
    refused(path, "not a regular file")


def test_a_pipe_does_not_hang(tmp_path: Path) -> None:
    path = model(tmp_path / "m", {}, index=False)
    os.mkfifo(path / "model.safetensors")
    refused(path, "not a regular file")


def test_missing_shards(tmp_path: Path) -> None:
    path = model(tmp_path / "m", TWO)
    (path / "model-00001-of-00002.safetensors").unlink()
    refused(path, "names 2 weight files and 1 of them are missing", "model-00001-of-00002.safetensors")
    (path / "model.safetensors.index.json").unlink()
    refused(path, "1 of 2 shards", "number 1 is the first of 1 missing")


def test_numbers_in_file_names_may_be_absurd(tmp_path: Path) -> None:
    path = model(tmp_path / "m", {"model-00001-of-99999999999999999999.safetensors": ["a"]}, index=False)
    refused(path, "number 2 is the first of 99999999999999999998 missing")


def test_two_sets_of_shards(tmp_path: Path) -> None:
    path = model(tmp_path / "m", {**TWO, "model-00001-of-00001.safetensors": ["d"]}, index=False)
    refused(path, "mixes shards")
    path = model(tmp_path / "n", {**TWO, "model.safetensors": ["d"]}, index=False)
    refused(path, "holds both model.safetensors and")


def test_single_file_beside_an_index_of_others(tmp_path: Path) -> None:
    path = model(tmp_path / "m", TWO)
    library_file(path / "model.safetensors", {"a": ("float32", [1], b"1234")})
    refused(path, "vLLM the other")


def test_index_disagrees(tmp_path: Path) -> None:
    one, two = TWO
    path = model(tmp_path / "m", TWO)
    write_index(path, {"a": one, "b": one, "c": one, "d": two})
    refused(path, "places tensor 'c' in", "but it is in 'model-00002")
    write_index(path, {"a": one, "b": one, "c": two, "d": two})
    refused(path, "places tensor 'd'", "does not hold it")
    write_index(path, {"a": one, "c": two})
    refused(path, "holds tensor 'b', which model.safetensors.index.json does not name (1 such")


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"weight_map": 1}', '{"weight_map": {"a": 1}}', '{"weight_map": {}}']
)
def test_broken_index(tmp_path: Path, text: str) -> None:
    path = model(tmp_path / "m", TWO)
    (path / "model.safetensors.index.json").write_text(text)
    refused(path, "index.json")


def test_deep_index(tmp_path: Path) -> None:
    path = model(tmp_path / "m", TWO)
    (path / "model.safetensors.index.json").write_text('{"x":' * 100_000)
    refused(path, "nested too deeply")


def test_duplicate_tensor(tmp_path: Path) -> None:
    path = model(tmp_path / "m", {**TWO, "model-00002-of-00002.safetensors": ["c", "b"]}, index=False)
    refused(path, "Tensor 'b' is stored twice", "model-00001", "model-00002")


@pytest.mark.parametrize(
    "name", ["../x.safetensors", "/etc/x.safetensors", "a/../../x.safetensors", "", "..", "a\0.safetensors"]
)
def test_index_points_outside(tmp_path: Path, name: str) -> None:
    path = model(tmp_path / "m", TWO)
    library_file(tmp_path / "x.safetensors", {"a": ("float32", [1], b"1234")})
    write_index(path, {"a": name})
    refused(path, "index.json")


def test_climbing_is_named_as_such(tmp_path: Path) -> None:
    path = model(tmp_path / "m", TWO)
    library_file(tmp_path / "x.safetensors", {"a": ("float32", [1], b"1234")})
    write_index(path, {"a": "../x.safetensors"})
    refused(path, "'../x.safetensors'", "lies outside the model directory")
    write_index(path, {"a": str(tmp_path / "x.safetensors")})
    refused(path, "lies outside the model directory")


def test_links_that_leave_are_refused(tmp_path: Path) -> None:
    path = model(tmp_path / "m", {"model.safetensors": ["a"]})
    outside = tmp_path / "out.safetensors"
    (path / "model.safetensors").rename(outside)
    (path / "model.safetensors").symlink_to(outside)
    refused(path, "link that leads outside", str(outside))
    (path / "model.safetensors.index.json").unlink()
    refused(path, "link that leads outside")
    (path / "model.safetensors").unlink()
    outside.rename(path / "weights.safetensors")
    (path / "model.safetensors").symlink_to("weights.safetensors")
    assert list(Checkpoint.open(path).tensors) == ["a"]


def test_a_directory_of_the_index_that_is_a_link(tmp_path: Path) -> None:
    path = model(tmp_path / "m", TWO)
    model(tmp_path / "other", {"x.safetensors": ["a"]})
    (path / "sub").symlink_to(tmp_path / "other")
    write_index(path, {"a": "sub/x.safetensors"})
    refused(path, "link that leads outside")


def hub_cache(tmp_path: Path) -> Path:
    """The layout of the hub's cache: snapshots/REVISION/FILE is a link to ../../blobs/HASH."""
    repository = tmp_path / "hub" / "models--org--name"
    snapshot = model(repository / "snapshots" / "0123abc", TWO)
    (repository / "blobs").mkdir()
    for number, file in enumerate(sorted(snapshot.iterdir())):
        blob = repository / "blobs" / f"{number:040x}"
        file.rename(blob)
        file.symlink_to(f"../../blobs/{blob.name}")
    return snapshot


def test_hub_cache_snapshots_work(tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path)
    checkpoint = Checkpoint.open(snapshot)
    assert checkpoint.array("c").view(np.float32)[0, 0] == 12
    assert checkpoint.other_files() == ("config.json",)
    (tmp_path / "shortcut").symlink_to(snapshot)
    assert Checkpoint.open(tmp_path / "shortcut").tensors == checkpoint.tensors


def test_hub_cache_may_not_read_another_repository(tmp_path: Path) -> None:
    snapshot = hub_cache(tmp_path)
    other = tmp_path / "hub" / "models--org--other" / "blobs"
    other.mkdir(parents=True)
    library_file(other / "x", {"a": ("float32", [1], b"1234")})
    shard = snapshot / "model-00001-of-00002.safetensors"
    shard.unlink()
    shard.symlink_to("../../../models--org--other/blobs/x")
    refused(snapshot, "link that leads outside")


@pytest.mark.parametrize(
    ("file", "part"),
    [
        ("pytorch_model.bin", "pickle"),
        ("model.Q4_1.gguf", "GGUF"),
        ("adapter_model.safetensors", "rename it"),
        ("README.md", "no .safetensors"),
    ],
)
@pytest.mark.parametrize("config", [True, False])
def test_other_formats_say_what_to_do(tmp_path: Path, file: str, part: str, config: bool) -> None:
    (tmp_path / file).write_bytes(b"x")
    if config:
        (tmp_path / "config.json").write_text("{}")
    refused(tmp_path, part, file if file != "README.md" else "complete with weights")


def test_an_empty_directory(tmp_path: Path) -> None:
    refused(tmp_path, "no .safetensors file (0 other files)")
    (tmp_path / "folder").mkdir()
    (tmp_path / "notes.txt").write_text("x")
    refused(tmp_path, "no .safetensors file (1 other file)")


def test_shards_without_tensors(tmp_path: Path) -> None:
    path = model(tmp_path / "m", {"model.safetensors": []}, index=False)
    refused(path, "no tensor")


@pytest.mark.skipif(sys.platform != "linux", reason="drops privileges with setuid")
@pytest.mark.parametrize(
    "file", [".", "config.json", "model-00001-of-00002.safetensors", "model.safetensors.index.json"]
)
def test_unreadable_files(tmp_path: Path, file: str) -> None:
    """As another user where the tests run as root, whom no mode keeps out."""
    path = model(tmp_path / "m", TWO)
    code = (
        "import os, sys; from oddrank.checkpoint import Checkpoint; from oddrank import OddrankError\n"
        "os.chdir(sys.argv[1]); os.geteuid() or os.setuid(65534)\n"
        "try: Checkpoint.open('m')\n"
        "except OddrankError as error: print(error)\n"
    )
    for folder in (path, *path.parents[:3]):
        if folder != path.parents[2] or folder.stat().st_uid == os.getuid():
            folder.chmod(0o755)
    (path / file).chmod(0)
    try:
        result = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    finally:
        (path / file).chmod(0o755)
    assert "Permission denied" in result.stdout, result.stdout + result.stderr
    assert result.stdout.count("\n") == 1 and not result.stderr


def test_other_files(tmp_path: Path) -> None:
    path = model(tmp_path / "m", TWO)
    for name in ("tokenizer.json", "figures/a.png", ".gitattributes", "README.md"):
        (path / name).parent.mkdir(exist_ok=True)
        (path / name).write_text("x")
    for name in (
        ".git/HEAD",
        ".cache/huggingface/x",
        "consolidated.safetensors",
        "original/consolidated.00.pth",
        "m.gguf",
    ):
        (path / name).parent.mkdir(parents=True, exist_ok=True)
        (path / name).write_text("x")
    checkpoint = Checkpoint.open(path)
    expected = (".gitattributes", "README.md", "config.json", "figures/a.png", "tokenizer.json")
    assert checkpoint.other_files() == expected
    assert checkpoint.other_file("tokenizer.json").read_text() == "x"
    (tmp_path / "secret").write_text("s")
    (path / "notes.txt").symlink_to(tmp_path / "secret")
    with pytest.raises(OddrankError, match="link that leads outside"):
        checkpoint.other_files()


def test_no_torch_is_imported() -> None:
    code = "import sys, oddrank.checkpoint; print({'torch', 'transformers', 'safetensors'} & set(sys.modules))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "set()"


def test_config_is_untouched(tmp_path: Path) -> None:
    config: dict[str, Any] = {"model_type": "llama", "extra": {"a": [1, 2.5, None, True]}}
    assert Checkpoint.open(model(tmp_path / "m", TWO, config=config)).config == json.loads(json.dumps(config))
