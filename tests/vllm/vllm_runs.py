"""Runs of vLLM in its own environment, one process group each, for tests to ask what it answered."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
LIMIT = 480.0
"""Seconds that a run may take on a machine that does other things too; alone, the longest takes 60."""

SMALL = {"max_model_len": 256, "kv_cache_memory_bytes": 100_000_000, "enforce_eager": True}
"""Engine arguments for tiny models on a CPU."""

Logprobs = dict[int, float]


@dataclass(frozen=True)
class Answer:
    """To one prompt. logprobs: of each token produced, what was likeliest there; prompt_logprobs: the same for the
    prompt, None at its first token. A position holds the token that stands there too."""

    text: str
    tokens: list[int]
    logprobs: list[Logprobs]
    prompt_logprobs: list[Logprobs | None]


@dataclass(frozen=True)
class Ended:
    """A process that ended: its exit code and everything it printed."""

    code: int
    log: str


class Vllm:
    """vLLM's Python, and a folder for logs."""

    def __init__(self, python: Path, folder: Path) -> None:
        self.python, self.folder = python, folder
        self._stock: dict[str, list[Answer]] = {}
        self._runs = 0

    def engine(
        self,
        model: Path,
        ranks: int,
        prompts: Sequence[str | list[int]],
        *,
        on: bool,
        environment: Mapping[str, str] | None = None,
        max_tokens: int = 16,
        **engine: Any,
    ) -> list[Answer]:
        """What an engine at TP=`ranks` answers, with the plugin on or off, by greedy decoding."""
        out = self.folder / f"answers-{self._runs}.json"
        ended = self._generate(out, model, ranks, prompts, on, environment or {}, max_tokens, engine)
        if ended.code != 0 or not out.exists():
            pytest.fail(f"vLLM on {model.name} at TP={ranks} ended with {ended.code}\n{tail(ended.log)}", pytrace=False)
        return [_answer(given) for given in json.loads(out.read_text())[0]["answers"]]

    def engines(
        self,
        models: Sequence[Mapping[str, Any]],
        ranks: int,
        prompts: Sequence[list[int]],
        *,
        on: bool,
        environment: Mapping[str, str] | None = None,
        max_tokens: int = 16,
    ) -> list[list[Answer]]:
        """The same of several engines in turn, in one process (which saves starts). models: of each, its arguments."""
        out = self.folder / f"answers-{self._runs}.json"
        given = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"} | dict(environment or {})
        ended = self._generate_all(out, models, ranks, prompts, on, given, max_tokens)
        if ended.code != 0 or not out.exists():
            pytest.fail(f"vLLM at TP={ranks} ended with {ended.code}\n{tail(ended.log)}", pytrace=False)
        return [[_answer(given) for given in one["answers"]] for one in json.loads(out.read_text())]

    def refusal(
        self,
        model: Path,
        ranks: int,
        *,
        on: bool = True,
        environment: Mapping[str, str] | None = None,
        **engine: Any,
    ) -> Ended:
        """How an engine ends that is expected not to start."""
        out = self.folder / "refused.json"
        ended = self._generate(out, model, ranks, [[2, 3, 4]], on, environment or {}, 1, engine)
        assert not out.exists(), f"vLLM served {model.name} at TP={ranks}"
        return ended

    def stock(self, model: Path, prompts: Sequence[str | list[int]], ranks: int = 1, **given: Any) -> list[Answer]:
        """The same of vLLM without the plugin, run once for the same question."""
        key = json.dumps([str(model), prompts, ranks, given], sort_keys=True)
        if key not in self._stock:
            self._stock[key] = self.engine(model, ranks, prompts, on=False, **given)
        return self._stock[key]

    @contextmanager
    def server(self, model: Path, ranks: int, *options: str, limit: float = LIMIT) -> Iterator[str]:
        """The address of `oddrank vllm serve model`, as long as it is needed."""
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        line = [self.python.parent / "oddrank", "vllm", "serve", model, "--tensor-parallel-size", ranks, "--host",
                "127.0.0.1", "--port", port, "--served-model-name", "served", *options]  # fmt: skip
        address, log = f"http://127.0.0.1:{port}", self._log()
        with self._started(line, {}, log) as process:
            end = time.monotonic() + limit
            while not _answers(f"{address}/health"):
                if process.poll() is not None:
                    pytest.fail(f"the server ended with {process.returncode}\n{tail(log.read_text())}", pytrace=False)
                if time.monotonic() > end:
                    pytest.fail(f"no server after {limit:.0f} s\n{tail(log.read_text())}", pytrace=False)
                time.sleep(0.5)
            yield address

    def complete(self, address: str, prompts: Sequence[str], **given: Any) -> list[Answer]:
        """What the server answers to the `openai` client: top-5 logprobs of the tokens produced."""
        asked = json.dumps({"address": address, "prompts": list(prompts)} | given)
        ended = self.run([HERE / "complete.py"], asked=asked)
        if ended.code != 0:
            pytest.fail(f"the client ended with {ended.code}\n{tail(ended.log)}", pytrace=False)
        return [_answer(given) for given in json.loads(ended.log.splitlines()[-1])]

    def run(
        self,
        arguments: Sequence[object],
        *,
        environment: Mapping[str, str] | None = None,
        asked: str = "",
        limit: float = LIMIT,
    ) -> Ended:
        """Run vLLM's Python to its end, or past `limit` seconds to the end of its whole process group."""
        log = self._log()
        with self._started([self.python, *arguments], environment or {}, log, asked) as process:
            try:
                code = process.wait(limit)
            except subprocess.TimeoutExpired:
                pytest.fail(f"not done after {limit:.0f} s\n{tail(log.read_text())}", pytrace=False)
        return Ended(code, log.read_text(errors="replace"))

    def _generate(
        self,
        out: Path,
        model: Path,
        ranks: int,
        prompts: Sequence[str | list[int]],
        on: bool,
        environment: Mapping[str, str],
        max_tokens: int,
        engine: Mapping[str, Any],
    ) -> Ended:
        return self._generate_all(
            out, [{"model": str(model)} | dict(engine)], ranks, prompts, on, environment, max_tokens
        )

    def _generate_all(
        self,
        out: Path,
        engines: Sequence[Mapping[str, Any]],
        ranks: int,
        prompts: Sequence[str | list[int]],
        on: bool,
        environment: Mapping[str, str],
        max_tokens: int,
    ) -> Ended:
        texts = any(isinstance(p, str) for p in prompts)
        usual = {"tensor_parallel_size": ranks, "skip_tokenizer_init": not texts} | SMALL
        asked = {
            "engines": [usual | dict(engine) for engine in engines],
            "prompts": list(prompts),
            "max_tokens": max_tokens,
            "logprobs": 5,
            "prompt_logprobs": 5,
        }
        switch = {"ODDRANK": "1" if on else "0"}
        return self.run([HERE / "generate.py", out], environment=switch | environment, asked=json.dumps(asked))

    def _log(self) -> Path:
        self._runs += 1
        return self.folder / f"run-{self._runs}.log"

    @contextmanager
    def _started(
        self, line: Sequence[object], environment: Mapping[str, str], log: Path, asked: str = ""
    ) -> Iterator[subprocess.Popen[str]]:
        """A process in a group of its own, of which nothing is left afterwards."""
        with log.open("w") as written:
            process = subprocess.Popen(
                [str(part) for part in line],
                stdin=subprocess.PIPE,
                stdout=written,
                stderr=subprocess.STDOUT,
                text=True,
                env=_environment(environment),
                cwd=self.folder,
                start_new_session=True,
            )
        try:
            assert process.stdin is not None
            process.stdin.write(asked)
            process.stdin.close()
            yield process
        finally:
            _end(process)


