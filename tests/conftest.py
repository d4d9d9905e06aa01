"""What tests of several folders share."""

import os
from pathlib import Path

import pytest

# No test may depend on a model hub: transformers is given local directories only.
os.environ["HF_HUB_OFFLINE"] = "1"

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def demo_model() -> Path:
    """The directory of the real SmolLM2-135M-Instruct, made in the clone's `models/` if it isn't there."""
    from oddrank.demo.smollm2 import DEFAULT_OUT, ensure_model

    ensure_model(ROOT / DEFAULT_OUT)
    return ROOT / DEFAULT_OUT
