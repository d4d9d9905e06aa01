"""Carries out a step on one rank: which tokens, whose pages, which states. The same on every rank."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import torch
from torch import Tensor

from oddrank.errors import OddrankError
from oddrank.runtime.loader import prepare
from oddrank.runtime.models.llama import Llama
from oddrank.runtime.paged import PagedCache
from oddrank.runtime.recorded import DecodeSteps
from oddrank.runtime.sampling import likeliest
from oddrank.runtime.serving.options import ServingOptions
from oddrank.runtime.serving.scheduler import Piece, Work
from oddrank.runtime.step import Step
from oddrank.runtime.threads import THREADED_CACHE, torch_threads
from oddrank.words import counted

_ANGLES = 1 << 15
"""Positions whose angles are there from the start: what is recorded is lost whenever their table grows."""


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Of a prompt: tokens after `start` of the sequence in `slot`. rows: whose logits are wanted: its last token's
    ("last"), all tokens' ("all"), or nobody's ("")."""

    slot: int
    start: int
    tokens: list[int]
    rows: str


class Order(msgspec.Struct, frozen=True, array_like=True):
    """A step as the ranks hear of it. begin: (slot, snapshot or None) whose states start. pages: (slot, index of the
    first, pages) that slots come to have. tokens, past, slots: of those that generate. keeps, prompt_keeps: (slot,
    snapshot) to make after those that generate, and after the prompts."""

    begin: list[tuple[int, int | None]]
    pages: list[tuple[int, int, list[int]]]
    tokens: list[int]
    past: list[int]
    slots: list[int]
    keeps: list[tuple[int, int]]
    prompts: list[Part]
    prompt_keeps: list[tuple[int, int]]


class Ordering:
    """Makes orders of the scheduler's work: pages are told once."""

    def __init__(self) -> None:
        self._told: dict[int, tuple[int, int]] = {}  # slot -> (request, pages it was told)

    def __call__(self, work: Work) -> Order:
        pages = [p for piece in work.pieces() if (p := self._new_pages(piece)) is not None]
        prompts = [
            Part(p.slot, p.start, list(p.tokens), "all" if p.request.all_logits else "last" if p.ends else "")
            for p in work.prompts
        ]
        return Order(
            list(work.begin), pages,
            [p.tokens[0] for p in work.generating], [p.start for p in work.generating],
            [p.slot for p in work.generating], _keeps(work.generating), prompts, _keeps(work.prompts),
        )  # fmt: skip

    def _new_pages(self, piece: Piece) -> tuple[int, int, list[int]] | None:
        request, told = self._told.get(piece.slot, (-1, 0))
        key = (piece.request.id << 20) + piece.request.preempted  # a preempted request comes back with other pages
        if request != key:
            told = 0
        self._told[piece.slot] = (key, len(piece.pages))
        return (piece.slot, told, list(piece.pages[told:])) if len(piece.pages) > told else None


def _keeps(pieces: Sequence[Piece]) -> list[tuple[int, int]]:
    return [(p.slot, p.keep) for p in pieces if p.keep is not None]


class Executor:
    """One rank's model and its memory. Ranks of a group call the same things in the same order."""

    def __init__(self, model: Llama, cache: PagedCache, chunk_rows: int = 64) -> None:
        """chunk_rows: of logits that are in memory at once where those of a whole prompt are wanted."""
        self.model, self.cache, self._rows = model, cache, chunk_rows
        self.steps = DecodeSteps(model)

    def begin(self, order: Order) -> None:
        """What comes before anything is computed."""
        for slot, snapshot in order.begin:
            self.cache.start(slot, snapshot)
        for slot, start, pages in order.pages:
            self.cache.give(slot, pages, start)

    def generate(self, order: Order) -> Tensor | None:
        """The logits [sequences, vocab] of those that generate, good until the next call; None where none do."""
        if not order.tokens:
            return None
        cached = (sum(order.past) + len(order.past)) * self.cache.kv_heads * self.cache.head_dim
        with torch_threads(1 if cached < THREADED_CACHE else torch.get_num_threads()):
            logits = self.steps(order.tokens, order.past, self.cache, order.slots)
        for slot, snapshot in order.keeps:
            self.cache.keep(slot, snapshot)
        return logits

    def fill(self, order: Order) -> Filled | None:
        """The prompts' parts through the model; None where there are none."""
        if not order.prompts:
            return None
        pieces = [(p.slot, p.tokens, p.start) for p in order.prompts]
        step = Step.of(pieces, self.model.group.device)
        self.model.rotary.reserve(step.longest)
        step.decode = False  # slots in no order
        hidden = self.model(step, self.cache)
        for slot, snapshot in order.prompt_keeps:
            self.cache.keep(slot, snapshot)
        return Filled(self.model, hidden, step, order.prompts, self._rows)

    def nbytes(self) -> int:
        return self.cache.nbytes() + self.steps.nbytes()


