"""Completions and chat: a checked request to prompts, sequences, and an answer, whole or as a stream of events."""

from __future__ import annotations

import secrets
import time
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from oddrank.runtime.request import Sampling
from oddrank.runtime.text import TextStream
from oddrank.server.answers import Choice, CompletionLogprobs, Delta, Told, chat_logprobs, together
from oddrank.server.backend import Backend
from oddrank.server.chat import ReasoningSplit
from oddrank.server.protocol import ApiError, ChatRequest, CompletionRequest
from oddrank.server.served import Served


@dataclass
class Watch:
    """What is known of a request when it is over: for its log line and the metrics."""

    started: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    last_token: float | None = None
    prompt_tokens: int = 0
    completion_tokens: int = 0
    reused_tokens: int = 0
    choices: int = 0
    finish: str = ""
    stream: bool = False

    def token(self, count: int) -> None:
        now = time.perf_counter()
        self.first_token = self.first_token or now
        self.last_token = now
        self.completion_tokens += count


@dataclass
class _Sequence:
    """One choice to be. prompt: of several, which."""

    index: int
    prompt: list[int]
    sampling: Sampling
    choice: Choice


class Endpoints:
    """The answers to both kinds of request. `check` says at once what is wrong with one; answering comes after."""

    def __init__(self, served: Served, backend: Backend) -> None:
        self.served, self.backend = served, backend

    def completion(self, asked: CompletionRequest, watch: Watch) -> Answer:
        """ApiError for what cannot be answered."""
        served = self.served
        served.check_name(asked.model)
        prompts = []
        for prompt in asked.prompts():
            tokens = served.encode(prompt, asked.add_special_tokens) if isinstance(prompt, str) else prompt
            served.check_tokens(tokens, "prompt")
            prompts.append(tokens)
        prompt_top = asked.logprobs if asked.echo and asked.logprobs is not None else None
        texts = [p if isinstance(p, str) else self._decode(p) for p in asked.prompts()] if asked.echo else None
        sequences = self._sequences(asked, prompts, lambda _: None, echo=prompt_top is not None)
        return _Completion(self, asked, sequences, watch, asked.logprobs, prompt_top, texts)

    def chat(self, asked: ChatRequest, watch: Watch) -> Answer:
        """ApiError for what cannot be answered."""
        served = self.served
        served.check_name(asked.model)
        options = dict(asked.chat_template_kwargs or {})
        if asked.reasoning_effort is not None:
            options.setdefault("reasoning_effort", asked.reasoning_effort)
        text = served.renderer.render(asked.messages, generate=asked.add_generation_prompt, options=options)
        tokens = served.encode(text, special=False)  # the template wrote them
        inside = served.renderer.opens_reasoning(text)
        sequences = self._sequences(asked, [tokens], lambda _: ReasoningSplit(inside))
        top = (asked.top_logprobs or 0) if asked.logprobs else None
        return _Chat(self, asked, sequences, watch, top, None, None)

    def _sequences(
        self, asked: CompletionRequest | ChatRequest, prompts: list[list[int]],
        split: Callable[[int], ReasoningSplit | None], echo: bool = False,
    ) -> list[_Sequence]:  # fmt: skip
        found: list[_Sequence] = []
        for prompt in prompts:
            if not prompt:
                raise ApiError(400, "The prompt has no tokens; the model needs at least one to start from.", "prompt")
            room = self.served.room(len(prompt), asked.wanted_tokens)
            for _ in range(asked.n):
                index = len(found)
                text = TextStream(self.served.tokenizer, asked.stops)
                choice = Choice(text, split(index), prompt if echo else ())
                found.append(_Sequence(index, prompt, self._sampling(asked, room, index), choice))
        return found

    def _sampling(self, asked: CompletionRequest | ChatRequest, room: int, index: int) -> Sampling:
        d = self.served.defaults
        bias = {int(token): value for token, value in (asked.logit_bias or {}).items()}
        self.served.check_tokens(list(bias), "logit_bias")
        self.served.check_tokens(asked.stop_token_ids, "stop_token_ids")
        return Sampling(
            max_tokens=room,
            temperature=d.temperature if asked.temperature is None else asked.temperature,
            top_p=d.top_p if asked.top_p is None else asked.top_p,
            top_k=d.top_k if asked.top_k is None else max(asked.top_k, 0),
            min_p=d.min_p if asked.min_p is None else asked.min_p,
            seed=secrets.randbits(63) if asked.seed is None else (asked.seed + index) % (1 << 63),
            stop=tuple(asked.stop_token_ids),
            ignore_eos=asked.ignore_eos,
            logit_bias=tuple(sorted(bias.items())),
        )

    def _decode(self, tokens: list[int]) -> str:
        return str(self.served.tokenizer.decode(tokens, skip_special_tokens=False))


