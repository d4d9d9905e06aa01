"""Checkpoints on disk, plans, rank processes: the way a user runs a model."""

import os
from pathlib import Path

import pytest
import torch
from runtime.tiny import TOKENS, reference, tiny

from oddrank.checkpoint import Checkpoint
from oddrank.errors import OddrankError
from oddrank.planner import make_plan
from oddrank.runtime.generate import (
    Session,
    TextStream,
    default_dtype,
    encode,
    end_tokens,
    forward_logits,
    generate,
    load_tokenizer,
)
from oddrank.runtime.loader import prepare
from oddrank.runtime.parallel import Group, LocalGroup
from oddrank.runtime.precision import Precision
from oddrank.runtime.request import Sampling
from oddrank.runtime.worker import load_rank


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama with biases and an untied head, stored by transformers in float64."""
    path = tmp_path_factory.mktemp("model")
    tiny("llama").hf.save_pretrained(path)
    return path


def relative(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((a - b).abs().max() / b.abs().max())


@pytest.mark.parametrize("tp", [1, 2, 3, 4])
def test_local_logits_of_a_planned_checkpoint(saved: Path, tp: int) -> None:
    plan = make_plan(saved, tp).plan
    assert relative(forward_logits(saved, plan, TOKENS, "fp64"), reference(tiny("llama"))) < 1e-10


@pytest.mark.parametrize("tp", [2, 3])
def test_rank_processes(saved: Path, tp: int) -> None:
    plan = make_plan(saved, tp).plan
    local = forward_logits(saved, plan, TOKENS, "fp64")
    prompts, sampling = [TOKENS[:3], TOKENS[2:], [1]], Sampling(max_tokens=6, ignore_eos=True)
    with Session(saved, plan, dtype="fp64", slots=2) as session:
        loaded = session.wait()
        told: list[tuple[int, int]] = []
        completions, timings = session.generate(prompts, sampling, lambda i, t: told.append((i, t)))
        again, _ = session.generate(prompts, sampling)
        logits = session.logits(TOKENS)
        with pytest.raises(OddrankError, match="vocabulary"):
            session.generate([[10_000]])
    assert relative(logits, local) < 1e-13  # ranks' terms in the same order
    assert relative(logits, reference(tiny("llama"))) < 1e-10
    assert completions == again
    for index, completion in enumerate(completions):
        assert [t for i, t in told if i == index] == completion.token_ids
        whole = prompts[index] + completion.token_ids
        assert reference(tiny("llama"), whole).argmax(-1).tolist()[len(prompts[index]) - 1 : -1] == completion.token_ids
    assert timings.decoded_tokens == 15
    assert len(loaded) == tp and session.load_seconds > 0
    stored = sum(t.nbytes for t in tiny("llama").state.values())
    for rank in loaded:
        assert rank.kept_bytes == rank.stored_bytes < 0.8 * stored


def test_what_the_directory_says(saved: Path) -> None:
    checkpoint = Checkpoint.open(saved)
    assert default_dtype(checkpoint) == "fp64"
    checkpoint.config.pop("dtype", None)
    assert default_dtype(checkpoint) == "fp64"  # from what is stored
    checkpoint.config["dtype"] = "bfloat16"
    assert default_dtype(checkpoint) == "bf16"
    checkpoint.config["eos_token_id"] = [5, 3]
    (saved / "generation_config.json").write_text('{"eos_token_id": 9}')
    assert end_tokens(checkpoint) == (3, 5, 9)
    checkpoint.config["eos_token_id"] = None
    (saved / "generation_config.json").unlink()
    assert end_tokens(checkpoint) == ()
    with pytest.raises(OddrankError, match="no tokenizer"):
        load_tokenizer(saved)


def test_text_comes_whole() -> None:
    """Pieces are told once they are whole characters, and add up to the text."""
    parts = {0: b"a", 1: "é".encode()[:1], 2: "é".encode()[1:], 3: b" b", 4: b"", 5: "\U0001f600".encode()}

    class Tokenizer:
        def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
            assert skip_special_tokens
            return b"".join(parts[t] for t in tokens).decode(errors="replace")

    stream = TextStream(Tokenizer())
    assert [stream.add(t) for t in (0, 1, 2, 3, 4, 5)] == ["a", "", "é", " b", "", "\U0001f600"]


# -- the real model ----------------------------------------------------------------------------------------

PROMPT = "The capital of France is"


@pytest.mark.demo
def test_smollm2_greedy_text_is_that_of_transformers(demo_model: Path) -> None:
    from transformers import AutoModelForCausalLM

    tokenizer = load_tokenizer(demo_model)
    ids = encode(tokenizer, PROMPT)
    hf = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    with torch.inference_mode():
        wanted = hf.generate(
            torch.tensor([ids]), attention_mask=torch.ones(1, len(ids)), max_new_tokens=24, do_sample=False
        )
    pieces: list[str] = []
    out = generate(
        demo_model, make_plan(demo_model, 1).plan, [PROMPT], Sampling(max_tokens=24), dtype="fp32",
        on_text=lambda _, text: pieces.append(text),
    )  # fmt: skip
    assert out.outputs[0].token_ids == wanted[0, len(ids) :].tolist()
    assert "".join(pieces) == out.outputs[0].text == tokenizer.decode(out.outputs[0].token_ids, True)
    assert (out.tp, out.dtype, out.outputs[0].prompt_tokens) == (1, "fp32", len(ids))
    assert out.tokens_per_second > 0 and out.seconds > 0 and out.load_seconds > 0


@pytest.mark.demo
def test_smollm2_keeps_its_slice_in_bf16(demo_model: Path) -> None:
    """As stored, and as packed for this machine: at most 1.02 of what the slice is stored in."""
    plan, size = make_plan(demo_model, 2).plan, os.path.getsize(demo_model / "model.safetensors")

    def rank(group: Group) -> tuple[int, int, int]:
        with Checkpoint.open(demo_model) as checkpoint:
            model, loaded = load_rank(plan, checkpoint, group, Precision.of("bf16"))
        prepare(model)
        return loaded.stored_bytes, loaded.kept_bytes, model.nbytes()

    for stored, loaded, prepared in LocalGroup.run(2, rank):
        assert 0.4 * size < stored < 0.6 * size
        assert max(loaded, prepared) <= 1.02 * stored


@pytest.mark.demo
def test_chat_prompts_go_through_the_template(demo_model: Path) -> None:
    tokenizer = load_tokenizer(demo_model)
    ids = encode(tokenizer, "Hi", chat=True)
    text = tokenizer.decode(ids)
    assert "<|im_start|>user\nHi<|im_end|>" in text and text.endswith("<|im_start|>assistant\n")
    tokenizer.chat_template = None
    with pytest.raises(OddrankError, match="no chat template"):
        encode(tokenizer, "Hi", chat=True)


def test_a_tied_head_with_values_of_its_own_is_refused(tmp_path: Path) -> None:
    """transformers keeps two stored tensors apart whatever the config says; taking the embedding would be wrong."""
    from transformers import LlamaConfig, LlamaForCausalLM

    from oddrank import OddrankError, make_plan
    from oddrank.runtime.generate import forward_logits

    shape = {"hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 24}
    config = LlamaConfig(**shape, num_hidden_layers=1, vocab_size=48, tie_word_embeddings=False)
    LlamaForCausalLM(config).save_pretrained(tmp_path / "m")
    stored = tmp_path / "m" / "config.json"
    stored.write_text(stored.read_text().replace('"tie_word_embeddings": false', '"tie_word_embeddings": true'))
    with pytest.raises(OddrankError, match="tie_word_embeddings to false"):
        forward_logits(tmp_path / "m", make_plan(tmp_path / "m", 2).plan, [1, 2, 3], "fp32")
