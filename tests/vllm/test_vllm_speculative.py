"""Speculative decoding on padded ranks: SmolLM2 drafts for itself, so the drafter is accepted as often as at TP=1."""

import json
from pathlib import Path
from typing import Any

import pytest
from vllm_runs import HERE, SMALL, Vllm, tail

PROMPTS = [
    [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2],
    [504, 3575, 282, 260, 905],
    [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198, 1],
]
"""Token ids; the third begins like the first, which prefix caching notices."""


def speculate(vllm: Vllm, model: Path, ranks: int, *, on: bool) -> dict[str, Any]:
    out = vllm.folder / f"speculated-{ranks}.json"
    asked = {
        "engines": [
            SMALL
            | {
                "model": str(model),
                "tensor_parallel_size": ranks,
                "dtype": "float32",
                "kv_cache_memory_bytes": 400_000_000,
                "enable_prefix_caching": True,
                "speculative_config": {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3},
                "disable_log_stats": False,
            }
        ],
        "prompts": PROMPTS,
        "max_tokens": 48,
        "metrics": True,
    }
    ended = vllm.run([HERE / "generate.py", out], environment={"ODDRANK": str(int(on))}, asked=json.dumps(asked))
    assert ended.code == 0, tail(ended.log)
    (found,) = json.loads(out.read_text())
    return {"tokens": [a["tokens"] for a in found["answers"]]} | dict(found["metrics"])


@pytest.mark.vllm
def test_a_padded_drafter_is_accepted_like_the_trained_one(vllm: Vllm, demo_model: Path) -> None:
    stock, ours = speculate(vllm, demo_model, 1, on=False), speculate(vllm, demo_model, 2, on=True)
    assert stock["vllm:spec_decode_num_draft_tokens"] > 50
    assert stock["vllm:spec_decode_num_accepted_tokens"] > 0.9 * stock["vllm:spec_decode_num_draft_tokens"]
    assert ours == stock
