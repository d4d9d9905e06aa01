"""Requests of all kinds at once on tiny models, against transformers' float64 logits of each alone."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from runtime.quantized.hybrids import Hybrid, hybrid, solved
from runtime.quantized.hybrids import reference as hybrid_reference
from runtime.tiny import Tiny, on_ranks, ragged, reference, tiny

from oddrank.runtime.models.llama import Llama
from oddrank.runtime.request import Sampling
from oddrank.runtime.serving.executor import make_executor
from oddrank.runtime.serving.messages import Cancel, Chosen, Scored, Stop, Submit, Update
from oddrank.runtime.serving.options import ServingOptions
from oddrank.runtime.serving.worker import Leader, ServeJob, follow

Logits = Callable[[Sequence[int]], torch.Tensor]


class Script:
    """A server's line that says its messages a few at a time: `pace` after each update."""

    def __init__(self, messages: list[Any], pace: int) -> None:
        self.messages, self.pace, self.now = list(messages), pace, pace
        self.updates: list[Update] = []
        self.replies: dict[int, list[Any]] = {}

    def waiting(self) -> bool:
        return bool(self.messages) and self.now > 0

    def receive(self) -> Any:
        self.now = max(0, self.now - 1)
        return self.messages.pop(0) if self.messages else Stop()

    def send(self, update: Update) -> None:
        self.updates.append(update)
        for event in (*update.failed, *update.scored, *update.chosen):
            self.replies.setdefault(event.id, []).append(event)
        self.now = self.pace


def serve(model: Llama, messages: list[Any], options: ServingOptions, eos: tuple[int, ...], pace: int) -> Any:
    """What the first rank told, and its leader afterwards; None on the others."""
    executor, _ = make_executor(model, options, 1 << 30)
    if model.group.rank:
        follow(executor)
        return None
    script = Script(messages, pace)
    job = ServeJob("", b"", "fp64", eos, None, options)  # type: ignore[arg-type]
    leader = Leader(executor, script, job)  # type: ignore[arg-type]
    leader.run()
    return script, leader


