"""Planning models of the hub from their headers: what is asked for, what is refused, what is said where it fails."""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hub_commands import headers, one_file, refusal, rewrite_header, run, small
from hub_server import CHUNK, Hub, Repo
from huggingface_hub import constants

from oddrank import Checkpoint, OddrankError, make_plan
from oddrank.checkpoint import remote
from oddrank.checkpoint.hub import HubModel, hub_model
from oddrank.synth import describe_release, write_checkpoint

SHARDS = 42


@pytest.mark.parametrize(
    ("model", "repo", "revision"),
    [
        ("Qwen/Qwen3-32B", "Qwen/Qwen3-32B", "main"),
        ("a/b@v1.0", "a/b", "v1.0"),
        ("a/b@refs/pr/7", "a/b", "refs/pr/7"),
        ("01-ai/Yi_1.5", "01-ai/Yi_1.5", "main"),
    ],
)
def test_ids(model: str, repo: str, revision: str) -> None:
    assert hub_model(model) == HubModel(repo, revision)
    assert str(hub_model(model)) == model


@pytest.mark.parametrize(
    "model", ["./a/b", "../a/b", "/a/b", "a/b/c", "a", "a/", "a/b/", "~/b", "", "a b/c", "a/b@", "a//b", Path("a/b")]
)
def test_paths_are_no_ids(model: "str | Path") -> None:
    assert hub_model(model) is None


@pytest.mark.parametrize("model", ["a/b--c", "a--b/c", "a/b..c", "a/b.", "a./b", "a/b-", "a/b.git", "a/" + "b" * 97])
def test_what_no_repository_can_be_called_is_no_id(model: str) -> None:
    assert hub_model(model) is None


