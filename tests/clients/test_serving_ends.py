"""How a server ends: a rank that is killed under a stream, SIGTERM once and twice, and what it never starts with."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from cli.test_cli import run

from clients.served_models import write_synthetic
from clients.served_process import PATIENCE, Serving, ended, named_memory, started, until

LONG: Any = {
    "model": "m", "prompt": [5, 6, 7], "max_tokens": 8000, "temperature": 0, "extra_body": {"ignore_eos": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_synthetic("llama", "bf16", tmp_path_factory.mktemp("ends") / "m")


@pytest.fixture(scope="module")
def servings(model: Path) -> Iterator[list[Serving]]:
    """Three, each to be ended by one test."""
    options = ("--tp", 2, "--dtype", "fp32", "--max-model-len", 8192, "--max-running-requests", 2, "--log-json")
    made = [Serving(model, model.parent / f"{n}.log", *options) for n in range(3)]
    yield started(made)
    ended(made)


def begun(client: openai.OpenAI, **changes: Any) -> Any:
    """A stream that has said something."""
    stream = client.completions.create(**LONG | changes, stream=True)
    next(iter(stream))
    return stream


def log_of(serving: Serving) -> list[dict[str, Any]]:
    """Every line is an object, but the last word of a command that failed."""
    lines = serving.log.read_text().splitlines()
    return [json.loads(line) for line in lines if not line.startswith("oddrank: ")]


def test_a_rank_that_is_killed_under_a_stream(servings: list[Serving]) -> None:
    serving, client = servings[0], servings[0].client()
    shared = named_memory([serving.pid, *serving.ranks])
    killed = serving.ranks[1]
    fate = f"Rank 1 of 2 (pid {killed}) was killed by SIGKILL"
    health: list[tuple[int, Any]] = []

    def watch() -> None:
        while True:
            try:
                health.append(serving.health())
            except httpx.TransportError:
                return

    with ThreadPoolExecutor(5) as pool, httpx.stream("POST", f"{serving.url}/v1/completions", json={
        "prompt": [1, 2], "max_tokens": 8000, "ignore_eos": True, "stream": True}, timeout=None) as raw:  # fmt: skip
        lines = (line for line in raw.iter_lines() if line)
        next(lines)
        stream = begun(client)
        whole = pool.submit(client.completions.create, **LONG)  # only two are in memory: these wait
        waiting = pool.submit(lambda: list(client.completions.create(**LONG, stream=True)))
        until(lambda: serving.metrics()["oddrank_requests_waiting"] == 2, "two requests wait")
        watching = pool.submit(watch)
        os.kill(killed, signal.SIGKILL)
        with pytest.raises(openai.APIError, match="was killed by SIGKILL"):
            list(stream)
        with pytest.raises(openai.APIError, match="was killed by SIGKILL"):
            waiting.result()
        with pytest.raises(openai.InternalServerError) as failed:
            whole.result()
        assert failed.value.status_code == 503 and failed.value.code == "ranks_lost" and fate in failed.value.message
        last = list(lines)[-1]
        error = json.loads(last.removeprefix("data: "))["error"]
        assert fate in error["message"] and (error["type"], error["code"]) == ("server_error", "ranks_lost")
        watching.result()
    seen = [found for code, found in health if code == 503]
    assert seen and all(found["status"] == "failed" and fate in found["reason"] for found in seen)
    assert serving.wait() == 2
    assert serving.log.read_text().splitlines()[-1].startswith(f"oddrank: {fate}")
    outcomes = [line["outcome"] for line in log_of(serving) if line["message"] == "request"]
    assert outcomes == ["failed"] * 4
    assert not any(map(os.path.exists, shared))


def test_sigterm_lets_a_stream_end(servings: list[Serving]) -> None:
    serving, client = servings[1], servings[1].client()
    tokens = 1500
    stream = begun(client, max_tokens=tokens)
    serving.signal(signal.SIGTERM)
    until(lambda: serving.health()[0] == 503, "it says that it ends")
    assert serving.health()[1]["status"] == "ending"
    with pytest.raises(openai.InternalServerError, match="about to end") as refused:
        client.completions.create(model="m", prompt="x")
    assert refused.value.status_code == 503
    rest = list(stream)
    assert rest[-1].choices[0].finish_reason == "length"
    assert serving.wait() == 0
    (answered,) = [line for line in log_of(serving) if line.get("status") == 200 and line["message"] == "request"]
    assert (answered["outcome"], answered["completion_tokens"]) == ("ok", tokens)


def test_a_second_sigterm_is_the_end(servings: list[Serving]) -> None:
    serving, client = servings[2], servings[2].client()
    stream = begun(client)
    serving.signal(signal.SIGTERM)
    until(lambda: serving.health()[0] == 503, "it says that it ends")
    serving.signal(signal.SIGTERM)
    with pytest.raises((httpx.TransportError, openai.APIConnectionError)):
        list(stream)
    assert serving.wait() == 128 + signal.SIGTERM
    assert "Traceback" not in serving.log.read_text()


def one_paragraph(code: int, out: str, err: str) -> str:
    """Of an error that the command foresaw, or of click's, which shows the usage first."""
    assert (code, out) == (2, "") and err.startswith(("oddrank: ", "Usage: ")), (code, out, err)
    assert err.rstrip().count("\n") == (0 if err.startswith("oddrank: ") else 3), err
    return err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["absent"], "absent"),
        (["MODEL", "--tp", "0"], "at least 1"),
        (["MODEL", "--tp", "two"], "two"),
        (["MODEL", "--tp", "99"], "99"),
        (["MODEL", "--port", "65536"], "65536"),
        (["MODEL", "--max-model-len", "40000"], "32768"),
        (["MODEL", "--max-running-requests", "0"], "0 is not in the range"),
        (["MODEL", "--kv-memory", "-1"], "-1"),
        (["MODEL", "--dtype", "int3"], "int3"),
        (["MODEL", "--served-model-name", ""], "empty"),
        (["MODEL", "--api-key", ""], "empty"),
        (["MODEL", "--plan", "absent.json"], "absent.json"),
        (["MODEL", "--experts", "offload"], "expert"),
        (["MODEL", "--host", "no.such.host.invalid"], "no.such.host.invalid"),
        (["BARE"], "tokenizer"),
        (["MODEL", "--no-such-option"], "no-such-option"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_what_it_refuses_to_start_with(
    arguments: list[str], said: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("config.json", "model.safetensors"):
        shutil.copy(model / name, bare)
    where = {"MODEL": model, "BARE": bare}
    err = one_paragraph(*run(capsys, "serve", *(where.get(a, a) for a in arguments)))
    assert said in err


def test_a_port_that_is_taken(model: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        err = one_paragraph(*run(capsys, "serve", model, "--port", port))
    assert f"127.0.0.1:{port}" in err and "--port" in err


def test_no_room_for_a_page(model: Path, tmp_path: Path) -> None:
    """What only the ranks can tell, once they are loaded."""
    serving = Serving(model, tmp_path / "log", "--kv-memory", "0.00001")
    assert serving.process.communicate(timeout=300)[0] == ""
    said = serving.log.read_text()
    last = said.splitlines()[-1]
    assert serving.process.returncode == 2 and "no room for KV cache" in last and "--kv-memory" in last
    assert said.count("no room for KV cache") == 1


@pytest.mark.parametrize("loading", [False, True], ids=["imports", "loads"])
def test_sigterm_before_it_serves(model: Path, tmp_path: Path, loading: bool) -> None:
    """As a supervisor sends it: to all the processes of a command. Weights that are being loaded are no failure."""
    log = tmp_path / "log"
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, "-m", "oddrank", "serve", str(model), "--tp", "2", "--port", str(port)],
            stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True,
        )  # fmt: skip
    try:
        if loading:
            until(lambda: _answers(f"http://127.0.0.1:{port}/health"), "it says how it is")
        else:
            until(lambda: _catches(process.pid, signal.SIGTERM), "the command handles SIGTERM")
        os.killpg(process.pid, signal.SIGTERM)
        code = process.wait(PATIENCE)
    finally:
        process.kill()
    said = log.read_text().splitlines()
    if loading:
        assert code == 0 and any(" ending; " in line for line in said), said
    else:
        assert code == 128 + signal.SIGTERM and said == ["oddrank: ended by SIGTERM."]


def _answers(url: str) -> bool:
    try:
        httpx.get(url, timeout=PATIENCE)
    except httpx.ConnectError:
        return False
    return True


def _catches(pid: int, number: int) -> bool:
    """Whether a process has a handler for a signal (proc(5): SigCgt)."""
    status = Path(f"/proc/{pid}/status").read_text()
    caught = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(caught, 16) >> (number - 1) & 1)
