"""Recorded decode steps: the bits of the model's own, whatever happens to the cache and the sequences in between."""

from collections.abc import Iterator

import pytest
import torch
from runtime.capture.recorded_models import both_ways
from runtime.tiny import Tiny, ragged, rank_model, tiny

import oddrank.runtime.cache
import oddrank.runtime.layers.kernels
from oddrank.native.compiled import library
from oddrank.runtime.models.llama import Llama
from oddrank.runtime.parallel import SoloGroup
from oddrank.runtime.request import Sampling

PROMPTS = [[3, 17, 52, 0, 17], [41], [8, 29, 11, 4, 4, 4, 9, 30, 2], [1, 2], [50, 49, 48]]
needs_library = pytest.mark.skipif(library() is None, reason="no compiled kernels")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches that grow every few tokens."""
    monkeypatch.setattr(oddrank.runtime.cache, "BLOCK", 16)
    monkeypatch.setattr(oddrank.runtime.layers.kernels, "half_packing_works", lambda: False)


@pytest.fixture
def inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def solo(model: Tiny, dtype: str = "bf16") -> Llama:
    return rank_model(model, ragged(model, 1), SoloGroup(), dtype, torch.bfloat16)


FAMILIES = {
    "llama": {},
    "mistral": {},
    "qwen2": {},
    "qwen3": {},
}


def long(family: str) -> Tiny:
    return tiny(family, max_position_embeddings=256)


@needs_library
@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_bits_of_the_steps_that_are_not_recorded(family: str) -> None:
    """Over 64 steps; sequences of different lengths join and retire, two or more to a step, as the cache grows."""
    model = solo(long(family))
    told = both_ways(model, PROMPTS[:1], [Sampling(max_tokens=90, ignore_eos=True)])
    assert told["different"] == 0 and told["texts equal"] and told["refused"] == []
    assert told["replayed"] > 64 and told["not recorded"] == 0
    mixed = [Sampling(max_tokens=40, temperature=0.8, seed=5), Sampling(max_tokens=7)]
    told = both_ways(model, PROMPTS, mixed, slots=3, eos=[2, 9])
    assert told["different"] == 0 and told["texts equal"] and told["refused"] == []
    assert told["replayed"] > 10
