"""The real model on CUDA GPUs, one a rank: the tokens of transformers on the CPU."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from oddrank.planner import make_plan
from oddrank.runtime.generate import generate
from oddrank.runtime.request import Sampling

pytestmark = [pytest.mark.demo, pytest.mark.gpu]

PROMPT = "Once upon a time"
TOKENS = 32  # in fp32 the closest of these has a margin of 0.06 in its logit, far above rounding


@pytest.fixture(scope="module")
def expected(demo_model: Path) -> list[int]:
    tokenizer = AutoTokenizer.from_pretrained(demo_model)
    model = AutoModelForCausalLM.from_pretrained(demo_model, dtype=torch.float32)
    ids = tokenizer(PROMPT, return_tensors="pt")
    out = model.generate(**ids, max_new_tokens=TOKENS, do_sample=False)
    return list(out[0, ids.input_ids.shape[1] :].tolist())


@pytest.mark.parametrize("tp", [1, 2, 3, 4, 5])
def test_greedy_tokens(demo_model: Path, expected: list[int], tp: int) -> None:
    if torch.cuda.device_count() < tp:
        pytest.skip(f"TP={tp} takes {tp} CUDA GPUs, {torch.cuda.device_count()} here")
    plan = make_plan(demo_model, tp).plan
    done = generate(demo_model, plan, [PROMPT], Sampling(max_tokens=TOKENS), dtype="fp32", device="cuda")
    assert done.outputs[0].token_ids == expected
