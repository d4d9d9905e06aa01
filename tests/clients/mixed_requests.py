"""Requests of every kind, drawn from a seed, and what a client got for one."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai

from clients.served_models import VOCAB
from clients.served_process import KEY, PATIENCE, Serving

WORDS = ["one", "two", "three", "red", "green", "blue", "cat", "dog", "house", "river", "and", "the", "of", "to"]


@dataclass
class Asked:
    """chat or completion, as the package's arguments. leave: events of its stream after which the client goes, -1: it
    goes while it waits for the whole; None: it stays. error: the status that it must get."""

    chat: bool
    body: dict[str, Any]
    stream: bool = False
    leave: int | None = None
    error: int | None = None

    @property
    def greedy(self) -> bool:
        return not self.body.get("temperature")


@dataclass
class Got:
    """One choice. logprobs: of an echoed prompt's tokens, too."""

    ids: list[int] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=list)
    text: str = ""
    finish: str | None = None


def mixed(count: int, seed: int) -> list[Asked]:
    """Mostly good ones; a tenth bad, a tenth whose clients leave. Prompts share beginnings of several pages."""
    draw = random.Random(seed)
    stems = [[draw.randrange(VOCAB) for _ in range(90)] for _ in range(3)]
    return [_one(draw, stems) for _ in range(count)]


def _one(draw: random.Random, stems: Sequence[Sequence[int]]) -> Asked:
    kind = draw.random()
    if kind < 0.1:
        return _bad(draw)
    body: dict[str, Any] = {"temperature": 0, "max_tokens": draw.randint(1, 30), "seed": draw.randrange(1000)}
    if draw.random() < 0.5:
        body |= {"temperature": draw.choice([0.7, 1.3]), "top_p": draw.choice([1, 0.9])}
    if kind < 0.2:
        leave = draw.choice([-1, 1, 3, 9])
        body |= {"prompt": _prompt(draw, stems), "max_tokens": 140, "n": draw.choice([1, 2])}
        return Asked(False, body, leave != -1, leave)
    if kind < 0.5:
        content = " ".join(draw.choices(WORDS, k=draw.randint(1, 12)))
        messages = [{"role": "user", "content": content}]
        return Asked(True, body | {"messages": messages, "logprobs": True, "top_logprobs": 2}, draw.random() < 0.5)
    prompt: Any = " ".join(draw.choices(WORDS, k=draw.randint(1, 20))) if draw.random() < 0.3 else _prompt(draw, stems)
    body |= {"prompt": prompt, "logprobs": 2, "n": draw.choice([1, 1, 1, 3]), "echo": draw.random() < 0.15}
    return Asked(False, body, draw.random() < 0.5)


def _prompt(draw: random.Random, stems: Sequence[Sequence[int]]) -> list[int]:
    """Part of a stem and then its own; or its own alone, short or long."""
    own = [draw.randrange(VOCAB) for _ in range(draw.randint(1, 8))]
    if draw.random() < 0.75:
        return [*draw.choice(stems)[: draw.choice([16, 40, 64, 90])], *own]
    return own * draw.choice([1, 12])


def _bad(draw: random.Random) -> Asked:
    chat, body, status = draw.choice([
        (False, {"prompt": [1] * 90, "max_tokens": 400}, 400),
        (False, {"prompt": [VOCAB]}, 400),
        (False, {"prompt": "x", "temperature": -1}, 400),
        (False, {"prompt": "x", "model": "another"}, 404),
        (True, {"messages": []}, 400),
        (True, {"messages": [{"role": "user", "content": "x"}], "tools": [{}]}, 400),
    ])  # fmt: skip
    return Asked(chat, body, draw.random() < 0.5, error=status)


async def ask(client: openai.AsyncOpenAI, asked: Asked) -> list[Got] | None:
    """Its choices; None where it did not stay, or got the error that it should."""
    create: Any = client.chat.completions.create if asked.chat else client.completions.create
    body = {"model": "m", **asked.body, "extra_body": {"return_token_ids": True}}
    try:
        if asked.leave == -1:
            await asyncio.wait_for(create(**body), 0.05)
            return None
        answer = await create(**body, stream=asked.stream)
        assert asked.error is None, f"{asked} was answered"
        return await _streamed(answer, asked) if asked.stream else [_choice(Got(), c) for c in answer.choices]
    except TimeoutError:
        return None
    except openai.APIStatusError as error:
        assert error.status_code == asked.error, f"{asked}: {error}"
        return None


async def _streamed(stream: Any, asked: Asked) -> list[Got] | None:
    found: dict[int, Got] = {}
    events = 0
    async with stream:
        async for chunk in stream:
            events += 1
            if events == asked.leave:
                return None
            for choice in chunk.choices:
                _choice(found.setdefault(choice.index, Got()), choice)
    return [found[index] for index in sorted(found)]


def _choice(got: Got, choice: Any) -> Got:
    """What a whole answer's choice says, or a stream's chunk adds."""
    got.ids += (choice.model_extra or {}).get("token_ids") or []
    got.finish = choice.finish_reason or got.finish
    part = getattr(choice, "message", None) or getattr(choice, "delta", None)
    got.text += (part.content if part is not None else choice.text) or ""
    if choice.logprobs is not None and part is not None:
        got.logprobs += [c.logprob for c in choice.logprobs.content]
    elif choice.logprobs is not None:
        got.logprobs += choice.logprobs.token_logprobs
    return got


async def ask_all(serving: Serving, requests: Sequence[Asked], at_once: int) -> list[list[Got] | None]:
    """What each got, `at_once` of them at a time."""
    room = asyncio.Semaphore(at_once)
    limits = httpx.Limits(max_connections=at_once)
    http = httpx.AsyncClient(limits=limits, timeout=PATIENCE)
    async with openai.AsyncOpenAI(base_url=f"{serving.url}/v1", api_key=KEY, max_retries=0, http_client=http) as client:

        async def one(asked: Asked) -> list[Got] | None:
            async with room:
                return await ask(client, asked)

        return list(await asyncio.gather(*map(one, requests)))
