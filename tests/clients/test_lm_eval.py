"""lm-eval's own command evaluates SmolLM2 on three ranks; transformers says what each number must be."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from clients.served_models import Reference
from clients.served_process import KEY, PATIENCE, Serving

pytestmark = pytest.mark.demo

MODEL = "SmolLM2-135M-Instruct"
TOLERANCE = 2e-3
"""Nats over a whole continuation or document, in fp32."""

CHOICES = """
task: oddrank_choices
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_choice: choices
doc_to_target: answer
metric_list: [{metric: acc}]
"""
DOCUMENTS = """
task: oddrank_documents
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{question}} {{choices[answer]}}."
metric_list: [{metric: bits_per_byte}]
"""
ANSWERS = """
task: oddrank_answers
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "Question: {{question}}\\nAnswer:"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["\\n", "."], max_gen_toks: 8, do_sample: false}
metric_list: [{metric: exact_match}]
"""
QUESTIONS = [
    ("What is the capital of France?", ["Berlin", "Paris", "the city of Madrid, in Spain"], 1),
    ("How many legs does a spider have?", ["eight", "six", "four"], 0),
    ("Which planet is known as the red planet?", ["Venus", "Jupiter", "Mars"], 2),
    ("What is 2 + 2?", ["3", "4", "22"], 1),
    ("Wie heißt der längste Fluss Europas?", ["die Wolga", "der Rhein", "die Donau"], 0),
]


@pytest.fixture(scope="module")
def samples(
    smollm2: dict[int, Serving], demo_model: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[dict[str, Any]]]:
    """Task -> what lm-eval logged of each of its documents."""
    folder = tmp_path_factory.mktemp("lm-eval")
    data = folder / "questions.jsonl"
    lines = [json.dumps({"question": q, "choices": choices, "answer": answer}) for q, choices, answer in QUESTIONS]
    data.write_text("\n".join(lines))
    for name, task in (("choices", CHOICES), ("documents", DOCUMENTS), ("answers", ANSWERS)):
        (folder / f"{name}.yaml").write_text(task.replace("DATA", str(data)))
    model = {
        "model": MODEL, "base_url": f"{smollm2[3].url}/v1/completions", "tokenizer": demo_model, "max_length": 512,
        "num_concurrent": 3, "max_retries": 1, "tokenizer_backend": "huggingface",
    }  # fmt: skip
    home = {"HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OPENAI_API_KEY": KEY}
    done = subprocess.run(
        [sys.executable, "-m", "lm_eval", "--model", "local-completions", "--model_args",
         ",".join(f"{k}={v}" for k, v in model.items()), "--include_path", folder, "--tasks",
         "oddrank_choices,oddrank_documents,oddrank_answers", "--batch_size", "2", "--log_samples", "--output_path",
         folder / "out"],
        env=os.environ | home, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = {}
    for path in (folder / "out").rglob("samples_*.jsonl"):
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        found[path.name.split("_")[2]] = sorted(lines, key=lambda line: line["doc_id"])
    assert {name: len(lines) for name, lines in found.items()} == dict.fromkeys(("choices", "documents", "answers"), 5)
    return found


def test_loglikelihoods(samples: dict[str, list[dict[str, Any]]], reference: Reference) -> None:
    for (question, choices, answer), sample in zip(QUESTIONS, samples["choices"], strict=True):
        want, greedy = [], []
        for choice in choices:
            whole = reference.ids(f"Question: {question}\nAnswer: {choice}")
            prompt = reference.ids(f"Question: {question}\nAnswer:")
            assert whole[: len(prompt)] == prompt
            rest = whole[len(prompt) :]
            lines = reference.after(prompt, rest)
            want.append(float(lines.gather(1, lines.new_tensor(rest).long()[:, None]).sum()))
            greedy.append(reference.greedy(prompt, rest) == rest)
        assert [float(r[0][0]) for r in sample["resps"]] == pytest.approx(want, abs=TOLERANCE)
        assert [r[0][1] in (True, "True") for r in sample["resps"]] == greedy
        assert sample["acc"] == (want.index(max(want)) == answer)


def test_perplexity_of_documents(samples: dict[str, list[dict[str, Any]]], reference: Reference) -> None:
    """Rolling: after the token that begins a text, every token of the document."""
    (start,) = reference.ids("<|im_start|>")
    for (question, choices, answer), sample in zip(QUESTIONS, samples["documents"], strict=True):
        tokens = reference.ids(f"{question} {choices[answer]}.")
        lines = reference.after([start], tokens)
        want = float(lines.gather(1, lines.new_tensor(tokens).long()[:, None]).sum())
        assert float(sample["resps"][0][0]) == pytest.approx(want, abs=TOLERANCE)


def test_generation(samples: dict[str, list[dict[str, Any]]], reference: Reference) -> None:
    for (question, _, _), sample in zip(QUESTIONS, samples["answers"], strict=True):
        said = reference.continued(reference.ids(f"Question: {question}\nAnswer:"), 8)
        assert sample["resps"][0][0] == said.split("\n")[0].split(".")[0]
