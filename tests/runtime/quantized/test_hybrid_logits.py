"""The hybrid families in the runtime, against transformers in float64: any layout, prompts in chunks, cached steps,
batches, states that move, and what is reduced how often."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from runtime.quantized.hybrids import (
    FAMILIES,
    FULL,
    LINEAR,
    PLANS,
    Hybrid,
    distance,
    hybrid,
    reference,
    scattered,
    solved,
)

from oddrank.planner import make_plan
from oddrank.runtime.engine import Engine
from oddrank.runtime.generate import Session
from oddrank.runtime.layers.residual import Residual
from oddrank.runtime.models import Llama
from oddrank.runtime.models.llama import full_logits
from oddrank.runtime.request import Sampling
from oddrank.runtime.step import Step

STEPS, PROMPT = 64, 70


def stepwise(m: Llama, tokens: list[int], chunks: tuple[int, ...]) -> torch.Tensor:
    """Logits of every position: the prompt in chunks, the rest one cached step each."""
    cache = m.new_cache(1)
    rows, at = [], 0
    for count in (*chunks, *[1] * (len(tokens) - sum(chunks))):
        rows.append(m.logits(m(Step.of([(0, tokens[at : at + count], at)], "cpu"), cache)))
        at += count
    return torch.cat(rows)


@pytest.mark.parametrize(
    ("tp", "kind"),
    [
        (1, "solved"), (2, "weighted"), (2, "scattered"), *((3, kind) for kind in sorted(PLANS)), (4, "solved"),
        (4, "padded"), (5, "solved"), (5, "scattered"),
        *(pytest.param(t, k, marks=pytest.mark.long) for t, k in ((2, "solved"), (4, "weighted"), (5, "weighted"))),
    ],
)  # fmt: skip
@pytest.mark.parametrize("family", FAMILIES)
def test_prefill_and_64_cached_steps_of_transformers(family: str, tp: int, kind: str) -> None:
    """Chunks of more and of fewer tokens than a block of the delta rule and than the convolution's kernel."""
    m = hybrid(family)
    tokens = m.tokens(PROMPT + STEPS)
    want = reference(m, tokens)
    for logits in m.on_ranks(PLANS[kind](m, tp), lambda model: stepwise(model, tokens, (66, 2, 1, 1))):
        assert logits.shape == want.shape and logits.dtype == torch.float64
        assert distance(logits, want) < 1e-9


