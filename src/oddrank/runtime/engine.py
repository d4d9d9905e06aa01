"""Prompts in, tokens out: prefill, batched decode, sampling. The same code on every rank."""

import os
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from oddrank.errors import OddrankError
from oddrank.runtime.cache import KVCache
from oddrank.runtime.loader import prepare
from oddrank.runtime.models.llama import Llama
from oddrank.runtime.recorded import DecodeSteps
from oddrank.runtime.request import Completion, Sampling, Timings
from oddrank.runtime.sampling import Sampler, choose
from oddrank.runtime.step import Step
from oddrank.runtime.threads import THREADED_CACHE, torch_threads

if TYPE_CHECKING:
    from oddrank.gpu.graphs import GraphSteps

RECORD = "ODDRANK_RECORD"
"""Environment variable: "0" for no recorded decode steps."""

OnToken = Callable[[int, int], object]
"""Called with (index of the prompt, token) as soon as a token is chosen."""


class _Sequence:
    def __init__(self, index: int, prompt: list[int], sampler: Sampler, room: int) -> None:
        self.index, self.prompt, self.sampler = index, prompt, sampler
        self.room = room  # tokens it may still generate
        self.cached = 0  # tokens the cache holds
        self.out: list[int] = []
        self.finish = ""


def _steps(model: Llama, record: bool) -> "DecodeSteps | GraphSteps":
    if model.group.device.type != "cuda":
        return DecodeSteps(model, record)
    from oddrank.gpu.graphs import GraphSteps

    return GraphSteps(model, record)


