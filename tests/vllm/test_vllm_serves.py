"""Real serves in CI: three ranks through the engine, two through the server. The others are in test_vllm_matrix.py."""

from collections.abc import Callable
from pathlib import Path

import pytest
from vllm_cases import smollm2_through_the_server, three_ranks_answer_as_one
from vllm_runs import Vllm


def test_three_ranks_answer_as_one(vllm: Vllm, tiny: Callable[..., Path]) -> None:
    three_ranks_answer_as_one(vllm, tiny("qwen3"))


@pytest.mark.demo
def test_two_ranks_serve_smollm2(vllm: Vllm, demo_model: Path) -> None:
    # 9 query and 3 KV heads: stock vLLM refuses
    smollm2_through_the_server(vllm, demo_model, 2)
