"""Whole models: with the compiled operations a decode step is right, and torch computes nothing in it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hybrid import tiny as hybrids
from runtime.quantized.hybrids import distance, hybrid, solved
from runtime.quantized.hybrids import reference as hybrid_reference
from runtime.quantized.hybrids import scattered as hybrid_scattered
from runtime.tiny import CASES, on_ranks, ragged, reference, scattered, tiny
from torch.utils._python_dispatch import TorchDispatchMode

from oddrank.native import Library, library
from oddrank.runtime.loader import prepare
from oddrank.runtime.models import Llama
from oddrank.runtime.step import Step

VIEWS = {
    "alias", "as_strided", "detach", "empty", "expand", "permute", "select", "slice", "split", "split_with_sizes",
    "squeeze", "t", "transpose", "unbind", "unsqueeze", "view", "_unsafe_view",
}  # fmt: skip
SAME = {"contiguous", "to", "float"}
"""Give back what they were given, where it is that already."""
LENGTHS = (9, 1, 5)
FAMILIES = [*sorted(CASES), *hybrids.FAMILIES]


class Watch(TorchDispatchMode):
    """Lists what torch computes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.paused = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = str(func).split(".")[1]
        if not self.paused and name not in VIEWS and not (name in SAME and out.data_ptr() == args[0].data_ptr()):
            self.seen.append(str(func))
        return out


@contextmanager
def embedding_apart(model: Llama, watch: Watch) -> Iterator[None]:
    """Looking up the tokens' rows is not watched."""
    looked_up = model.embed_tokens

    class Paused:
        def __call__(self, tokens: torch.Tensor) -> Any:
            watch.paused = True
            found = looked_up(tokens)
            watch.paused = False
            return found

    model.embed_tokens = Paused()  # type: ignore[assignment]
    yield
    model.embed_tokens = looked_up


def steps(model: Llama, prompts: list[list[int]], nexts: list[list[int]], watch: Watch | None = None) -> list[Any]:
    """Each sequence's logits: of its prompt's last token, then of steps with all of them."""
    prepare(model)
    cache, n = model.new_cache(len(prompts)), len(prompts)
    step = Step.of([(i, p, 0) for i, p in enumerate(prompts)], "cpu")
    got = [model.logits(model(step, cache)[step.last])]
    for i in range(len(nexts[0])):
        step = Step.of([(s, [nexts[s][i]], len(p) + i) for s, p in enumerate(prompts)], "cpu")
        assert step.decode
        if watch is None:
            got.append(model.logits(model(step, cache)))
        else:
            model.rotary.reserve(step.longest)
            cache.begin(step)
            with embedding_apart(model, watch), watch:
                got.append(model.logits(model(step, cache)))
    return [torch.stack([g[s] for g in got]) for s in range(n)]


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dense weights by the compiled products."""
    monkeypatch.setattr("oddrank.runtime.layers.kernels.half_packing_works", lambda: False)


def sequences(vocab: int) -> tuple[list[list[int]], list[list[int]]]:
    draw = torch.Generator().manual_seed(1)
    prompts = [torch.randint(0, vocab, (n,), generator=draw).tolist() for n in LENGTHS]
    return prompts, torch.randint(0, vocab, (len(LENGTHS), 4), generator=draw).tolist()


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("alone", [True, False])
def test_torch_computes_nothing_in_a_step(family: str, alone: bool, unpacked: None, kernels: Library) -> None:
    watch = Watch()

    def work(model: Llama) -> None:
        prompts, nexts = sequences(model.config.vocab)
        steps(model, prompts[:1] if alone else prompts, nexts[:1] if alone else nexts, watch)

    if family in CASES:
        model = tiny(family)
        on_ranks(model, ragged(model, 1), work, "bf16")
    else:
        m = hybrid(family, bias=True)
        m.on_ranks(solved(m, 1), work, "bf16")
    assert watch.seen == []


@pytest.mark.parametrize("tp", [1, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_steps_are_those_of_transformers(family: str, tp: int, level: str) -> None:
    """Ragged lengths, over layouts with dummies and repeated KV heads, against float64."""
    if family in CASES:
        model = tiny(family)
        prompts, nexts = sequences(model.config["vocab_size"])
        wants = [reference(model, p + n)[-5:] for p, n in zip(prompts, nexts, strict=True)]
        plan = scattered(model, tp)
        found = on_ranks(model, plan, lambda m: steps(m, prompts, nexts), "fp32")
    else:
        m = hybrid(family)
        prompts, nexts = sequences(m.vocab)
        wants = [hybrid_reference(m, p + n)[-5:] for p, n in zip(prompts, nexts, strict=True)]
        found = m.on_ranks(hybrid_scattered(m, tp), lambda model: steps(model, prompts, nexts), "fp32")
    assert library() is not None
    for logits in found:
        for got, want in zip(logits, wants, strict=True):
            assert got.dtype == torch.float32
            assert distance(got.double(), want) < 2e-5
