"""What a server and its ranks say to each other."""

from __future__ import annotations

import msgspec

from oddrank.runtime.request import Sampling


class Submit(msgspec.Struct, frozen=True):
    """A request. top: candidates told with every token that is generated (0: the token's own logprob alone; None:
    neither). prompt_top: the same for every token of the prompt but the first."""

    id: int
    tokens: list[int]
    sampling: Sampling
    top: int | None = None
    prompt_top: int | None = None


class Cancel(msgspec.Struct, frozen=True):
    """Nobody waits for it any more."""

    id: int


Candidates = list[tuple[int, float]]
"""Token ids and logprobs in nats, the likeliest first."""


class Chosen(msgspec.Struct, frozen=True, array_like=True):
    """A token that came. finish: "stop", "length", or "" where more will. last: this token ended it, and is no text
    (an end token). reused: of the prompt, tokens that were not computed again, told with the first token."""

    id: int
    token: int
    finish: str = ""
    ends_text: bool = False
    logprob: float | None = None
    top: Candidates = []
    reused: int = 0


class Scored(msgspec.Struct, frozen=True, array_like=True):
    """Logprobs of tokens [start, start + len) of a prompt. start is at least 1."""

    id: int
    start: int
    logprobs: list[float]
    tops: list[Candidates]
    finish: str = ""
    """ "length" where nothing is to be generated and this was all."""


class Failed(msgspec.Struct, frozen=True):
    """A request that cannot be done, alone."""

    id: int
    message: str


class Stats(msgspec.Struct, frozen=True):
    """waiting, running: requests. pages, pages_held: of the KV cache. seconds: of the step that has just been, from the
    end of the one before it, or from the request that was waited for, to its own end. tokens: what went through the
    model in it. Both are 0 where there was no step. preempted: requests that had to give way, so far. queried, reused:
    prompt tokens, and those of them that a known prefix saved, so far. slots_held: places in memory that requests have,
    each with a state where the model has any. snapshots: of states, that are kept. snapshots_unwritten: places for one
    that are neither free nor kept. model: of the seconds, those in the model, up to its logits."""

    waiting: int
    running: int
    pages: int
    pages_held: int
    pages_remembered: int = 0
    seconds: float = 0.0
    tokens: int = 0
    preempted: int = 0
    queried: int = 0
    reused: int = 0
    slots_held: int = 0
    snapshots: int = 0
    snapshots_unwritten: int = 0
    model: float = 0.0


class Update(msgspec.Struct, frozen=True):
    """After a step."""

    chosen: list[Chosen]
    scored: list[Scored]
    failed: list[Failed]
    stats: Stats


class Ready(msgspec.Struct, frozen=True):
    """One rank is loaded. tokens: the KV cache has room for (all ranks' least)."""

    pages: int
    page_size: int
    weight_bytes: int
    cache_bytes: int
    experts: str = ""


class Stop(msgspec.Struct, frozen=True):
    """End."""