@pytest.mark.parametrize(
    "options",
    [
        {"wrapped": True}, {"tied": True, "bias": True}, {"layers": (FULL, FULL)}, {"layers": (LINEAR, LINEAR)},
        {"stacked": False, "mtp": True, "wrapped": True}, {"layers": (FULL, LINEAR, LINEAR), "head_dim": 4},
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("family", FAMILIES)
def test_every_variant_of_a_checkpoint(family: str, options: dict[str, Any]) -> None:
    """Text-only and vision-wrapped, MTP and vision tensors beside, biases, tied heads, any order of layers."""
    m = hybrid(family, seed=1, **options)
    tokens = m.tokens(9)
    want = reference(m, tokens)
    for plan in (solved(m, 2), scattered(m, 3)):
        for logits in m.on_ranks(plan, lambda model: stepwise(model, tokens, (5,))):
            assert distance(logits, want) < 1e-9


@pytest.mark.parametrize("family", FAMILIES)
def test_sizes_agree_to_the_last_digits(family: str) -> None:
    m = hybrid(family)
    tokens = m.tokens(PROMPT)
    (one,) = m.on_ranks(solved(m, 1), lambda model: full_logits(model, tokens))
    for tp in (2, 3, 5):
        for logits in m.on_ranks(solved(m, tp), lambda model: full_logits(model, tokens)):
            assert distance(logits, one) < 1e-12


@pytest.mark.parametrize("family", FAMILIES)
def test_several_prompts_in_one_prefill_then_decoded_together(family: str) -> None:
    m = hybrid(family)
    prompts = [m.tokens(n, seed=n) for n in (70, 1, 5)]
    nexts = [m.tokens(6, seed=40 + i) for i in range(3)]
    wants = [reference(m, p + n)[-7:] for p, n in zip(prompts, nexts, strict=True)]

    def work(model: Llama) -> list[torch.Tensor]:
        cache = model.new_cache(3)
        step = Step.of([(i, p, 0) for i, p in enumerate(prompts)], "cpu")
        got = [model.logits(model(step, cache)[step.last])]
        for i in range(6):
            step = Step.of([(s, [nexts[s][i]], len(p) + i) for s, p in enumerate(prompts)], "cpu")
            got.append(model.logits(model(step, cache)))
        return [torch.stack([g[s] for g in got]) for s in range(3)]

    for tp in (1, 3):
        for got, want in zip(m.on_ranks(scattered(m, tp), work)[0], wants, strict=True):
            assert distance(got, want) < 1e-9


def is_greedy(m: Hybrid, prompt: list[int], out: list[int]) -> bool:
    """Is every token of `out` transformers' likeliest after those before it?"""
    logits = reference(m, prompt + out)
    return [int(t) for t in logits[len(prompt) - 1 : -1].argmax(-1)] == out


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tp", [1, 3])
def test_states_go_with_their_sequence(family: str, tp: int) -> None:
    """Seven prompts through three slots in chunks of four: sequences wait, begin where others ended, and move between
    slots. Each gets what transformers gives it alone."""
    m = hybrid(family)
    prompts = [m.tokens(n, seed=n) for n in (5, 1, 9, 2, 3, 1, 7)]

    def work(model: Llama) -> Any:
        engine = Engine(model, eos=[0, 1, 2, 3, 4, 5], slots=3, chunk=4)
        return engine.generate(prompts, Sampling(max_tokens=7))

    for completions in m.on_ranks(solved(m, tp), work):
        assert {c.finish for c in completions} == {"stop", "length"}  # they do end at different times
        for prompt, completion in zip(prompts, completions, strict=True):
            assert is_greedy(m, prompt, completion.token_ids)


@pytest.mark.parametrize("fault", ["memory", "inputs", "not moved", "not cleared"])
def test_a_state_in_the_wrong_place_changes_the_logits(fault: str) -> None:
    """What the comparisons above compare does depend on the states."""
    m = hybrid("qwen3_5")
    tokens = m.tokens(12)
    want = reference(m, tokens)

    def work(model: Llama) -> torch.Tensor:
        cache = model.new_cache(2)
        assert cache.states is not None
        model(Step.of([(1, tokens[:3], 0)], "cpu"), cache)  # slot 1's past life
        model(Step.of([(0, tokens[:11], 0)], "cpu"), cache)
        slot, past = 0, 11
        if fault in ("memory", "inputs"):
            getattr(cache.states, fault)[1, 0, -1] *= 1.01
        elif fault == "not moved":
            states, cache.states = cache.states, None
            cache.move(0, 1, 11)
            cache.states, slot = states, 1
        else:
            cache.states.clear = lambda slots: None  # type: ignore[method-assign]
            model(Step.of([(1, tokens[:11], 0)], "cpu"), cache)
            slot = 1
        return model.logits(model(Step.of([(slot, tokens[past:], past)], "cpu"), cache))

    assert distance(m.on_ranks(solved(m, 1), work)[0], want[-1:]) > 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_the_cache_holds_keys_of_attention_layers_and_states_of_the_others(family: str) -> None:
    """Per rank: its KV heads of two layers, its value heads' fp32 memory and its channels' inputs of two."""
    m = hybrid(family)
    plan = solved(m, 3)

    def work(model: Llama) -> tuple[Any, ...]:
        cache = model.new_cache(4)
        cache.reserve(10)
        assert cache.states is not None
        states = cache.states
        return tuple(cache.layer(0).shape), cache.layers, states.inputs.shape, states.memory.shape, states.memory.dtype

    for dtype, held in (("fp64", torch.float64), ("bf16", torch.float32)):
        for rank, (kv, layers, inputs, memory, kind) in enumerate(m.on_ranks(plan, work, dtype)):
            counts = plan.counts(rank)
            assert layers == 2 and kv[:2] == (4, 2 * counts["kv_heads"]) and kv[-1] == 8 and kind == held
            assert memory == (2, 4, counts["gdn_v_heads"], 4, 6)
            assert inputs == (2, 4, 3, 2 * 4 * counts["gdn_k_heads"] + 6 * counts["gdn_v_heads"])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("tp", [1, 3])
def test_two_reduces_a_layer_whatever_is_in_it(family: str, tp: int) -> None:
    """One for what mixes tokens, one for what follows, experts and shared expert together; one for the embedding; one
    gather for the logits. In prefill and in a decode step."""
    m = hybrid(family)

    def work(model: Llama) -> list[tuple[int, int, int]]:
        cache, found = model.new_cache(1), []
        for tokens, past in (([1, 2, 3], 0), ([4], 3)):
            counts = model.group.counts
            before = np.array([counts.all_reduce, counts.all_gather, counts.total])
            per_layer = []
            for layer in model.layers:
                layer_before = counts.total
                h = Residual(torch.zeros(len(tokens), model.config.hidden, dtype=torch.float64))
                step = Step.of([(0, tokens, past)], "cpu")
                cache.begin(step)
                layer(h, model.rotary(step.positions, step.sequences), step, cache)
                per_layer.append(counts.total - layer_before)
            assert per_layer == [2] * 4
            before = np.array([counts.all_reduce, counts.all_gather, counts.total])
            model.logits(model(Step.of([(0, tokens, past)], "cpu"), cache))
            found.append(tuple(np.array([counts.all_reduce, counts.all_gather, counts.total]) - before))
        return found

    for counts in m.on_ranks(scattered(m, tp) if tp > 1 else solved(m, 1), work):
        assert counts == [(9, 1, 10)] * 2


@pytest.mark.parametrize(
    ("family", "tp"),
    [
        ("qwen3_5", 2), ("qwen3_5_moe", 3),
        pytest.param("qwen3_5", 3, marks=pytest.mark.long), pytest.param("qwen3_5_moe", 2, marks=pytest.mark.long),
    ],
)  # fmt: skip
def test_rank_processes(family: str, tp: int, tmp_path: Path) -> None:
    m = hybrid(family, mtp=True, stacked=False)
    path = m.save(tmp_path / "m")
    tokens, prompt = m.tokens(PROMPT), m.tokens(5)
    with Session(path, make_plan(path, tp).plan, dtype="fp64", threads=1) as session:
        logits = session.logits(tokens)
        completions, _ = session.generate([prompt, tokens], Sampling(max_tokens=STEPS, ignore_eos=True))
        assert all(loaded.skipped == {"MTP": sum(n.startswith("mtp.") for n in m.weights)} for loaded in session.wait())
    assert distance(logits, reference(m, tokens)) < 1e-9
    for start, completion in zip((prompt, tokens), completions, strict=True):
        assert len(completion.token_ids) == STEPS and is_greedy(m, start, completion.token_ids)
