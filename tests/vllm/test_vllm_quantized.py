"""Integers at TP=3: GPTQ, AWQ, AutoRound and compressed-tensors. Where vLLM's CPU build has a kernel they are computed;
where it has none (inside/test_no_kernel.py) they are loaded by its own loaders."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from quantized_models import HEADS, KINDS, KV_HEADS, WIDTH, dense_model, meaning, write_quantized
from rank_weights import Rank, assemble, trained
from vllm_cases import Distance, tiny_prompts
from vllm_runs import HERE, Answer, Vllm, tail

pytestmark = pytest.mark.vllm

COMPUTED = ("gptq", "awq", "auto-round", "int4", "w8a8")
LOADED = ("gptq-int8", "int8")
PROMPTS = tiny_prompts([60] * 4)
TOKENS = 8

Quantized = Callable[[str], Path]
Split = dict[str, list[int]]

WHOLE: Split = {}
PER_RANK: Split = {"o_proj": [128, 128, 64], "down_proj": [192, 128, 128]}
"""Trained input channels of each rank. Heads of 32: of 5 KV heads with 2 query heads each the ranks have 2, 2 and 1;
of 448 channels in units of 64 they have 3, 2 and 2 units."""


@pytest.fixture(scope="module")
def quantized(tmp_path_factory: pytest.TempPathFactory) -> Quantized:
    root, written = tmp_path_factory.mktemp("quantized"), dict[str, Path]()

    def folder(name: str) -> Path:
        if name not in written:
            written[name] = write_quantized(name, root / name)
        return written[name]

    return folder


def engine(name: str, folder: Path) -> dict[str, Any]:
    """vLLM's kernel for int4 computes in half precision only; int8 is computed in any."""
    return {"model": str(folder), "dtype": "float32" if name == "w8a8" else "float16"}


def answers_of_one_rank(vllm: Vllm, quantized: Quantized, on: bool, **environment: str) -> dict[str, list[Answer]]:
    models = [engine(name, quantized(name)) for name in COMPUTED]
    found = vllm.engines(models, 1, PROMPTS, on=on, environment=environment, max_tokens=TOKENS)
    return dict(zip(COMPUTED, found, strict=True))


@pytest.fixture(scope="module")
def stock(vllm: Vllm, quantized: Quantized) -> dict[str, list[Answer]]:
    return answers_of_one_rank(vllm, quantized, False)


def quantize_inputs(model: torch.nn.Module, split: Split) -> None:
    """As W8A8 does while it runs: round a projection's input to 8 bits per token, each rank's part by itself."""

    def rounded(x: torch.Tensor) -> torch.Tensor:
        step = x.abs().amax(-1, keepdim=True) / 127
        return torch.where(step > 0, (x / step).round() * step, x)

    for name, module in model.named_modules():
        if name.endswith("_proj"):
            sizes = split.get(name.rpartition(".")[2])

            def before(_: Any, args: tuple[torch.Tensor], sizes: list[int] | None = sizes) -> tuple[torch.Tensor]:
                parts = args[0].split(sizes or [args[0].shape[-1]], dim=-1)
                return (torch.cat([rounded(part) for part in parts], dim=-1),)

            module.register_forward_pre_hook(before)


def distance(name: str, folder: Path, answers: Sequence[Answer], split: Split) -> Distance:
    """Of every logprob given, of prompts and of tokens produced, to transformers' in fp64 on the same tokens; and how
    far the token given as likeliest is from being so."""
    model = dense_model(folder)
    if name == "w8a8":
        quantize_inputs(model, split)
    off: list[float] = []
    for answer, prompt in zip(answers, PROMPTS, strict=True):
        given = [*answer.prompt_logprobs[1:], *answer.logprobs]
        assert len(given) == len(prompt) + TOKENS - 1
        with torch.no_grad():
            expected = model(torch.tensor([prompt + answer.tokens])).logits[0].log_softmax(-1).numpy()
        for listed, right in zip(given, expected[:-1], strict=True):
            assert listed is not None and len(listed) >= 5
            off += [abs(value - right[token]) for token, value in listed.items()]
            off.append(right.max() - right[max(listed, key=lambda token: listed[token])])
    return Distance(float(np.mean(off)), float(np.percentile(off, 95)))


def test_padding_changes_no_bit_of_an_answer(vllm: Vllm, quantized: Quantized, stock: dict[str, list[Answer]]) -> None:
    """The checkpoint planned for three ranks, on one: dummy words, zero points and scales are exactly nothing."""
    virtual = answers_of_one_rank(vllm, quantized, True, ODDRANK_PLAN_TP="3")
    for name in COMPUTED:
        assert len({tuple(a.tokens) for a in stock[name]}) == len(PROMPTS)
        assert virtual[name] == stock[name], name


@pytest.mark.parametrize("name", COMPUTED)
def test_three_ranks_compute_it(vllm: Vllm, quantized: Quantized, stock: dict[str, list[Answer]], name: str) -> None:
    folder = quantized(name)
    given = engine(name, folder)
    three = vllm.engine(folder, 3, PROMPTS, on=True, max_tokens=TOKENS, dtype=given["dtype"])
    one, mine = distance(name, folder, stock[name], WHOLE), distance(name, folder, three, PER_RANK)
    print(f"{name}: stock TP=1 {one}; TP=3 {mine}")
    assert 0 < one.mean < 0.01, "stock vLLM itself is off: this geometry proves nothing"
    if name != "w8a8":
        assert mine.within([one]), (mine, one)
        return
    # three ranks round a row's input in three parts: that is what is computed, and a row rounded whole is not
    whole = distance(name, folder, three, WHOLE)
    print(f"{name}: TP=3 to inputs rounded whole {whole}")
    assert mine.mean < 2.5 * one.mean and mine.mean < whole.mean / 5, (mine, one, whole)


def test_three_ranks_load_what_this_machine_cannot_compute(vllm: Vllm, quantized: Quantized, tmp_path: Path) -> None:
    folders = [quantized(name) for name in LOADED]
    ended = vllm.run([HERE / "inside" / "three_ranks.py", tmp_path, *folders], environment={"ODDRANK": "1"})
    assert ended.code == 0, tail(ended.log)
    for name, folder in zip(LOADED, folders, strict=True):
        ranks = [Rank(KINDS[name], tmp_path / folder.name / f"{rank}.safetensors") for rank in range(3)]
        width = 64 if name == "gptq-int8" else 32  # qwen2's is its hidden size over its heads
        for layer in range(2):
            found = assemble(ranks, trained(meaning(folder)), layer, width)
            for slots, units in zip(found, (HEADS, KV_HEADS, WIDTH), strict=True):
                assert sorted(i for i in slots if i >= 0) == list(range(units)), (name, layer)
            assert len(found.queries) == 12 and len(found.channels) == 576
