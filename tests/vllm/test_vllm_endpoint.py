"""`oddrank serve --engine vllm`: with a stand-in for vLLM, and for real beside the runtime at the same TP size."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from served.real_server import serving
from vllm_runs import LIMIT, ROOT, Vllm, tail

SERVER = """
import http.server, json, os, signal, subprocess, sys, threading, time
options = dict(zip(sys.argv[1::1], sys.argv[2::1]))
said = {k: v for k, v in os.environ.items() if k.startswith(("ODDRANK", "VLLM_", "OMP_NUM"))}
engine = subprocess.Popen(["sleep", "300"])
print(json.dumps([sys.argv[1:], said, engine.pid]), flush=True)
if os.environ.get("FAILS"):
    sys.exit(int(os.environ["FAILS"]))
if os.environ.get("STARTS"):
    signal.signal(signal.SIGTERM, lambda *_: print("not now", flush=True))
    while True:
        time.sleep(1)
class Handler(http.server.BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass
    def do_GET(self):
        self.send_response(200 if self.path == "/health" else 404)
        self.end_headers()
    def do_POST(self):
        os._exit(0)  # as vLLM ends where its engine is lost
server = http.server.HTTPServer((options["--host"], int(options["--port"])), Handler)
signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
server.serve_forever()
"""


@pytest.fixture
def stand_in(tmp_path: Path) -> Path:
    """A folder with a package vllm whose server shows what it was given and answers /health."""
    for package in ("", "entrypoints", "entrypoints/openai"):
        (tmp_path / "vllm" / package).mkdir(exist_ok=True)
        (tmp_path / "vllm" / package / "__init__.py").touch()
    (tmp_path / "vllm" / "entrypoints" / "openai" / "api_server.py").write_text(SERVER)
    return tmp_path


def environment(at: Path, **more: str) -> dict[str, str]:
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ODDRANK", "VLLM_", "OMP_"))}
    return kept | {"PYTHONPATH": os.pathsep.join((str(at), str(ROOT / "src"))), "COLUMNS": "200"} | more


@contextmanager
def served(at: Path, *options: object, **more: str) -> Iterator[subprocess.Popen[str]]:
    """`oddrank serve DIRECTORY --engine vllm`, killed where a test leaves it."""
    line = [sys.executable, "-m", "oddrank", "serve", at / "some-model", "--engine", "vllm", *options]
    with subprocess.Popen([str(p) for p in line], env=environment(at, **more), text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.PIPE) as process:  # fmt: skip
        try:
            yield process
        finally:
            process.kill()


class Started(NamedTuple):
    """The arguments and variables that vLLM got, the process of its engine, and the URL told once it answered."""

    arguments: list[str]
    environment: dict[str, str]
    engine: int
    url: str


def started(process: subprocess.Popen[str]) -> Started:
    assert process.stdout is not None
    arguments, said, engine = json.loads(process.stdout.readline())
    line = process.stdout.readline()
    assert line.startswith("serving "), line
    return Started(arguments, said, engine, line.split()[-1])


def gone(pid: int) -> bool:
    """Within 30 s; a zombie that nobody waits for is gone."""
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            if ") Z " in Path(f"/proc/{pid}/stat").read_text():
                return True
        except FileNotFoundError:
            return True
        time.sleep(0.05)
    return False


def ended(process: subprocess.Popen[str]) -> tuple[int, str]:
    """The exit code and standard error."""
    _, said = process.communicate(timeout=60)
    return process.returncode, said


def test_it_serves_until_it_is_told_to_end(stand_in: Path) -> None:
    with served(stand_in, "--tp", 3, "--port", 0) as process:
        arguments, said, engine, url = started(process)
        with urllib.request.urlopen(f"{url}/health", timeout=10) as answer:
            assert answer.status == 200
        process.send_signal(signal.SIGTERM)
        assert ended(process)[0] == 143 and gone(engine)
    assert arguments[:2] == ["--model", str(stand_in / "some-model")]
    given = dict(zip(arguments[2::2], arguments[3::2], strict=True))
    assert given.pop("--port") == url.rpartition(":")[2]
    assert given == {
        "--tensor-parallel-size": "3", "--host": "127.0.0.1", "--shutdown-timeout": "60",
        "--served-model-name": "some-model",
    }  # fmt: skip
    threads = str(max(1, (os.cpu_count() or 1) // 3))
    assert said == {"ODDRANK": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": threads}


def test_options_are_said_in_its_words(stand_in: Path) -> None:
    options = (
        "--tp", 6, "--run-tp", 2, "--port", 0, "--max-model-len", 300, "--max-running-requests", 7, "--kv-memory", 0.5,
        "--max-prefill-tokens", 100, "--no-prefix-reuse", "--dtype", "fp32", "--threads", 3, "--layout", "pad",
        "--constraint", "gqa=3", "--api-key", "sesame", "--served-model-name", "a", "--served-model-name", "b",
    )  # fmt: skip
    with served(stand_in, *options, OMP_NUM_THREADS="9", ODDRANK_DRAFTER="off") as process:
        arguments, said, _, _ = started(process)
        process.send_signal(signal.SIGTERM)
        assert ended(process)[0] == 143
    for part in ("--tensor-parallel-size 2", "--max-model-len 300", "--max-num-seqs 7", "--max-num-batched-tokens 107",
                 "--kv-cache-memory-bytes 536870912", "--dtype float32", "--served-model-name a b",
                 "--no-enable-prefix-caching"):  # fmt: skip
        assert part in " ".join(arguments)
    assert "sesame" not in " ".join(arguments)  # vLLM logs its arguments
    assert said == {
        "ODDRANK": "1", "ODDRANK_PLAN_TP": "6", "ODDRANK_LAYOUT": "pad", "ODDRANK_CONSTRAINTS": "gqa=3",
        "ODDRANK_DRAFTER": "off", "VLLM_API_KEY": "sesame", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "3",
    }  # fmt: skip


def test_the_end_of_vllm_is_an_error(stand_in: Path) -> None:
    with served(stand_in, "--port", 0) as process:
        _, _, engine, url = started(process)
        with pytest.raises((urllib.error.URLError, OSError)):
            urllib.request.urlopen(url, b"", timeout=10)
        code, said = ended(process)
    assert gone(engine)
    assert code == 2 and "vLLM ended by itself" in said and "Traceback" not in said


@pytest.mark.parametrize("code", [1, 2])
def test_a_start_that_fails_keeps_vllms_code(stand_in: Path, code: int) -> None:
    with served(stand_in, "--port", 0, FAILS=str(code)) as process:
        found, said = ended(process)
    assert found == code and "Traceback" not in said


def test_vllm_ends_where_it_is_killed(stand_in: Path) -> None:
    with served(stand_in, "--port", 0) as process:
        _, _, engine, url = started(process)
        process.kill()
    end = time.monotonic() + 30
    while time.monotonic() < end:
        try:
            urllib.request.urlopen(f"{url}/health", timeout=5).close()
        except OSError:
            break
        time.sleep(0.05)
    else:
        pytest.fail("vLLM still answers")
    os.kill(engine, signal.SIGKILL)  # vLLM's own would have been told by it


@pytest.mark.parametrize("again", [True, False])
def test_a_start_is_ended_although_vllm_does_not_listen(stand_in: Path, again: bool) -> None:
    with served(stand_in, "--port", 0, STARTS="1") as process:
        assert process.stdout is not None
        _, _, engine = json.loads(process.stdout.readline())
        process.send_signal(signal.SIGTERM)
        assert process.stdout.readline() == "not now\n"
        if again:
            process.send_signal(signal.SIGTERM)

        assert ended(process)[0] == 143 and gone(engine)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--log-json"], "--log-json"),
        (["--rank-memory", "1,1"], "--rank-memory"),
        (["--plan", "x.json"], "--plan"),
        (["--context", "5"], "--context"),
        (["--experts", "cpu"], "--experts"),
        (["--expert-cache", "4"], "--expert-cache"),
        (["--executor", "runtime"], "--executor"),
        (["--layout", "ragged"], "--layout ragged"),
        (["--dtype", "fp64"], "fp64"),
        (["--constraint", "gqa"], "gqa"),
    ],
)
def test_what_vllm_has_not_is_refused_by_name(stand_in: Path, options: list[str], said: str) -> None:
    with served(stand_in, *options) as process:
        code, error = ended(process)
    assert code == 2 and said in error and "Traceback" not in error


@pytest.mark.vllm
@pytest.mark.demo
def test_it_answers_as_the_runtime_at_the_same_size(vllm: Vllm, demo_model: Path, tmp_path: Path) -> None:
    log = tmp_path / "vllm.log"
    line = [vllm.python.parent / "oddrank", "serve", demo_model, "--engine", "vllm", "--tp", 3, "--port", 0,
            "--kv-memory", 0.1, "--max-model-len", 512]  # fmt: skip
    with log.open("w") as out:
        process = subprocess.Popen(
            [str(p) for p in line], stdout=out, stderr=subprocess.STDOUT, cwd=tmp_path,
            env=environment(ROOT / "tests" / "vllm" / "compat", HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1",
                            VLLM_CACHE_ROOT=str(tmp_path)),
        )  # fmt: skip
    try:
        capture(_url(process, log), tmp_path / "vllm.json")
    finally:
        process.send_signal(signal.SIGTERM)
        code = process.wait(120)
    assert code == 143, tail(log.read_text())
    with serving(demo_model, 3, tmp_path / "native.log") as url:
        capture(url, tmp_path / "native.json")
    ran = oddrank("compare", tmp_path / "native.json", tmp_path / "vllm.json", "--json")
    assert ran.returncode == 0, ran.stderr
    found = json.loads(ran.stdout)
    assert found["kl_tokens"] > 100 and 1e-8 < found["kl"] < 0.002  # bf16 and fp32


def capture(url: str, out: Path) -> None:
    ran = oddrank("capture", url, "--concurrency", 10, "-o", out)
    assert ran.returncode == 0 and "with token ids and logprobs" in ran.stdout, ran.stderr


def oddrank(*arguments: object) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "oddrank", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, check=False)


def _url(process: subprocess.Popen[bytes], log: Path) -> str:
    end = time.monotonic() + LIMIT
    while time.monotonic() < end and process.poll() is None:
        said = [line for line in log.read_text().splitlines() if line.startswith("serving ")]
        if said:
            return said[0].split()[-1]
        time.sleep(0.5)
    pytest.fail(f"no server (exit code {process.poll()})\n{tail(log.read_text())}", pytrace=False)