def _environment(more: Mapping[str, str]) -> dict[str, str]:
    """The tests' own environment without what speaks to pytest or the plugin."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("ODDRANK", "PYTEST_", "VLLM_"))}
    return kept | {
        "PYTHONPATH": str(HERE / "compat"),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_NO_USAGE_STATS": "1",
    } | dict(more)  # fmt: skip


def _end(process: subprocess.Popen[str]) -> None:
    """End every process of the group, asking first."""
    for sign, patience in ((signal.SIGTERM, 15.0), (signal.SIGKILL, 15.0)):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        end = time.monotonic() + patience
        while time.monotonic() < end and _alive(process):
            time.sleep(0.1)
    process.wait()


def _alive(process: subprocess.Popen[str]) -> bool:
    process.poll()  # a zombie leader would keep the group
    try:
        os.killpg(process.pid, 0)
    except ProcessLookupError:
        return False
    return True


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5):
            return True
    except (urllib.error.URLError, OSError):
        return False


def _answer(given: Mapping[str, Any]) -> Answer:
    def position(pairs: list[list[Any]] | None) -> Logprobs | None:
        return None if pairs is None else {int(token): float(value) for token, value in pairs}

    return Answer(
        given["text"],
        given["tokens"],
        [position(p) or {} for p in given["logprobs"]],
        [position(p) for p in given.get("prompt_logprobs") or []],
    )


def tail(log: str, lines: int = 60) -> str:
    """The end of a log, after the last lines before it that name an error."""
    every = log.splitlines()
    errors = [line for line in every[:-lines] if "Error" in line][-5:]
    return "\n".join([*errors, "[...]", *every[-lines:]] if len(every) > lines else every)
