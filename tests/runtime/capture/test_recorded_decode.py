"""Recorded decode steps: the bits of the model's own, whatever happens to the cache and the sequences in between."""

import logging
from typing import Any

import numpy as np
import pytest
import torch
from runtime.capture.recorded_models import both_ways
from runtime.quantized.hybrids import Hybrid, InMemory, hybrid, solved
from runtime.tiny import CASES, Tiny, ragged, rank_model, tiny

import oddrank.runtime.cache
from oddrank.native.compiled import library
from oddrank.runtime.engine import RECORD, Engine
from oddrank.runtime.expert_options import ExpertOptions
from oddrank.runtime.layers.norm import RMSNorm
from oddrank.runtime.loader import prepare
from oddrank.runtime.models.llama import Llama
from oddrank.runtime.parallel import Group, LocalGroup, SoloGroup
from oddrank.runtime.precision import Precision
from oddrank.runtime.recorded import DecodeSteps
from oddrank.runtime.request import Sampling
from oddrank.runtime.step import Step
from oddrank.runtime.worker import load_rank

PROMPTS = [[3, 17, 52, 0, 17], [41], [8, 29, 11, 4, 4, 4, 9, 30, 2], [1, 2], [50, 49, 48]]
needs_library = pytest.mark.skipif(library() is None, reason="no compiled kernels")


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caches that grow every few tokens."""
    monkeypatch.setattr(oddrank.runtime.cache, "BLOCK", 16)


def solo(model: Tiny, dtype: str = "bf16") -> Llama:
    return rank_model(model, ragged(model, 1), SoloGroup(), dtype, torch.bfloat16)


def hybrid_model(m: Hybrid, kind: str) -> Llama:
    checkpoint: Any = InMemory(m.weights, m.config)
    return load_rank(solved(m, 1), checkpoint, SoloGroup(), Precision.of("bf16"), ExpertOptions(kind=kind))[0]


def long(family: str) -> Tiny:
    return tiny(family, max_position_embeddings=256)


@needs_library
@pytest.mark.parametrize("family", sorted(CASES))
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


@needs_library
@pytest.mark.parametrize(("family", "kind"), [("qwen3_5", "auto"), ("qwen3_5_moe", "resident"), ("qwen3_5_moe", "cpu")])
def test_states_and_experts_are_recorded_too(family: str, kind: str) -> None:
    m = hybrid(family)
    model = hybrid_model(m, kind)
    prompts = [m.tokens(5, 1), m.tokens(9, 2), m.tokens(3, 3)]
    told = both_ways(model, prompts, [Sampling(max_tokens=72), Sampling(max_tokens=20, temperature=1, seed=2)], slots=2)
    assert told["different"] == 0 and told["texts equal"] and told["refused"] == []
    assert told["replayed"] > 64


@needs_library
@pytest.mark.parametrize("kind", ["offload", "hybrid"])
def test_experts_that_are_fetched_are_not_recorded(kind: str) -> None:
    m = hybrid("qwen3_5_moe")
    told = both_ways(hybrid_model(m, kind), [m.tokens(5, 1)], [Sampling(max_tokens=12)])
    assert told["different"] == 0 and told["texts equal"]
    assert told["refused"] == [1] and told["replayed"] == 0


class Planted(RMSNorm):
    """A norm to which somebody has added something."""

    plant: Any = None

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.plant(super().__call__(x))

    def add(self, x: torch.Tensor, term: torch.Tensor) -> torch.Tensor:
        return self.plant(super().add(x, term))


@needs_library
@pytest.mark.parametrize(
    ("plant", "said"),
    [
        (lambda x: x.mul_(1.5), "aten.mul_"),
        (lambda x: x.clone(), "aten.clone"),
        (lambda x: (np.multiply(x.numpy(), 2, out=x.numpy()), x)[1], "other numbers"),  # torch does not see that
    ],
)
def test_a_model_with_a_stray_operation_stays_as_it_is(plant: Any, said: str, caplog: pytest.LogCaptureFixture) -> None:
    model = solo(long("llama"))
    layer = model.layers[1].post_attention_layernorm
    layer.__class__ = Planted
    layer.plant = plant
    with caplog.at_level(logging.DEBUG, "oddrank"):
        told = both_ways(model, PROMPTS[:2], [Sampling(max_tokens=12)])
    assert told["different"] == 0 and told["texts equal"]
    assert told["refused"] == [2] and told["replayed"] == 0
    assert said in caplog.text


@needs_library
def test_numbers_read_in_python_are_noticed() -> None:
    """What depends on the step through Python is the same in every replay, and the first one is compared."""
    model = solo(long("qwen3"))
    embed = model.embed

    def by_length(tokens: torch.Tensor) -> torch.Tensor:
        steps.append(1)
        h = embed(tokens)
        h.numpy()[...] *= len(steps)
        return h

    steps: list[int] = []
    model.embed = by_length  # type: ignore[method-assign]
    engine = Engine(model)
    engine.generate(PROMPTS[:1], Sampling(max_tokens=8, ignore_eos=True))
    assert engine.steps._refused == {1} and engine.steps.replayed == 0


@needs_library
def test_recording_can_be_turned_off(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sampling = solo(long("mistral")), Sampling(max_tokens=12, ignore_eos=True)
    engines = [Engine(model), Engine(model, record=False)]
    monkeypatch.setenv(RECORD, "0")
    engines.append(Engine(model))
    texts = [e.generate(PROMPTS[:1], sampling) for e in engines]
    assert [e.steps.replayed for e in engines] == [8, 0, 0]
    assert texts[0] == texts[1] == texts[2]


@needs_library
def test_recordings_outlive_a_call_and_their_memory_is_counted() -> None:
    engine, sampling = Engine(solo(long("llama")), slots=1), Sampling(max_tokens=11, ignore_eos=True)
    first = engine.generate(PROMPTS[:1], sampling)
    assert engine.steps.replayed == 7  # of ten steps one was plain, one recorded, one compared
    tape = engine.steps.tape(1)
    assert tape is not None and len(tape) > 10 and engine.steps.tape(2) is None
    held = engine.steps.nbytes()
    assert 0 < held < 1 << 20
    assert engine.generate(PROMPTS[:1], sampling) == first
    assert engine.steps.replayed == 17 and engine.steps.tape(1) is tape and engine.steps.nbytes() == held


@needs_library
def test_recordings_of_several_numbers_of_sequences_share_their_memory() -> None:
    """Logits are most of what a step of a small model computes in; of each number only the last step's are of use."""
    model = solo(tiny("llama", max_position_embeddings=256, vocab_size=6000))
    prepare(model)
    steps, cache, held = DecodeSteps(model), model.new_cache(5), 0
    with torch.inference_mode():
        cache.begin(step := Step.of([(slot, [7], 0) for slot in range(5)], "cpu"))
        model(step, cache)
        for n in (5, 4, 3):
            for past in range(1, 7):
                plain = DecodeSteps(model, record=False)([past] * n, [past] * n, cache).clone()
                assert torch.equal(steps([past] * n, [past] * n, cache), plain)
            assert steps.tape(n) is not None
            held = held or steps.nbytes()
    assert steps.replayed == 9 and steps.tape(5) is not None
    assert held > 1 << 17 and steps.nbytes() - held < 1 << 15  # five, four or three lines of logits take 2^17 bytes


def test_ranks_in_lockstep_are_not_recorded() -> None:
    model = long("llama")

    def work(group: Group) -> tuple[int, list[int]]:
        made = rank_model(model, ragged(model, group.size), group, "bf16", torch.bfloat16)
        engine = Engine(made)
        out = engine.generate(PROMPTS[:2], Sampling(max_tokens=9, ignore_eos=True))
        return engine.steps.replayed, out[1].token_ids

    told = LocalGroup.run(2, work)
    assert told[0] == told[1] and told[0][0] == 0


def test_float64_is_not_recorded() -> None:
    made = rank_model(long("qwen2"), ragged(long("qwen2"), 1), SoloGroup())
    told = both_ways(made, PROMPTS[:2], [Sampling(max_tokens=9)])
    assert told["replayed"] == 0 and told["different"] == 0
