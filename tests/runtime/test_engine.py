"""Generation: greedy text of transformers, batches that do not mix, stopping, sampling."""

from functools import cache
from typing import Any

import pytest
import torch
from runtime.tiny import CASES, VOCAB, Tiny, on_ranks, ragged, scattered, tiny

from oddrank.errors import OddrankError
from oddrank.runtime.engine import Engine
from oddrank.runtime.models.llama import Llama
from oddrank.runtime.request import Completion, Sampling
from oddrank.runtime.sampling import Sampler

PROMPTS = [[3, 17, 52, 0, 17], [41], [8, 29, 11, 4, 4, 4, 9, 30, 2], [1, 2], [50, 49, 48]]
made = cache(tiny)


@torch.no_grad()
def greedy(model: Tiny, prompt: list[int], count: int) -> list[int]:
    """Without a cache, from transformers' float64 logits."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model.hf(torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tokens[len(prompt) :]


def run(model: Tiny, tp: int, sampling: Sampling, layout: Any = ragged, **options: Any) -> list[list[Completion]]:
    """Every rank's completions of PROMPTS."""
    return on_ranks(model, layout(model, tp), lambda m: Engine(m, **options).generate(PROMPTS, sampling))


@pytest.mark.parametrize("family", sorted(CASES))
def test_greedy_tokens_of_transformers(family: str) -> None:
    """Five prompts through two slots, in chunks of four: sequences wait, start, end and move between slots."""
    model = made(family)
    wanted = [greedy(model, p, 8) for p in PROMPTS]
    for tp, layout in ((1, ragged), (3, ragged), (2, scattered)):
        for slots, chunk in ((2, 4), (16, 1024))[: 2 if tp == 1 else 1]:
            for completions in run(model, tp, Sampling(max_tokens=8), layout, slots=slots, chunk=chunk):
                assert [c.token_ids for c in completions] == wanted
                assert all(c.finish == "length" for c in completions)
                assert [c.prompt_tokens for c in completions] == [len(p) for p in PROMPTS]


def test_a_sequence_ends_at_an_end_token() -> None:
    model = made("llama")
    free = run(model, 1, Sampling(max_tokens=12))[0]
    stop = free[2].token_ids[4]
    for sampling, options in (
        (Sampling(max_tokens=12), {"eos": [stop]}),
        (Sampling(max_tokens=12, stop=(stop,)), {}),
        (Sampling(max_tokens=12, stop=(stop,), ignore_eos=True), {"eos": [free[2].token_ids[0]]}),
    ):
        for slots in (1, 3, 5):
            for before, after in zip(free, run(model, 1, sampling, slots=slots, **options)[0], strict=True):
                if stop in before.token_ids:
                    end = before.token_ids.index(stop) + 1
                    assert (after.token_ids, after.finish) == (before.token_ids[:end], "stop")
                else:
                    assert after == before
    ignored = run(model, 1, Sampling(max_tokens=12, ignore_eos=True), eos=[stop])[0]
    assert ignored == free


def test_tokens_are_told_as_they_come_and_timed() -> None:
    model, told = made("qwen2"), []

    def work(m: Llama) -> Engine:
        engine = Engine(m, slots=2)
        told.append(engine.generate(PROMPTS, Sampling(max_tokens=3), lambda i, t: told.append((i, t))))
        return engine

    (engine,) = on_ranks(model, ragged(model, 1), work)
    completions = told.pop()
    for index, completion in enumerate(completions):
        assert [t for i, t in told if i == index] == completion.token_ids
    times = engine.timings
    assert times.prompt_tokens == sum(map(len, PROMPTS))
    # the first token of each comes from its prefill
    assert times.decoded_tokens == sum(len(c.token_ids) - 1 for c in completions) == 10
    assert times.decode_seconds > 0 and times.prefill_seconds > 0
    assert times.tokens_per_second == pytest.approx(10 / times.decode_seconds)


def test_the_models_positions_are_the_limit() -> None:
    model = made("llama")  # of 64 positions
    (completions,) = on_ranks(
        model, ragged(model, 1), lambda m: Engine(m).generate([[1] * 60, [1]], Sampling(max_tokens=8))
    )
    assert [(len(c.token_ids), c.finish) for c in completions] == [(4, "length"), (8, "length")]


@pytest.mark.parametrize(
    "prompts,sampling,words",
    [
        ([[1], []], Sampling(), "Prompt 2 of 2 has no tokens"),
        ([[1] * 64], Sampling(), "64 tokens.*64 positions"),
        ([[1, VOCAB]], Sampling(), f"token {VOCAB}.*0 to {VOCAB - 1}"),
        ([[1]], Sampling(max_tokens=0), "max_tokens is 0"),
        ([[1]], Sampling(temperature=-1), "temperature is -1"),
        ([[1]], Sampling(top_p=0), "top_p is 0"),
        ([[1]], Sampling(top_k=-1), "top_k is -1"),
    ],
)
def test_requests_that_make_no_sense(prompts: list[list[int]], sampling: Sampling, words: str) -> None:
    model = made("llama")
    with pytest.raises(OddrankError, match=words):
        on_ranks(model, ragged(model, 1), lambda m: Engine(m).generate(prompts, sampling))


def test_no_prompts_no_completions() -> None:
    model = made("llama")
    assert on_ranks(model, ragged(model, 1), lambda m: Engine(m).generate([], Sampling())) == [[]]