class Engine:
    """Runs one rank of a model. Ranks of a group call `generate` with the same arguments at the same time.

    eos: tokens that end a sequence. slots: sequences decoded together at most. chunk: prompt tokens that one
    prefill step takes at most. record: whether decode steps are recorded and replayed where they can be (recorded.py;
    gpu/graphs.py);
    ODDRANK_RECORD=0 in the environment says no for all.
    """

    def __init__(
        self, model: Llama, eos: Sequence[int] = (), *, slots: int = 16, chunk: int = 1024, record: bool = True
    ) -> None:
        for name, value in (("slots", slots), ("chunk", chunk)):
            if value < 1:
                raise OddrankError(f"{name} is {value} and must be at least 1.")
        self.model, self.eos, self.slots, self.chunk = model, frozenset(eos), slots, chunk
        self.prepare_seconds = prepare(model)
        self.steps = _steps(model, record and os.environ.get(RECORD, "1") != "0")
        self._cache: KVCache | None = None
        self.timings = Timings(prepare_seconds=self.prepare_seconds)

    @torch.inference_mode()
    def generate(
        self, prompts: Sequence[Sequence[int]], sampling: Sampling, on_token: OnToken | None = None
    ) -> list[Completion]:
        """Continue every prompt (token ids). Results are in the order of the prompts; what a prompt gets does
        not depend on the others. `timings` then tells how long it took.

        OddrankError for an empty prompt, an unknown token, or a prompt that leaves no position to generate at.
        """
        waiting = deque(self._sequences(prompts, sampling))
        done: list[_Sequence] = list(waiting)
        cache = self._cache_of(min(self.slots, len(waiting)))
        active: list[_Sequence] = []
        prefill = decode = 0.0
        steps = decoded = 0
        while waiting or active:
            start = time.perf_counter()
            if waiting and len(active) < cache.slots:
                first = len(active)
                while waiting and len(active) < cache.slots:
                    active.append(waiting.popleft())
                self._prefill(active, first, cache, on_token)
                prefill += time.perf_counter() - start
            else:
                self._decode(active, cache, on_token)
                decode += time.perf_counter() - start
                steps += 1
                decoded += len(active)
            self._retire(active, cache)
        self.timings = Timings(
            prefill_seconds=prefill,
            decode_seconds=decode,
            prompt_tokens=sum(len(s.prompt) for s in done),
            decoded_tokens=decoded,
            decode_steps=steps,
            cache_bytes=cache.nbytes(),
            prepare_seconds=self.prepare_seconds,
        )
        return [Completion(s.out, s.finish, len(s.prompt)) for s in done]

    def _cache_of(self, slots: int) -> KVCache:
        """The last call's cache where it has as many slots, so that what was recorded over it still holds."""
        cache = self._cache
        if cache is None or cache.slots != slots:
            self.steps.forget()
            cache = self._cache = None  # before another is made
            cache = self.model.new_cache(slots)
        if self.steps.recording:
            self._cache = cache
        return cache

    def _sequences(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[_Sequence]:
        sampling.check()
        seed = sampling.seed
        if seed is None and sampling.temperature > 0:
            seed = self.model.group.broadcast(torch.seed() if self.model.group.rank == 0 else None)
        limit, vocab = self.model.rotary.limit, self.model.config.vocab
        made = []
        for index, prompt in enumerate(prompts):
            where = f"Prompt {index + 1} of {len(prompts)}"
            if not prompt:
                raise OddrankError(f"{where} has no tokens; the model needs at least one to start from.")
            if len(prompt) >= limit:
                raise OddrankError(
                    f"{where} has {len(prompt)} tokens and the model takes {limit} positions, so none is left to "
                    "generate at. Shorten it."
                )
            wrong = next((t for t in prompt if not 0 <= t < vocab), None)
            if wrong is not None:
                raise OddrankError(
                    f"{where} holds the token {wrong}; the model's vocabulary is 0 to {vocab - 1}. The tokenizer "
                    "is probably another model's."
                )
            room = min(sampling.max_tokens, limit - len(prompt))
            made.append(_Sequence(index, list(prompt), Sampler(sampling, (seed or 0) + index), room))
        return made

    def _prefill(self, active: list[_Sequence], first: int, cache: KVCache, on_token: OnToken | None) -> None:
        """Run the prompts of active[first:] through the model, `chunk` tokens at a time, and choose a token
        after each."""
        slot = first
        while slot < len(active):
            pieces: list[tuple[int, Sequence[int], int]] = []
            budget, ended = self.chunk, []
            while slot < len(active) and budget > 0:
                sequence = active[slot]
                new = sequence.prompt[sequence.cached : sequence.cached + budget]
                pieces.append((slot, new, sequence.cached))
                sequence.cached += len(new)
                budget -= len(new)
                if sequence.cached < len(sequence.prompt):
                    break
                ended.append((len(pieces) - 1, sequence))
                slot += 1
            step = Step.of(pieces, self.model.group.device)
            hidden = self.model(step, cache)
            if ended:
                rows = hidden.index_select(0, step.last[[at for at, _ in ended]])
                self._choose(self.model.logits(rows), [sequence for _, sequence in ended], on_token)

    def _decode(self, active: list[_Sequence], cache: KVCache, on_token: OnToken | None) -> None:
        """One more token for every active sequence."""
        tokens, past = [s.out[-1] for s in active], [s.cached for s in active]
        for sequence in active:
            sequence.cached += 1
        cached = sum(sequence.cached for sequence in active) * cache.kv_heads * cache.head_dim
        with torch_threads(1 if cached < THREADED_CACHE else torch.get_num_threads()):
            self._choose(self.steps(tokens, past, cache), active, on_token)

    def _choose(self, logits: Tensor, sequences: Sequence[_Sequence], on_token: OnToken | None) -> None:
        tokens = choose(logits, [sequence.sampler for sequence in sequences])
        for token, sequence in zip(tokens, sequences, strict=True):
            if isinstance(token, OddrankError):
                raise token
            sequence.out.append(token)
            sequence.room -= 1
            sampling = sequence.sampler.sampling
            if token in sampling.stop or (token in self.eos and not sampling.ignore_eos):
                sequence.finish = "stop"
            elif sequence.room == 0:
                sequence.finish = "length"
            if on_token is not None:
                on_token(sequence.index, token)

    def _retire(self, active: list[_Sequence], cache: KVCache) -> None:
        """Take finished sequences out; the last one moves into each hole, so that the active slots are 0, 1, ..."""
        for slot in range(len(active) - 1, -1, -1):
            if active[slot].finish:
                last = active.pop()
                if slot < len(active):
                    active[slot] = last
                    cache.move(len(active), slot, last.cached)
