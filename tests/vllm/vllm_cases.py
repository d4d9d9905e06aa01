"""What several tests of real serves ask, and what they hold the answers to."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from vllm_runs import SMALL, Answer, Vllm

PROMPTS = ["The capital of France is", "def fibonacci(n):\n", "Water boils at a temperature of"]
"""For SmolLM2."""

TOLERANCE = 1e-4
"""Of a logprob in fp32."""


class Distance(NamedTuple):
    """Of logprobs to transformers'."""

    mean: float
    late: float
    """The 95th percentile."""

    def within(self, others: Sequence["Distance"]) -> bool:
        """No further off than stock vLLM is by itself, a quarter more allowed."""
        return self.mean <= 1.25 * max(o.mean for o in others) and self.late <= 1.25 * max(o.late for o in others)


def tiny_prompts(lengths: Sequence[int] = (5, 17, 40)) -> list[list[int]]:
    """Random token ids that every tiny model has."""
    numbers = random.Random(0)
    return [[numbers.randrange(2, 950) for _ in range(n)] for n in lengths]


def worst(mine: Sequence[Answer], reference: Sequence[Answer]) -> float:
    """The largest difference of a logprob of the same token, wherever both have logprobs, at the four likeliest tokens
    of the reference, which both must list."""
    found = 0.0
    for a, b in zip(mine, reference, strict=True):
        assert a.tokens == b.tokens
        prompt = zip(a.prompt_logprobs, b.prompt_logprobs, strict=bool(a.prompt_logprobs and b.prompt_logprobs))
        for p, q in [*prompt, *zip(a.logprobs, b.logprobs, strict=True)]:
            assert (p is None) == (q is None)
            if p is None or q is None:
                continue
            likeliest = sorted(q, key=lambda token: -q[token])[:4]
            assert len(likeliest) == 4 and set(likeliest) <= set(p), (p, q)
            found = max(found, *(abs(p[t] - q[t]) for t in likeliest))
    return found


def same(mine: Sequence[Answer], reference: Sequence[Answer]) -> None:
    """The same text, and logprobs within the tolerance of fp32."""
    assert [a.tokens for a in mine] == [a.tokens for a in reference]
    assert [a.text for a in mine] == [a.text for a in reference]
    assert len(reference[0].tokens) == 16 and len({tuple(a.tokens) for a in reference}) == len(reference)
    assert worst(mine, reference) <= TOLERANCE


def three_ranks_answer_as_one(vllm: Vllm, model: Path, **engine: Any) -> None:
    """A tiny fp32 model at TP=3 with the plugin, against stock vLLM at TP=1."""
    prompts = tiny_prompts()
    reference = vllm.stock(model, prompts, dtype="float32", **engine)
    same(vllm.engine(model, 3, prompts, on=True, dtype="float32", **engine), reference)


def smollm2_through_the_server(vllm: Vllm, model: Path, ranks: int) -> None:
    """SmolLM2 served by `oddrank vllm serve` to the `openai` client, against stock vLLM at TP=1."""
    reference = vllm.stock(model, PROMPTS, dtype="float32")
    options = ["--dtype", "float32", "--enforce-eager", "--max-model-len", str(SMALL["max_model_len"]),
               "--kv-cache-memory-bytes", str(SMALL["kv_cache_memory_bytes"])]  # fmt: skip
    with vllm.server(model, ranks, *options) as address:
        answers = vllm.complete(address, PROMPTS)
    assert all(a.text.strip() for a in reference)
    same(answers, [replace(a, prompt_logprobs=[]) for a in reference])