class Filled:
    """Hidden states of the prompts' parts. Every rank asks for the same logits in the same order."""

    def __init__(self, model: Llama, hidden: Tensor, step: Step, parts: Sequence[Part], rows: int) -> None:
        self._model, self._hidden, self._step, self._parts, self._rows = model, hidden, step, parts, rows

    def last(self) -> Tensor | None:
        """Of the parts whose last token's are wanted, and of those of which all are: [parts, vocab]."""
        wanted = [s.stop - 1 for s, p in zip(self._step.segments, self._parts, strict=True) if p.rows]
        if not wanted:
            return None
        return self._model.logits(self._hidden.index_select(0, torch.tensor(wanted, device=self._hidden.device)))

    def scores(
        self, index: int, following: Sequence[int], top: int
    ) -> tuple[list[float], list[list[tuple[int, float]]]]:
        """Of part `index`: the logprobs of the tokens that follow each of its own, and the likeliest candidates there.
        `following` is as long as the part, or shorter."""
        start = self._step.segments[index].start
        logprobs: list[float] = []
        tops: list[list[tuple[int, float]]] = []
        for at in range(0, len(following), self._rows):
            targets = following[at : at + self._rows]
            logits = self._model.logits(self._hidden[start + at : start + at + len(targets)])
            found = likeliest(logits, targets, top)
            logprobs += found[0]
            tops += found[1]
        return logprobs, tops

    @property
    def scored(self) -> list[int]:
        """Parts of which all logits are wanted."""
        return [i for i, p in enumerate(self._parts) if p.rows == "all"]


def make_executor(model: Llama, options: ServingOptions, free: int) -> tuple[Executor, int]:
    """The executor of a rank with `free` bytes beside its weights, and the pages of its cache. All ranks of the group
    call it together and come to the same number of pages.

    OddrankError where there is no room for a page, or for the states of the requests.
    """
    group, length = model.group, options.length or model.rotary.limit
    if length > model.rotary.limit:
        raise OddrankError(
            f"--max-model-len is {length} and the model takes {model.rotary.limit} positions. Give that many at most."
        )
    prepare(model)
    one = model.new_cache(1)
    state = 0 if one.states is None else one.states.nbytes()
    snapshots = options.snapshots if state and options.reuse else 0
    budget = free // 2 if options.kv_bytes is None else options.kv_bytes + (options.running + snapshots) * state
    snapshots = min(snapshots, max(0, budget // 4 // max(1, state)))
    page = PagedCache.token_nbytes(one) * options.page
    left = budget - (options.running + snapshots) * state if options.kv_bytes is None else options.kv_bytes
    most = options.running * -(-length // options.page)
    pages = min(most, left // page) if page else most
    told = group.all_gather(torch.tensor([pages], device=group.device), 0)
    pages = int(told.min())
    if pages < 1:
        held = counted(options.running, "request")
        raise OddrankError(
            f"There is no room for KV cache: {budget / 2**20:.2f} MiB are there for it"
            + (f", the states of {held} take {options.running * state / 2**20:.0f} MiB" if state else "")
            + f" and a page of {options.page} tokens takes {page / 2**20:.2f} MiB. Give more --kv-memory"
            + (", or take fewer --max-running-requests." if state else ".")
        )
    snapshots = int(group.all_gather(torch.tensor([snapshots], device=group.device), 0).min())
    plain = model.new_cache(options.running + snapshots)
    cache = PagedCache(plain, options.running, pages, options.page, min(length, pages * options.page), snapshots)
    model.rotary.reserve(min(cache.capacity, _ANGLES))
    return Executor(model, cache), pages
