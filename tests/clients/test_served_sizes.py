"""A model served by one, two and three ranks: `capture` and `compare` find no difference, nor does transformers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from itertools import combinations
from pathlib import Path

import pytest
import torch
from cli.test_cli import run
from transformers import AutoTokenizer

from clients.served_models import Reference, chat_ids, write_synthetic
from clients.served_process import KEY, Serving, ended, started
from oddrank.verify.oracle import transformers_logits
from oddrank.verify.served import Answer, read_capture

QUESTIONS = ("What is the capital of France?", "Count from one to ten.", "Write a sentence about the sea.", "Why?")
LENGTH = 20
NOISE = 1e-6
"""Nats of KL divergence a token that fp32 rounding may bring."""


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[int, Serving]]]:
    """Gated delta nets, gated attention and experts in NVFP4, of which 3 ranks have unequal parts."""
    folder = tmp_path_factory.mktemp("moe")
    path = write_synthetic("qwen3_5_moe", "nvfp4-mixed", folder / "m")
    options = ("--dtype", "fp32", "--max-model-len", 256, "--max-running-requests", 4, "--api-key", KEY)
    made = {tp: Serving(path, folder / f"tp{tp}.log", "--tp", tp, *options) for tp in (1, 2, 3)}
    started(made.values())
    yield path, made
    ended(made.values())


def same_answers(servings: dict[int, Serving], folder: Path, capsys: pytest.CaptureFixture[str]) -> list[Answer]:
    """What all three answer, by both commands."""
    suite = folder / "suite.jsonl"
    suite.write_text("".join(json.dumps({"prompt": q, "max_tokens": LENGTH}) + "\n" for q in QUESTIONS))
    files = {tp: folder / f"{tp}.json" for tp in servings}
    for tp, file in files.items():
        code, out, err = run(capsys, "capture", servings[tp].url, "--suite", suite, "-o", file, "--api-key", KEY)
        assert code == 0 and "token ids and logprobs" in out, err
    for a, b in combinations(files.values(), 2):
        code, out, err = run(capsys, "compare", a, b, "--json")
        found = json.loads(out)
        assert code == 0 and found["ok"] and found["identical"] == len(QUESTIONS), (err, found)
        assert found["kl"] < NOISE and all(pair["kl_tokens"] > 1 for pair in found["pairs"])
    return read_capture(files[1]).answers


def check(answers: list[Answer], after: Callable[[str, list[int]], torch.Tensor]) -> None:
    """Each is the greedy one. after: log p(token | the question, the answer up to there), [len(answer), vocab]."""
    for question, answer in zip(QUESTIONS, answers, strict=True):
        tokens = [t.id for t in answer.tokens if t.id is not None]
        lines = after(question, tokens)
        assert tokens == lines.argmax(-1).tolist() and len(tokens) == answer.completion_tokens
        want = [float(line[t]) for line, t in zip(lines, tokens, strict=True)]
        assert [t.logprob for t in answer.tokens] == pytest.approx(want, abs=1e-3)


@pytest.mark.demo
def test_smollm2(
    smollm2: dict[int, Serving], reference: Reference, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answers = same_answers(smollm2, tmp_path, capsys)
    chats = {q: chat_ids(reference.tokenizer, [{"role": "user", "content": q}]) for q in QUESTIONS}
    check(answers, lambda question, tokens: reference.after(chats[question], tokens))


def test_experts_in_nvfp4(
    moe: tuple[Path, dict[int, Serving]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, servings = moe
    answers = same_answers(servings, tmp_path, capsys)
    tokenizer = AutoTokenizer.from_pretrained(path)
    chats = {q: chat_ids(tokenizer, [{"role": "user", "content": q}]) for q in QUESTIONS}

    def after(question: str, tokens: list[int]) -> torch.Tensor:
        (logits,) = transformers_logits(path, [[*chats[question], *tokens]], "fp32")
        return torch.log_softmax(torch.from_numpy(logits), -1)[len(chats[question]) - 1 : -1]

    check(answers, after)