# -- sampling ----------------------------------------------------------------------------------------------


def test_sampled_tokens_are_the_same_on_all_ranks_and_in_any_batch() -> None:
    model = made("qwen3")
    sampling = Sampling(max_tokens=10, temperature=1.5, top_k=20, top_p=0.9, seed=7)
    one = run(model, 1, sampling)[0]
    assert one == run(model, 1, sampling, slots=1)[0]
    for completions in run(model, 3, sampling, slots=2):
        assert completions == one
    assert run(model, 1, Sampling(max_tokens=10, temperature=1.5, seed=8))[0] != one
    # without a seed, still the same on all ranks
    first, second, third = run(model, 3, Sampling(max_tokens=10, temperature=1.5))
    assert first == second == third
    assert run(model, 3, Sampling(max_tokens=10, temperature=1.5))[0] != first


def draws(sampling: Sampling, logits: torch.Tensor, count: int = 2000) -> torch.Tensor:
    """How often each token is chosen."""
    sampler = Sampler(sampling, 3)
    return torch.bincount(torch.tensor([sampler(logits) for _ in range(count)]), minlength=len(logits)) / count


def test_tokens_are_drawn_with_their_probabilities() -> None:
    chances = torch.tensor([0.1, 0.4, 0.0, 0.2, 0.3])
    logits = chances.log()
    assert torch.allclose(draws(Sampling(temperature=1), logits), chances, atol=0.03)
    half = chances.sqrt() / chances.sqrt().sum()
    assert torch.allclose(draws(Sampling(temperature=2), logits), half, atol=0.03)
    two = torch.tensor([0, 4 / 7, 0, 0, 3 / 7])
    assert torch.allclose(draws(Sampling(temperature=1, top_k=2), logits), two, atol=0.03)
    # 0.4 alone does not reach 0.5; 0.4 + 0.3 does
    assert torch.allclose(draws(Sampling(temperature=1, top_p=0.5), logits), two, atol=0.03)
    three = torch.tensor([0, 4, 0, 2, 3]) / 9
    assert torch.allclose(draws(Sampling(temperature=1, top_p=0.71), logits), three, atol=0.03)
    # top_p counts what top_k left: 4/7 > 0.5
    assert draws(Sampling(temperature=1, top_k=2, top_p=0.5), logits)[1] == 1
    assert draws(Sampling(temperature=1, top_p=1e-9), logits)[1] == 1
    assert draws(Sampling(), logits)[1] == 1


def test_min_p_and_biases() -> None:
    logits = torch.tensor([0.1, 0.4, 0.0, 0.2, 0.3]).log()
    two = torch.tensor([0, 4 / 7, 0, 0, 3 / 7])
    assert torch.allclose(draws(Sampling(temperature=1, min_p=0.6), logits), two, atol=0.03)
    assert torch.allclose(draws(Sampling(temperature=1, min_p=0.6, top_k=3), logits), two, atol=0.03)
    without = torch.tensor([1, 0, 0, 2, 3]) / 6
    assert torch.allclose(draws(Sampling(temperature=1, logit_bias=((1, -100.0),)), logits), without, atol=0.03)
    assert Sampler(Sampling(logit_bias=((2, 1e4), (0, 5.0))), 0)(logits) == 0  # -inf stays


def test_a_large_vocabulary_is_cut_where_a_small_one_would_be() -> None:
    """Half of 5,000 tokens that are nearly as likely: more than are looked at first."""
    logits = -torch.arange(5000) * 1e-6
    found = draws(Sampling(temperature=1, top_p=0.5), logits[torch.arange(4999, -1, -1)], 4000)
    likely = found.flip(0)
    assert likely[2500:].sum() == 0 and (likely[:2500] > 0).float().mean() > 0.7
    few = torch.cat([torch.tensor([9.0, 8.0]), torch.zeros(4998)])
    assert draws(Sampling(temperature=1, top_p=0.5), few)[:2].sum() == 1


def test_equal_logits_give_the_lowest_token_greedily() -> None:
    assert Sampler(Sampling(), 0)(torch.tensor([1.0, 3.0, 3.0])) == 1


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_are_told(wrong: float, temperature: float) -> None:
    """A NaN scale would otherwise be the text "!!!!!"; tokens that cannot be chosen may be -inf."""
    sampler = Sampler(Sampling(temperature=temperature), 0)
    assert sampler(torch.tensor([float("-inf"), 1.0, float("-inf")])) == 1
    for logits in ([1.0, wrong, 2.0], [float("-inf")] * 3):
        with pytest.raises(OddrankError, match=r"largest logit is (nan|inf|-inf), so there is no token to choose"):
            sampler(torch.tensor(logits))


@pytest.mark.parametrize("option", ["slots", "chunk"])
@pytest.mark.parametrize("value", [0, -1])
def test_an_engine_has_room_for_something(option: str, value: int) -> None:
    options: dict[str, Any] = {option: value}

    def start(model: Llama) -> Engine:
        return Engine(model, **options)

    with pytest.raises(OddrankError, match=f"{option} is {value} and must be at least 1"):
        on_ranks(tiny("llama"), ragged(tiny("llama"), 1), start)


def test_the_planner_knows_which_families_the_runtime_has() -> None:
    """`plan` and `generate` say so before torch is imported or a rank is started."""
    from oddrank.layout.executors import RUNTIME
    from oddrank.runtime.models import MODELS

    assert set(RUNTIME.families) == set(MODELS)
