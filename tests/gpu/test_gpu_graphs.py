"""Captured decode steps without a GPU: a stand-in captures work and replays it by doing it again.

What a graph must not contain is looked for operation by operation: whatever asks the host for a number.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from runtime.quantized.hybrids import hybrid, solved
from runtime.tiny import CASES, TOKENS, Tiny, ragged, rank_model, tiny
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from oddrank.gpu.graphs import GraphSteps, StaticStep, room_for, size_for
from oddrank.runtime.cache import KVCache
from oddrank.runtime.experts import Experts
from oddrank.runtime.models.llama import Llama
from oddrank.runtime.parallel import SoloGroup
from oddrank.runtime.step import Step

_aten = torch.ops.aten
ASKING = {
    _aten._local_scalar_dense.default, _aten.nonzero.default, _aten.masked_select.default, _aten.equal.default,
    _aten._unique2.default, _aten.unique_consecutive.default, _aten.bincount.default, _aten.lift_fresh.default,
}  # fmt: skip


class NoQuestions(TorchDispatchMode):
    """Fails at an operation whose result the host must wait for, or that takes numbers from it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in ASKING, f"{func} cannot be captured"
        return func(*args, **(kwargs or {}))


class StandIn:
    """Captures work as CUDA does: nothing is computed until it is replayed, and results stay where they are."""

    def __init__(self) -> None:
        self.captured = 0

    def __call__(self, work: Callable[[], Tensor]) -> Replayed:
        self.captured += 1
        return Replayed(work)


class Replayed:
    def __init__(self, work: Callable[[], Tensor]) -> None:
        self.work = work

    def replay(self) -> Tensor:
        with NoQuestions():
            return self.work()


@contextmanager
def model_of(family: str) -> Iterator[tuple[Tiny, Llama]]:
    made = tiny(family)
    with torch.inference_mode():
        model = rank_model(made, ragged(made, 1), SoloGroup())
        for module in model.modules():  # a shortcut of the CPU's
            if hasattr(module, "_on_host"):
                module._on_host = False
        yield made, model


def prefilled(model: Llama, prompts: list[list[int]], slots: int) -> KVCache:
    cache = model.new_cache(slots)
    model(Step.of([(slot, prompt, 0) for slot, prompt in enumerate(prompts)], "cpu"), cache)
    return cache


def eager(model: Llama, tokens: list[int], past: list[int], cache: KVCache) -> Tensor:
    sequences = [(i, [t], p) for i, (t, p) in enumerate(zip(tokens, past, strict=True))]
    return model.logits(model(Step.of(sequences, "cpu"), cache))


@pytest.mark.parametrize("family", sorted(CASES))
def test_replayed_steps_are_the_model_s(family: str) -> None:
    """Windows, biases, grouped queries; batches that are not a graph's size, and one that has a slot of its own."""
    with model_of(family) as (_, model):
        prompts = [TOKENS[:4], TOKENS[:7], TOKENS[2:5], TOKENS]
        stand_in = StandIn()
        steps = GraphSteps(model, capture=stand_in)
        for n in (3, 1, 2, 4):
            ours, theirs = (prefilled(model, prompts[:n], 5) for _ in range(2))
            past = [len(p) for p in prompts[:n]]
            for turn in range(3):
                tokens = [(7 * turn + i) % 53 for i in range(n)]
                got = steps(tokens, past, ours)
                want = eager(model, tokens, past, theirs)
                assert got.shape == want.shape and torch.allclose(got, want, rtol=1e-11, atol=1e-11)
                past = [p + 1 for p in past]
        assert stand_in.captured == 4 and steps.replayed == 8  # another cache, another graph