def requests(seed: int, vocab: int, longest: int, count: int = 14) -> list[Submit]:
    """Prompts that share beginnings; some want logprobs, their prompt's too, or nothing generated."""
    draw = random.Random(seed)
    stems = [[draw.randrange(vocab) for _ in range(longest // 2)] for _ in range(2)]
    made = []
    for number in range(1, count + 1):
        stem = draw.choice(stems)
        prompt = stem[: draw.randint(0, len(stem))] + [draw.randrange(vocab) for _ in range(draw.randint(1, 4))]
        echo = draw.random() < 0.3
        tokens = 0 if echo and draw.random() < 0.5 else draw.randint(1, longest - len(prompt) - 1)
        sampling = Sampling(max_tokens=tokens, ignore_eos=draw.random() < 0.5)
        made.append(Submit(number, prompt, sampling, draw.choice([None, 0, 3]), 2 if echo else None))
    return made


def check(script: Script, asked: list[Submit], logits: Logits, eos: tuple[int, ...], tolerance: float) -> None:
    for submit in asked:
        replies = script.replies[submit.id]
        chosen = [r for r in replies if isinstance(r, Chosen)]
        scored = [r for r in replies if isinstance(r, Scored)]
        whole = [*submit.tokens, *(c.token for c in chosen)]
        lines = torch.log_softmax(logits(whole).double(), -1)
        for at, c in enumerate(chosen, len(submit.tokens)):
            line = lines[at - 1]
            assert line.max() - line[c.token] <= tolerance, "not the likeliest token"
            if submit.top is None:
                assert c.logprob is None and c.top == []
            else:
                assert c.logprob == pytest.approx(float(line[c.token]), abs=tolerance) and len(c.top) == submit.top
                for token, logprob in c.top:
                    assert logprob == pytest.approx(float(line[token]), abs=tolerance)
        ends = [c.token in eos and not submit.sampling.ignore_eos for c in chosen]
        assert not any(ends[:-1])
        if submit.sampling.max_tokens:
            assert len(chosen) == submit.sampling.max_tokens or ends[-1]
            assert [c.finish for c in chosen] == [""] * (len(chosen) - 1) + ["stop" if ends[-1] else "length"]
        if submit.prompt_top is not None:
            told = [p for s in scored for p in s.logprobs]
            assert len(told) == len(submit.tokens) - 1
            for at, logprob in enumerate(told, 1):
                assert logprob == pytest.approx(float(lines[at - 1, submit.tokens[at]]), abs=tolerance)
            assert scored[-1].finish == ("" if submit.sampling.max_tokens else "length")


def everything_is_given_back(leader: Leader) -> None:
    assert leader.pages.held == 0 and leader.scheduler.running == 0 and not leader._asked
    assert not leader.scheduler.waiting


OPTIONS = {
    "roomy": ServingOptions(running=6, chunk=16, page=4, length=40),
    "no reuse": ServingOptions(running=6, chunk=7, page=4, length=40, reuse=False),
    "tight": ServingOptions(running=4, chunk=8, page=4, length=40, kv_bytes=1),  # pages set below
}


def tight(model: Llama, options: ServingOptions) -> ServingOptions:
    """So few pages that requests must give way."""
    one = model.new_cache(1)
    token = one.layers * 2 * one.kv_heads * one.head_dim * one.dtype.itemsize
    return ServingOptions(**{f: getattr(options, f) for f in options.__struct_fields__} | {"kv_bytes": 48 * token})


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("kind", sorted(OPTIONS))
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen3"])
def test_dense_models(family: str, kind: str, tp: int) -> None:
    model = tiny(family)
    asked, eos = requests(len(family) + tp, 53, 40), (7, 11)

    def work(m: Llama) -> Any:
        options = tight(m, OPTIONS[kind]) if kind == "tight" else OPTIONS[kind]
        return serve(m, list(asked), options, eos, pace=2)

    script, leader = on_ranks(model, ragged(model, tp), work)[0]
    check(script, asked, lambda tokens: reference(model, tokens), eos, 1e-9)
    everything_is_given_back(leader)
    if kind == "tight" and family == "llama":
        assert leader.scheduler.preempted > 0
    reused = script.updates[-1].stats.reused
    assert (reused == 0) == (kind == "no reuse")


@pytest.mark.parametrize(("tp", "dtype"), [(1, "fp64"), (2, "fp64"), (1, "fp32")])
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
def test_hybrid_models(family: str, tp: int, dtype: str) -> None:
    """States go on from snapshots: at the ends of prompts, and of every eight tokens."""
    made: Hybrid = hybrid(family)
    asked, eos = requests(6 + tp, made.vocab, 40), (made.vocab - 1,)
    options = ServingOptions(running=5, chunk=16, page=4, length=40, snapshots=9, snapshot_every=8)
    script, leader = made.on_ranks(solved(made, tp), lambda m: serve(m, list(asked), options, eos, 2), dtype)[0]
    check(script, asked, lambda t: torch.from_numpy(hybrid_reference(made, t)), eos, 1e-8 if dtype == "fp64" else 1e-3)
    everything_is_given_back(leader)
    assert script.updates[-1].stats.reused > 0


def test_cancelled_requests_leave_nothing_behind() -> None:
    model: Tiny = tiny("llama")
    asked = requests(9, 53, 40, 20)
    cancelled = {2, 5, 6, 11, 17}
    messages: list[Any] = []
    for submit in asked:
        messages.append(submit)
        if submit.id - 1 in cancelled:
            messages.append(Cancel(submit.id - 1))
    options = ServingOptions(running=3, chunk=8, page=4, length=40)
    script, leader = on_ranks(model, ragged(model, 1), lambda m: serve(m, messages, options, (), 1))[0]
    everything_is_given_back(leader)
    kept = [s for s in asked if s.id not in cancelled]
    check(script, kept, lambda tokens: reference(model, tokens), (), 1e-9)


def test_what_is_told_when_the_last_request_is_cancelled() -> None:
    """Nothing runs then that would tell it later."""
    model: Tiny = tiny("llama")
    messages = [Submit(1, [3, 4, 5, 6, 7], Sampling(max_tokens=30, ignore_eos=True)), Cancel(1)]
    options = ServingOptions(running=3, chunk=8, page=4, length=40)
    script, _ = on_ranks(model, ragged(model, 1), lambda m: serve(m, messages, options, (), 1))[0]
    first, last = script.updates[0].stats, script.updates[-1].stats
    assert (first.running, first.slots_held, first.pages_held, first.tokens) == (1, 1, 2, 5)
    assert (last.running, last.slots_held, last.pages_held, last.tokens, last.waiting) == (0, 0, 0, 0, 0)
    assert last.pages_remembered == 1


@pytest.mark.parametrize(("tokens", "chunk"), [(0, 1), (12, 1), (12, 8)])
def test_a_prompts_logprobs_are_told_once(tokens: int, chunk: int) -> None:
    """Though its request gives way, in the middle of its prompt or after, and starts again."""
    model: Tiny = tiny("llama")
    asked = [Submit(n, [3, 4, n], Sampling(max_tokens=26, ignore_eos=True)) for n in (1, 2)]
    asked.append(Submit(3, [(7 * n) % 53 for n in range(18)], Sampling(max_tokens=tokens, ignore_eos=True), 2, 2))

    def work(m: Llama) -> Any:
        return serve(m, asked, tight(m, ServingOptions(running=3, chunk=chunk, page=4, length=40)), (), 3)

    script, leader = on_ranks(model, ragged(model, 1), work)[0]
    assert leader.scheduler.preempted > 0
    check(script, asked, lambda t: reference(model, t), (), 1e-9)


def test_a_request_that_cannot_be_does_not_disturb_others() -> None:
    model: Tiny = tiny("llama")
    good = Submit(1, [3, 4], Sampling(max_tokens=5))
    bad = Submit(2, [3, 4], Sampling(max_tokens=500))
    options = ServingOptions(running=3, chunk=8, page=4, length=40)
    script, leader = on_ranks(model, ragged(model, 1), lambda m: serve(m, [good, bad], options, (), 2))[0]
    assert "500 more" in script.replies[2][0].message and len(script.replies[1]) == 5
    everything_is_given_back(leader)


def test_sampling_depends_on_the_seed_alone() -> None:
    """A request gets the same tokens alone and among others."""
    model: Tiny = tiny("qwen3")
    one = Submit(1, [3, 4, 5], Sampling(max_tokens=20, temperature=1.5, top_p=0.9, top_k=20, seed=5))
    options = ServingOptions(running=6, chunk=8, page=4, length=40)

    def tokens(messages: list[Any], tp: int) -> list[int]:
        script, _ = on_ranks(model, ragged(model, tp), lambda m: serve(m, messages, options, (), 2))[0]
        return [c.token for c in script.replies[1]]

    others = [Submit(n, [n], Sampling(max_tokens=9, temperature=1, seed=n)) for n in range(2, 8)]
    alone = tokens([one], 1)
    assert len(set(alone)) > 3 and tokens([*others, one], 1) == alone == tokens([one, *others], 2)