class Answer:
    """One answer to be: `whole`, or `events` for a stream."""

    prefix = ""
    kind = ""

    def __init__(
        self, endpoints: Endpoints, asked: Any, sequences: list[_Sequence], watch: Watch, top: int | None,
        prompt_top: int | None, echo: list[str] | None,
    ) -> None:  # fmt: skip
        self.served, self.backend, self.asked = endpoints.served, endpoints.backend, asked
        self.sequences, self.watch, self.top, self.prompt_top, self.echo = sequences, watch, top, prompt_top, echo
        self.id, self.created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())
        prompts = {id(s.prompt): len(s.prompt) for s in sequences}
        watch.prompt_tokens, watch.choices = sum(prompts.values()), len(sequences)

    async def deltas(self) -> AsyncIterator[tuple[int, Delta]]:
        """What comes, of all choices. Whoever stops asking cancels them all."""
        async for index, delta in together([self._one(s) for s in self.sequences]):
            self.watch.finish = delta.finish or self.watch.finish
            yield index, delta

    async def _one(self, sequence: _Sequence) -> AsyncIterator[Delta]:
        if self.echo is not None:
            yield Delta(text=self.echo[sequence.index // self.asked.n])
        if sequence.sampling.max_tokens == 0 and self.prompt_top is None:
            yield Delta(finish="length")
            return
        events = self.backend.generate(sequence.prompt, sequence.sampling, self.top, self.prompt_top)
        try:
            async for event in events:
                before = sequence.choice.tokens
                delta = sequence.choice.take(event)
                if sequence.choice.tokens > before:
                    self.watch.token(sequence.choice.tokens - before)
                yield delta
                if delta.finish:  # a stop string, which the ranks know nothing of
                    return
        finally:
            await events.aclose()  # type: ignore[attr-defined]

    def usage(self) -> dict[str, Any]:
        w = self.watch
        w.reused_tokens = max((s.choice.reused for s in self.sequences), default=0)
        return {
            "prompt_tokens": w.prompt_tokens,
            "completion_tokens": w.completion_tokens,
            "total_tokens": w.prompt_tokens + w.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": w.reused_tokens},
        }

    def frame(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id, "object": kind, "created": self.created, "model": self.served.name, "choices": choices,
        }  # fmt: skip

    async def whole(self) -> dict[str, Any]:
        texts = ["" for _ in self.sequences]
        reasonings, finishes = list(texts), list(texts)
        told: list[list[Told]] = [[] for _ in self.sequences]
        async for index, delta in self.deltas():
            texts[index] += delta.text
            reasonings[index] += delta.reasoning
            finishes[index] = delta.finish or finishes[index]
            told[index] += delta.told
        choices = [
            self.choice(s.index, texts[s.index], reasonings[s.index], told[s.index]) | {"finish_reason": finish}
            for s, finish in zip(self.sequences, finishes, strict=True)
        ]
        if self.asked.return_token_ids:
            for choice, s in zip(choices, self.sequences, strict=True):
                choice["token_ids"] = self._generated_ids(s, told[s.index])
                choice["prompt_token_ids"] = s.prompt
        return self.frame(self.kind, choices) | {"usage": self.usage()}

    def _generated_ids(self, sequence: _Sequence, told: list[Told]) -> list[int]:
        return [t.token for t in told][len(told) - sequence.choice.tokens :] if sequence.choice.tokens else []

    async def events(self) -> AsyncIterator[dict[str, Any]]:
        """The chunks of a stream, without their frame of `data:`. Token ids add up to those of `whole`."""
        untold = {s.index: s.prompt for s in self.sequences}
        for first in self.opening():
            yield first
        async for index, delta in self.deltas():
            chunk = self.chunk(index, delta)
            if chunk is not None:
                if self.asked.return_token_ids:
                    chunk["token_ids"] = [] if delta.echoed else [t.token for t in delta.told]
                    if index in untold:
                        chunk["prompt_token_ids"] = untold.pop(index)
                yield self.frame(self.chunk_kind, [chunk])
        if self.asked.stream_options is not None and self.asked.stream_options.include_usage:
            yield self.frame(self.chunk_kind, []) | {"usage": self.usage()}

    @property
    def chunk_kind(self) -> str:
        return self.kind

    def opening(self) -> list[dict[str, Any]]:
        return []

    def choice(self, index: int, text: str, reasoning: str, told: list[Told]) -> dict[str, Any]:
        raise NotImplementedError

    def chunk(self, index: int, delta: Delta) -> dict[str, Any] | None:
        raise NotImplementedError


class _Completion(Answer):
    prefix, kind = "cmpl", "text_completion"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._logprobs = [CompletionLogprobs(self.served.vocabulary, self.top or 0) for _ in self.sequences]

    def choice(self, index: int, text: str, reasoning: str, told: list[Told]) -> dict[str, Any]:
        logprobs = None if self.top is None else self._logprobs[index].add(told)
        return {"index": index, "text": text, "logprobs": logprobs}

    def chunk(self, index: int, delta: Delta) -> dict[str, Any] | None:
        if not (delta.text or delta.finish or (delta.told and self.top is not None)):
            return None
        return self.choice(index, delta.text, "", list(delta.told)) | {"finish_reason": delta.finish or None}


class _Chat(Answer):
    prefix, kind = "chatcmpl", "chat.completion"

    @property
    def chunk_kind(self) -> str:
        return "chat.completion.chunk"

    def opening(self) -> list[dict[str, Any]]:
        return [
            self.frame(
                self.chunk_kind,
                [{"index": s.index, "delta": {"role": "assistant", "content": ""}, "logprobs": None,
                  "finish_reason": None}],
            )
            for s in self.sequences
        ]  # fmt: skip

    def choice(self, index: int, text: str, reasoning: str, told: list[Told]) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
        if reasoning and self.asked.include_reasoning:
            message["reasoning_content"] = reasoning
        return {"index": index, "message": message, "logprobs": self._content(told)}

    def chunk(self, index: int, delta: Delta) -> dict[str, Any] | None:
        reasoning = delta.reasoning if self.asked.include_reasoning else ""
        if not (delta.text or reasoning or delta.finish or (delta.told and self.top is not None)):
            return None
        change: dict[str, Any] = {}
        if delta.text:
            change["content"] = delta.text
        if reasoning:
            change["reasoning_content"] = reasoning
        return {
            "index": index, "delta": change, "logprobs": self._content(list(delta.told)) if delta.told else None,
            "finish_reason": delta.finish or None,
        }  # fmt: skip

    def _content(self, told: list[Told]) -> dict[str, Any] | None:
        return None if self.top is None else {"content": chat_logprobs(told, self.served.vocabulary, self.top)}