def test_what_the_hub_has_for_no_name_is_one_clear_error(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    assert "There is no 'models/tiny--2'" in refusal(capsys, "plan", "models/tiny--2", "--tp", 2)
    said = refusal(capsys, "plan", "https://huggingface.co/Qwen/Qwen3-0.6B/tree/main", "--tp", 2)
    assert said.endswith("is a URL. Give the id of the model there: Qwen/Qwen3-0.6B.\n")
    assert not hub.asked


def test_a_directory_wins_and_paths_are_never_asked_for(hub: Hub, capsys: pytest.CaptureFixture[str]) -> None:
    hub.repos["org/name"] = Repo(headers(Path("elsewhere"), 2))
    one_file(Path("org/name"))
    code, out, _ = run(capsys, "plan", "org/name", "--tp", 2, "--json")
    assert code == 0 and json.loads(out)["family"] == "llama"
    for path in ("./org/nothing", "org/name/nothing", "/org/nothing", "org/name/config.json"):
        assert " hub for it" not in refusal(capsys, "plan", path, "--tp", 2)
    with pytest.raises(OddrankError, match="There is no"):
        Checkpoint.open(Path("org/other"))
    assert not hub.asked


@pytest.mark.parametrize("command", ["plan", "check"])
def test_two_requests_a_shard_in_parallel_and_no_weights(
    hub: Hub, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = headers(tmp_path / "big", SHARDS)
    hub.repos["org/big"] = Repo(folder)
    hub.wait_for = threading.Barrier(SHARDS // 3, timeout=30)  # nobody is answered before so many ask
    code, out, err = run(capsys, command, "org/big", "--tp", 3, "--json")
    assert code == 0, err
    shards = sorted(p.name for p in folder.glob("*.safetensors"))
    assert len(shards) == SHARDS and hub.most >= SHARDS // 3
    for shard in shards:
        first, second = hub.of(shard)  # the hub's redirect, and the storage
        assert (first.host, second.host) == ("hub", "storage") and first.range == second.range
    others = [a for a in hub.asked if a.file not in shards]
    assert sorted(a.file for a in others) == ["", "config.json", "model.safetensors.index.json"]
    assert {a.method for a in hub.asked} == {"GET"}

    assert hub.sent < 1 << 20  # of 61 GiB
    assert not Path(constants.HF_HUB_CACHE).exists()
    code, local, _ = run(capsys, command, folder, "--tp", 3, "--json")
    assert code == 0 and json.loads(local) == json.loads(out)


def test_without_a_redirect_a_shard_is_one_request(hub: Hub, tmp_path: Path) -> None:
    hub.redirect = False
    hub.repos["org/big"] = Repo(headers(tmp_path / "big", 5))
    assert make_plan("org/big", 3).plan == make_plan(tmp_path / "big", 3).plan
    assert [len(hub.of(f"model-0000{n}-of-00005.safetensors")) for n in range(1, 6)] == [1] * 5


def test_a_header_longer_than_foreseen_is_continued_at_the_storage(hub: Hub, tmp_path: Path) -> None:
    folder = small(tmp_path / "model")
    shard = "model-00002-of-00003.safetensors"
    rewrite_header(folder / shard, lambda header: header.update(__metadata__={"notes": "x" * 300_000}))
    hub.repos["org/model"] = Repo(folder)
    checkpoint = Checkpoint.open("org/model")
    assert checkpoint.tensors == Checkpoint.open(folder).tensors
    assert len(checkpoint.metadata[shard]["notes"]) == 300_000
    hosts = [a.host for a in hub.of(shard)]
    assert hosts == ["hub", "storage", "storage"]
    length = int.from_bytes((folder / shard).read_bytes()[:8], "little")
    first, last = hub.of(shard)[1:]
    assert first.range and last.range
    assert int(last.range.split("=")[1].split("-")[0]) == int(first.range.split("-")[1]) + 1
    assert int(last.range.split("-")[1]) == 8 + length - 1


def test_one_file_without_an_index(hub: Hub, tmp_path: Path) -> None:
    hub.repos["org/one"] = Repo(one_file(tmp_path / "one"))
    assert make_plan("org/one", 2).plan == make_plan(tmp_path / "one", 2).plan
    assert len(hub.of("model.safetensors")) == 2


def test_a_revision_is_asked_for_and_pinned_to_its_commit(hub: Hub, tmp_path: Path) -> None:
    commits = {"main": "a" * 40, "refs/pr/7": "b" * 40}
    hub.repos["org/one"] = Repo(one_file(tmp_path / "one"), commits)
    checkpoint = Checkpoint.open("org/one@refs/pr/7")
    assert (checkpoint.name, str(checkpoint.path)) == ("one", "org/one@refs/pr/7")
    assert {a.path.split("/")[4] for a in hub.asked if a.file and a.host == "hub"} == {"b" * 40}
    assert Checkpoint.open(f"org/one@{'a' * 40}").tensors == checkpoint.tensors


def test_a_server_without_ranges_is_not_read_to_the_end(hub: Hub, tmp_path: Path) -> None:
    folder = headers(tmp_path / "big", 3)

    def whole(handler: Any, _file: str) -> bool:
        del handler.headers["Range"]
        return False

    for n in range(1, 4):
        hub.faults["storage", f"model-0000{n}-of-00003.safetensors"] = whole
    hub.repos["org/big"] = Repo(folder)
    assert Checkpoint.open("org/big").tensors == Checkpoint.open(folder).tensors
    assert hub.sent < 64 << 20  # what fits into the sockets' buffers, of 61 GiB


def test_small_tensors_are_read_from_the_hub_and_large_ones_refused(hub: Hub, tmp_path: Path) -> None:
    folder = headers(tmp_path / "big", 3)
    hub.repos["org/big"] = Repo(folder)
    shard = folder / "model-00001-of-00003.safetensors"
    local = Checkpoint.open(folder)
    name = next(n for n, i in local.tensors.items() if i.file == shard.name and i.shape == (5120,))
    with open(shard, "r+b") as file:
        file.seek(local.tensors[name].start)
        file.write(np.arange(5120, dtype="<u2").tobytes())
    remote_one = Checkpoint.open("org/big")
    hub.forget()
    assert np.array_equal(remote_one.array(name), np.arange(5120))
    assert len(hub.asked) == 2
    with pytest.raises(OddrankError, match=r"of up to 1048576 bytes .*hf download org/big"):
        remote_one.array("model.embed_tokens.weight")
    with pytest.raises(OddrankError, match="is on the hub"):
        remote_one.location(shard.name)


def test_a_planner_that_looks_into_an_index_reads_it_from_the_hub(hub: Hub, tmp_path: Path) -> None:
    """GPTQ's scale groups may be scattered, which only the values of g_idx tell."""
    folder = write_checkpoint(describe_release("qwen2", "gptq", size="tiny"), tmp_path / "model", shards=1)
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"]["desc_act"] = True
    (folder / "config.json").write_text(json.dumps(config))
    hub.repos["org/model"] = Repo(folder)
    assert make_plan("org/model", 2).plan == make_plan(folder, 2).plan
    tensors = Checkpoint.open(folder).tensors
    ranges = [(a.range or "").removeprefix("bytes=") for a in hub.of("model.safetensors") if a.host == "storage"]
    places = {f"{i.start}-{i.end - 1}": name for name, i in tensors.items()}
    read = [places[r] for r in ranges[1:]]
    assert read and all(name.endswith((".o_proj.g_idx", ".down_proj.g_idx")) for name in read)


def test_the_token_stays_with_the_hub(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A redirect to the storage does not take it along, nor does a second request go there with it."""
    folder = one_file(tmp_path / "one")
    rewrite_header(folder / "model.safetensors", lambda h: h.update(__metadata__={"notes": "x" * (2 << 20)}))
    hub.repos["org/one"] = Repo(folder)
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    Checkpoint.open("org/one")
    assert [a.host for a in hub.of("model.safetensors")] == ["hub", "storage", "storage"]
    assert {(a.host, a.token) for a in hub.asked} == {("hub", "Bearer hf_secret"), ("storage", None)}


def answer(status: int, body: bytes = b"", **headers: str) -> Any:
    """A fault that answers so. Underscores in the names of headers are dashes."""

    def fault(handler: Any, _file: str) -> bool:
        handler.give(body, status, {name.replace("_", "-"): value for name, value in headers.items()})
        return True

    return fault


def endless(handler: Any, _file: str) -> bool:
    """A body that never ends, in chunks."""
    handler.head(200, {"Transfer-Encoding": "chunked", "Content-Type": "application/json"})
    while True:
        handler.send(b"%x\r\n" % CHUNK + b" " * CHUNK + b"\r\n")


def cut_short(handler: Any, _file: str) -> bool:
    """Fewer bytes than announced, and the end of the connection."""
    handler.head(206, {"Content-Length": "1000", "Content-Range": "bytes 0-999/2000"})
    handler.send((500).to_bytes(8, "little") + b"{" * 100)
    handler.close_connection = True
    return True


def ends_early(handler: Any, _file: str) -> bool:
    """Bodies of unknown length that end within the header, after 100 of its bytes and 50 more."""
    start = int(handler.headers["Range"].removeprefix("bytes=").split("-")[0])
    handler.head(206, {"Connection": "close", "Content-Range": f"bytes {start}-999/2000"})
    handler.send(b"{" * 50 if start else (500).to_bytes(8, "little") + b"{" * 100)
    handler.close_connection = True
    return True


def loop(handler: Any, _file: str) -> bool:
    handler.give(b"", 302, {"Location": handler.path})
    return True


LONG = (200_000_000).to_bytes(8, "little")
SMALL = (
    b"\x5a"
    + bytes(7)
    + b'{"a":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},"b":{"dtype":"U8","shape":[8]}}'.ljust(90)
)


def overlapping(size: int) -> bytes:
    """A header of two tensors that share bytes, in a file of `size` bytes."""
    entries = {n: {"dtype": "U8", "shape": [8], "data_offsets": [at, at + 8]} for n, at in (("a", 0), ("b", 4))}
    raw = json.dumps(entries).encode()
    return len(raw).to_bytes(8, "little") + raw.ljust(size - 8, b"\0")


@pytest.mark.parametrize(
    ("where", "fault", "words"),
    [
        ("storage", answer(206, LONG, Content_Range="bytes 0-7/900000000"), ["200000000 bytes", "limit of 100000000"]),
        ("storage", answer(206, LONG, Content_Range="bytes 0-7/100000000000"), ["limit of 100000000"]),
        ("storage", answer(206, SMALL, Content_Range="bytes 0-97/50"), ["claims 90 bytes", "only 42"]),
        ("storage", answer(206, SMALL, Content_Range="bytes 0-97/114"), ["'b'", "malformed"]),
        ("storage", answer(206, overlapping(200), Content_Range="bytes 0-199/200"), ["'b'", "overlaps", "'a'"]),
        ("storage", answer(206, b"", Content_Range="bytes 0-0/0"), ["it has 0 bytes"]),
        ("storage", answer(206, SMALL, Content_Range="bytes 5-97/114"), ["bytes from 0 on", "bytes 5-97/114"]),
        ("storage", answer(206, SMALL, Content_Range="bytes 0-97/*"), ["bytes 0-97/*"]),
        ("storage", answer(206, SMALL), ["bytes from 0 on"]),
        ("storage", answer(206, SMALL, Content_Encoding="gzip"), ["compressed", "gzip"]),
        ("storage", endless, ["does not say how long the file is"]),
        ("storage", cut_short, ["/model.safetensors", "RemoteProtocolError"]),
        ("storage", ends_early, ["500 bytes long", "stopped after 150"]),
        ("storage", answer(404), ["localhost", "answered 404"]),
        ("storage", answer(403, X_Error_Message="expired"), ["answered 403", "expired"]),
        ("storage", answer(416), ["answered 416"]),
        ("storage", loop, ["TooManyRedirects"]),
        ("hub", answer(302, Location="file:///etc/passwd"), ["UnsupportedProtocol"]),
        ("hub", answer(404, X_Error_Code="EntryNotFound", X_Error_Message="gone"), ["answered 404", "gone"]),
    ],
)
def test_what_a_server_may_say_of_a_shard(
    hub: Hub, tmp_path: Path, where: str, fault: Any, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repos["org/one"] = Repo(one_file(tmp_path / "one"))
    hub.faults[where, "model.safetensors"] = fault
    if where == "storage":  # where the hub's own size is not to be what is noticed
        hub.faults["hub", "model.safetensors"] = answer(
            302, Location=f"{hub.storage}/org/one/resolve/x/model.safetensors?sig=secret"
        )
    said = refusal(capsys, "plan", "org/one", "--tp", 2)
    assert all(word in said for word in words), said
    assert "secret" not in said and hub.sent < 64 << 20


def test_sizes_that_do_not_agree(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The hub's and the storage's; the storage's and the header's."""
    folder = one_file(tmp_path / "one")
    hub.repos["org/one"] = Repo(folder)
    size = (folder / "model.safetensors").stat().st_size
    where = f"{hub.storage}/org/one/resolve/x/model.safetensors"
    hub.faults["hub", "model.safetensors"] = answer(302, Location=where, X_Linked_Size=str(size + 1))
    said = refusal(capsys, "plan", "org/one", "--tp", 2)
    assert f"{size} bytes there" in said and f"'{size + 1}'" in said
    for told, words in ((size - 1, "cut short by 1 bytes"), (size + 1, "1 bytes follow")):
        body = (folder / "model.safetensors").read_bytes()
        hub.faults["hub", "model.safetensors"] = answer(302, Location=where)
        hub.faults["storage", "model.safetensors"] = answer(206, body, Content_Range=f"bytes 0-{size - 1}/{told}")
        assert words in refusal(capsys, "plan", "org/one", "--tp", 2)


def test_a_file_that_changes_between_two_requests(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = small(tmp_path / "model")
    shard = "model-00002-of-00003.safetensors"
    rewrite_header(folder / shard, lambda header: header.update(__metadata__={"notes": "x" * 300_000}))
    hub.repos["org/model"] = Repo(folder)

    def change(_handler: Any, _file: str) -> bool:
        if [a.host for a in hub.of(shard)].count("storage") == 2:
            hub.repos["org/model"].edition += 1
        return False

    hub.faults["storage", shard] = change
    assert "changed while its header was read" in refusal(capsys, "plan", "org/model", "--tp", 2)


def test_an_index_that_names_what_is_not_there(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = small(tmp_path / "model")
    (folder / "model-00002-of-00003.safetensors").unlink()
    hub.repos["org/model"] = Repo(folder)
    said = refusal(capsys, "plan", "org/model", "--tp", 2)
    assert "1 of them are missing from org/model" in said and "model-00002-of-00003" in said
    index = {"weight_map": {"a": "../../secret.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "missing from org/model" in refusal(capsys, "plan", "org/model", "--tp", 2)


@pytest.mark.parametrize("file", ["api", "config.json"])
def test_whole_files_have_a_limit(
    hub: Hub, file: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(remote, "MAX_JSON", 1 << 20)
    hub.repos["org/one"] = Repo(one_file(tmp_path / "one"))
    hub.faults["hub", file] = endless
    assert "more than the 1048576 bytes" in refusal(capsys, "plan", "org/one", "--tp", 2)
    assert hub.sent < 32 << 20  # the limit, and what fits into the sockets' buffers


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"<html>welcome</html>", ["no listing"]),
        (b'{"sha": "../..", "siblings": []}', ["'../..'"]),
        (b'{"siblings": []}', ["no listing"]),
        (b'{"sha": "%s", "siblings": []}' % (b"a" * 40), ["holds no .safetensors"]),
        (b'{"sha": "%s", "siblings": [{"rfilename": "m.gguf"}]}' % (b"a" * 40), ["org/one holds GGUF"]),
    ],
)
def test_listings(hub: Hub, body: bytes, words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    hub.faults["hub", "api"] = answer(200, body)
    said = refusal(capsys, "plan", "org/one", "--tp", 2)
    assert all(word in said for word in words), said


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (None, ["no directory org/one", "no model org/one", "HF_TOKEN", "spelling"]),
        (answer(401), ["no model org/one"]),
        (answer(401, X_Error_Message="Invalid credentials in Authorization header"), ["Invalid credentials"]),
        (answer(403, X_Error_Code="GatedRepo"), ["is gated", "/org/one", "HF_TOKEN", "hf auth login"]),
        (answer(404, X_Error_Code="RevisionNotFound"), ["no revision 'main'"]),
        (answer(403, X_Error_Message="no way\x9b31m"), ["answered 403", "no way\\x9b31m"]),
        (answer(500), ["answered 500", "Try again later"]),
    ],
)
def test_models_that_may_not_be_read(
    hub: Hub, fault: Any, words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(remote, "WAITS", (0.0, 0.0))
    if fault:
        hub.faults["hub", "api"] = fault
    said = refusal(capsys, "plan", "org/one", "--tp", 2)
    assert all(word in said for word in words), said


def test_a_revision_that_is_not_there(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hub.repos["org/one"] = Repo(one_file(tmp_path / "one"))
    assert "no revision 'v2'" in refusal(capsys, "check", "org/one@v2", "--tp", 2)


def test_gated_files_of_a_listed_model(hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The hub lists a gated model to everybody."""
    hub.repos["org/one"] = Repo(one_file(tmp_path / "one"))
    hub.faults["hub", "config.json"] = answer(403, X_Error_Code="GatedRepo")
    assert "is gated" in refusal(capsys, "plan", "org/one", "--tp", 2)


def test_a_busy_hub_is_asked_again(hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "WAITS", (0.0, 0.0))
    hub.repos["org/one"] = Repo(one_file(tmp_path / "one"))
    left = [503, 429]

    def busy(handler: Any, _file: str) -> bool:
        if left:
            handler.give(b"", left.pop())
            return True
        return False

    hub.faults["storage", "model.safetensors"] = busy
    assert Checkpoint.open("org/one").tensors == Checkpoint.open(tmp_path / "one").tensors
    assert not left


def test_a_shard_that_never_comes(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.3)
    hub.repos["org/model"] = Repo(small(tmp_path / "model"))

    def stall(handler: Any, _file: str) -> bool:
        handler.hang(10)
        return True

    hub.faults["storage", "model-00002-of-00003.safetensors"] = stall
    said = refusal(capsys, "plan", "org/model", "--tp", 2)
    assert "ReadTimeout" in said and "/model-00002-of-00003.safetensors" in said


def test_no_network(hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{port}")
    said = refusal(capsys, "plan", "org/one", "--tp", 2)
    assert f"127.0.0.1:{port}" in said and "no directory org/one" in said and "HF_ENDPOINT" in said


def oddrank(*args: object, **environment: str) -> "subprocess.CompletedProcess[str]":
    """The command in a process of its own."""
    env = {k: v for k, v in os.environ.items() if not k.startswith("HF_")} | environment
    line = [sys.executable, "-m", "oddrank", *map(str, args)]
    return subprocess.run(line, capture_output=True, text=True, env=env, timeout=60)


def test_the_environment_is_respected(hub: Hub, tmp_path: Path) -> None:
    hub.repos["org/one"] = Repo(one_file(tmp_path / "one"))
    home = {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    done = oddrank("plan", "org/one", "--tp", 2, "--json", HF_TOKEN="hf_secret", **home)
    assert done.returncode == 0 and json.loads(done.stdout)["model"] == "one", done.stderr
    assert hub.asked[0].token == "Bearer hf_secret"
    hub.forget()
    done = oddrank("plan", "org/one", "--tp", 2, HF_HUB_OFFLINE="1", **home)
    assert (done.returncode, done.stdout) == (2, "") and "HF_HUB_OFFLINE" in done.stderr
    assert str(tmp_path / "home") in done.stderr and not hub.asked


@pytest.mark.parametrize("endpoint", ["", "nowhere", "http://host:port", "http://[x", "file:///x"])
def test_senseless_endpoints(
    endpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", endpoint)
    assert f"HF_ENDPOINT is {endpoint!r}" in refusal(capsys, "plan", "org/one", "--tp", 2)


def test_a_directory_is_planned_without_huggingface_hub(tmp_path: Path) -> None:
    code = (
        "import sys; from oddrank import make_plan; make_plan(sys.argv[1], 2)\n"
        "print({'huggingface_hub', 'httpx', 'torch'} & set(sys.modules))"
    )
    line = [sys.executable, "-c", code, str(one_file(tmp_path / "one"))]
    done = subprocess.run(line, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
