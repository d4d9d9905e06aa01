"""SmolLM2 at three sizes, served once for all modules that ask it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from clients.served_models import Reference
from clients.served_process import KEY, Serving, ended, started

PREFILL = 64
"""Tokens of prompts that a step takes."""


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """The servers want the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="package")
def smollm2(demo_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[int, Serving]]:
    """TP size -> the real model's server, in fp32. 9 heads: 5 and 4 at TP=2."""
    logs = tmp_path_factory.mktemp("smollm2")
    options = ("--dtype", "fp32", "--api-key", KEY, "--max-model-len", 512, "--max-running-requests", 8,
               "--max-prefill-tokens", PREFILL)  # fmt: skip
    made = {tp: Serving(demo_model, logs / f"tp{tp}.log", "--tp", tp, *options) for tp in (1, 2, 3)}
    started(made.values())
    yield made
    ended(made.values())


@pytest.fixture(scope="package")
def reference(demo_model: Path) -> Reference:
    return Reference(demo_model)
