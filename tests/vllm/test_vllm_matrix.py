"""`make test-vllm`: every family, backend and way of serving that vLLM's CPU build runs, at sizes that it refuses."""

import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM
from vllm_cases import Distance, same, smollm2_through_the_server, three_ranks_answer_as_one, tiny_prompts
from vllm_runs import Answer, Vllm, tail

pytestmark = pytest.mark.vllm

Tiny = Callable[..., Path]


@pytest.mark.demo
def test_four_ranks_serve_smollm2(vllm: Vllm, demo_model: Path) -> None:
    smollm2_through_the_server(vllm, demo_model, 4)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_three_ranks_of_each_dense_family(vllm: Vllm, tiny: Tiny, family: str) -> None:
    three_ranks_answer_as_one(vllm, tiny(family))


def test_three_ranks_of_transformers_code(vllm: Vllm, tiny: Tiny) -> None:
    three_ranks_answer_as_one(vllm, tiny("qwen3"), model_impl="transformers")


EVEN = {"num_attention_heads": 20, "num_key_value_heads": 10, "linear_num_key_heads": 10, "linear_num_value_heads": 20}
"""Two ranks divide all of it and three none; of 12 planned KV heads and GDN key heads, four a rank, two are dummies, so
the last rank has real ones too."""


def expected_logprobs(folder: Path, prompts: Sequence[list[int]]) -> list[torch.Tensor]:
    """Of each prompt's tokens but the first, by transformers in fp32 on the weights as stored."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = [model(torch.tensor([prompt])).logits[0, :-1].log_softmax(-1) for prompt in prompts]
    return [given[torch.arange(len(p) - 1), torch.tensor(p[1:])] for given, p in zip(logits, prompts, strict=True)]


def distance(answers: Sequence[Answer], prompts: Sequence[list[int]], expected: Sequence[torch.Tensor]) -> Distance:
    off: list[float] = []
    for answer, prompt, right in zip(answers, prompts, expected, strict=True):
        given = [at[token] for at, token in zip(answer.prompt_logprobs[1:], prompt[1:], strict=True) if at is not None]
        off += np.abs(np.array(given) - right.numpy()).tolist()
    assert len(off) == sum(len(p) - 1 for p in prompts)
    return Distance(float(np.mean(off)), float(np.percentile(off, 95)))


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_5_moe_text"])
def test_three_ranks_of_hybrid_models(vllm: Vllm, tiny: Tiny, family: str) -> None:
    model = tiny(family, torch.bfloat16, **EVEN)
    prompts = tiny_prompts([100] * 8)
    expected = expected_logprobs(model, prompts)
    given = {"dtype": "bfloat16", "max_tokens": 1}
    stock = [distance(vllm.stock(model, prompts, ranks, **given), prompts, expected) for ranks in (1, 2)]
    three = distance(vllm.engine(model, 3, prompts, on=True, **given), prompts, expected)
    virtual = distance(
        vllm.engine(model, 1, prompts, on=True, environment={"ODDRANK_PLAN_TP": "3"}, **given), prompts, expected
    )
    print(f"{family}: stock TP=1, TP=2 {stock}; TP=3 {three}; virtual at TP=1 {virtual}")
    assert 0 < max(o.mean for o in stock) < 0.1, "stock vLLM itself is off: this geometry proves nothing"
    assert three.within(stock), (three, stock)
    assert virtual.within(stock), (virtual, stock)


@pytest.mark.parametrize(("ranks", "on"), [(1, False), (3, True)], ids=["stock", "planned"])
def test_transformers_hybrid_code_is_refused_by_vllm_itself(vllm: Vllm, tiny: Tiny, ranks: int, on: bool) -> None:
    """vLLM 0.32's transformers backend has no linear attention at any size; the plugin changes nothing about that."""
    model = tiny("qwen3_5_text", torch.bfloat16, **EVEN)
    ended = vllm.refusal(model, ranks, on=on, dtype="bfloat16", model_impl="transformers")
    assert ended.code != 0
    assert "(linear_attention) does not dispatch through the Transformers attention interface" in ended.log


def test_the_virtual_checkpoint_on_one_rank(vllm: Vllm, tiny: Tiny) -> None:
    model, prompts = tiny("qwen3"), tiny_prompts()
    reference = vllm.stock(model, prompts, dtype="float32")
    environment = {"ODDRANK_PLAN_TP": "3"}
    same(vllm.engine(model, 1, prompts, on=True, environment=environment, dtype="float32"), reference)


def test_a_checkpoint_padded_on_disk_needs_no_plugin(vllm: Vllm, tiny: Tiny, tmp_path: Path) -> None:
    # 960 is 64 x 15: vLLM's own rule for the vocabulary lets three ranks have it
    model, prompts = tiny("qwen3", vocab_size=960), tiny_prompts()
    padded = tmp_path / "padded"
    command = [sys.executable, "-m", "oddrank", "pad", model, padded, "--tp", "3", "--executor", "vllm"]
    made = subprocess.run([str(c) for c in command], capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    reference = vllm.stock(model, prompts, dtype="float32")
    same(vllm.engine(padded, 3, prompts, on=False, dtype="float32"), reference)


def test_a_size_that_divides_gives_identical_bytes(vllm: Vllm, tiny: Tiny) -> None:
    model = tiny("qwen3", num_attention_heads=8, num_key_value_heads=4)
    prompts = tiny_prompts()
    without = vllm.engine(model, 2, prompts, on=False, environment={"VLLM_PLUGINS": "none"}, dtype="bfloat16")
    off = vllm.engine(model, 2, prompts, on=False, dtype="bfloat16")
    on = vllm.engine(model, 2, prompts, on=True, dtype="bfloat16")
    assert len(without) == len(prompts) and without[0].prompt_logprobs[1]
    assert off == without
    assert on == without


def test_without_the_plugin_three_ranks_are_refused(vllm: Vllm, tiny: Tiny) -> None:
    ended = vllm.refusal(tiny("qwen3"), 3, on=False, dtype="float32")
    assert ended.code != 0 and "attention heads (10) must be divisible by tensor parallel size (3)" in ended.log


@pytest.mark.parametrize(
    ("options", "environment", "said"),
    [
        (["--enable-lora"], {}, "LoRA adapters have the trained sizes"),
        (["--load-format", "pt"], {}, "--load-format pt does not read safetensors"),
        (["--hf-overrides", '{"num_key_value_heads": 10}'], {}, "Leave num_key_value_heads out of --hf-overrides"),
        ([], {"ODDRANK_CONSTRAINTS": "q_heads=10"}, "3 ranks cannot meet q_heads=10"),
    ],
    ids=["lora", "format", "overrides", "constraints"],
)
def test_what_cannot_be_served_does_not_start(
    vllm: Vllm, tiny: Tiny, options: list[str], environment: dict[str, str], said: str
) -> None:
    model = tiny("qwen3")
    ended = vllm.run(
        ["-m", "oddrank", "vllm", "serve", model, "--tensor-parallel-size", "3", "--dtype", "float32",
         "--skip-tokenizer-init", "--enforce-eager", *options],
        environment=environment,
    )  # fmt: skip
    assert ended.code == 2, tail(ended.log)
    last = [line for line in ended.log.splitlines() if line.startswith("oddrank: ")][-1]
    assert said in last and "Traceback" not in ended.log, tail(ended.log)