def without_the_host(layer: Experts) -> None:
    """Has the sum computed over all experts, as no batch's choice is known to the host."""
    backend: Any = layer.backend
    banks, kernel = backend._layer.banks, backend._layer.kernel

    def whole(x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        out = torch.zeros_like(x)
        for e in range(banks.gate_up.layout.experts):
            up, down = banks.expert(e)
            gate_up = kernel.gate_up.dequantize(up, x.dtype).reshape(-1, x.shape[-1])
            gate, top = (x @ gate_up.t()).chunk(2, -1)
            term = (kernel.activation(gate) * top) @ kernel.down.dequantize(down, x.dtype)[0].t()
            out += term * (weights * (ids == e)).sum(-1, keepdim=True)
        return out

    backend.whole = whole


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_states_go_on_by_one_token_a_step(family: str) -> None:
    """Capturing a step must not advance the states of gated delta nets, nor idle slots those of active ones."""
    made = hybrid(family)
    prompts = [made.tokens(5), made.tokens(3, seed=1), made.tokens(9, seed=2)]

    def work(model: Llama) -> int:
        for module in model.modules():
            if isinstance(module, Experts):
                without_the_host(module)
            if hasattr(module, "_on_host"):
                module._on_host = False
        steps = GraphSteps(model, capture=StandIn())
        ours, theirs = (prefilled(model, prompts, 4) for _ in range(2))
        for turn in range(4):
            past = [len(p) + turn for p in prompts]
            tokens = [(11 * turn + i) % made.vocab for i in range(3)]
            got, want = steps(tokens, past, ours), eager(model, tokens, past, theirs)
            assert torch.allclose(got, want, rtol=1e-10, atol=1e-10)
        return steps.replayed

    assert made.on_ranks(solved(made, 1), work) == [3]


def test_sizes_share_a_graph_and_growing_drops_them() -> None:
    with model_of("llama") as (_, model):
        stand_in = StandIn()
        steps = GraphSteps(model, capture=stand_in)
        cache = prefilled(model, [TOKENS] * 4, 6)
        for n in (3, 4, 3, 4):
            steps(TOKENS[:n], [len(TOKENS)] * n, cache)
        assert stand_in.captured == 1 and steps.replayed == 3
        cache.reserve(cache.capacity + 1)
        steps(TOKENS[:3], [len(TOKENS)] * 3, cache)
        assert stand_in.captured == 2
        steps.forget()
        steps(TOKENS[:3], [len(TOKENS)] * 3, cache)
        assert stand_in.captured == 3


def test_sizes_and_rooms() -> None:
    assert [size_for(n, 100) for n in (1, 2, 3, 4, 5, 9)] == [1, 2, 4, 4, 8, 16]
    assert size_for(5, 6) == 6
    assert room_for(1, 0) == 256 and room_for(257, 256) == 512 and room_for(300, 512) == 512
    assert room_for(300, 4096) == 512
    for longest in range(1, 40_000, 97):
        assert longest <= room_for(longest, 0) <= max(1.25 * longest, longest + 256)
    assert len({room_for(longest, 0) for longest in range(1, 32_769)}) < 64


@pytest.mark.parametrize("window", [None, 3])
def test_masks_follow_positions(window: int | None) -> None:
    positions = torch.tensor([0, 5, 9])
    step = StaticStep(torch.zeros(3, dtype=torch.int64), positions, 12)
    mask = step.decode_mask(window, torch.float32)
    for row, now in zip(mask[:, 0, 0], positions.tolist(), strict=True):
        seen = [k for k in range(12) if k <= now and (window is None or k > now - window)]
        assert [k for k in range(12) if row[k] == 0] == seen
        assert all(row[k] == -float("inf") for k in range(12) if k not in seen)


def test_what_cannot_be_captured_runs_as_always(caplog: pytest.LogCaptureFixture) -> None:
    def refuses(work: Callable[[], Tensor]) -> Replayed:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    with model_of("qwen3") as (_, model), caplog.at_level(logging.WARNING, "oddrank.gpu.graphs"):
        steps = GraphSteps(model, capture=refuses)
        cache, theirs = (prefilled(model, [TOKENS], 1) for _ in range(2))
        for turn in range(3):
            past = [len(TOKENS) + turn]
            assert torch.allclose(steps([5], past, cache), eager(model, [5], past, theirs), rtol=1e-11, atol=1e-11)
        assert not steps.recording and steps.replayed == 0
    assert [r.getMessage() for r in caplog.records] == [
        "decode steps are not captured in CUDA graphs, each is launched by the host, more slowly: operation not "
        "permitted when stream is capturing"
    ]


def test_angles_of_their_own_are_not_captured() -> None:
    """Dynamic scaling beyond the trained context makes frequencies on the host, by length."""
    rope = {"rope_type": "dynamic", "rope_theta": 100.0, "factor": 4.0}
    made = tiny("mistral", rope_parameters=rope)
    with torch.inference_mode():
        model = rank_model(made, ragged(made, 1), SoloGroup())
        stand_in = StandIn()
        steps = GraphSteps(model, capture=stand_in)
        prompt = [i % 53 for i in range(70)]
        cache, theirs = (prefilled(model, [prompt], 2) for _ in range(2))
        assert torch.allclose(steps([1], [70], cache), eager(model, [1], [70], theirs))
    assert stand_in.captured == 0
