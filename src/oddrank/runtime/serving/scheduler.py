"""Which tokens of which requests go through the model next.

A step has two parts: one token of every request that is generating, and then, out of a budget, pieces of the prompts of
others. So a long prompt never holds up those that generate by more than its piece takes; and of the budget half is the
longest waiting prompt's, the rest goes to the shortest of the others first, so that no prompt waits for a long one to
end, nor for ever.

Memory is pages, taken as they are needed. Where none is left the request that came last gives up its own, and starts
again, mostly from what its pages still remember, when there is room.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from oddrank.errors import OddrankError
from oddrank.runtime.serving.pages import Key, Pages, Snapshots, key_of, keys_of

_LONG_PROMPTS = 4
"""Prompts of more than a step's share that are worked on at the same time: more would only finish later, all."""


@dataclass(eq=False)
class Request:
    """One sequence. tokens: the prompt, then what was generated. limit: how many of both there may be. all_logits: the
    logits after every token of the prompt are wanted, so none of it is reused; they are not once they are known."""

    id: int
    tokens: list[int]
    limit: int
    all_logits: bool = False
    slot: int = -1
    """Its place among those in memory; -1: not in memory."""
    cached: int = 0
    """Tokens that the cache holds."""
    reused: int = 0
    """Of the prompt, those that another request had computed."""
    preempted: int = 0
    """How often."""
    pages: list[int] = field(default_factory=list)
    keys: list[Key] = field(default_factory=list)
    """Of the pages that are full."""
    prompt: int = field(init=False)
    """Tokens of the prompt."""
    aim: int = field(init=False)
    """Tokens that must be cached before it generates (again)."""

    def __post_init__(self) -> None:
        self.prompt = self.aim = len(self.tokens)


@dataclass(frozen=True)
class Piece:
    """Tokens [start, start + len(tokens)) of a request go through the model: a part of its prompt, or the token that it
    generates from. pages: its pages, as far as that needs. keep: the place for a snapshot of its state afterwards.
    ends: the logits after its last token choose the next one."""

    request: Request
    slot: int
    start: int
    tokens: tuple[int, ...]
    pages: tuple[int, ...]
    keep: int | None = None
    ends: bool = True


@dataclass(frozen=True)
class Work:
    """One step. begin: slots whose state starts from a snapshot (its place), or from nothing (None); before anything
    else. generating: a piece of one token each. prompts: pieces of prompts."""

    begin: tuple[tuple[int, int | None], ...]
    generating: tuple[Piece, ...]
    prompts: tuple[Piece, ...]

    def __bool__(self) -> bool:
        return bool(self.generating or self.prompts)

    def pieces(self) -> Iterator[Piece]:
        yield from self.generating
        yield from self.prompts


class Scheduler:
    """slots: requests that are in memory at once at most. budget: prompt tokens of a step at most. snapshots: of
    states; None where the model has none. snapshot_every: tokens, rounded up to whole pages.

    For each step `next_work`, then `done` with what was generated; `add` and `cancel` at any time before or between.
    """

    def __init__(
        self, pages: Pages, slots: int, budget: int, snapshots: Snapshots | None = None, snapshot_every: int = 512
    ) -> None:
        for name, value in (("slots", slots), ("budget", budget), ("snapshot_every", snapshot_every)):
            if value < 1:
                raise OddrankError(f"{name} is {value} and must be at least 1.")
        self.pages, self.slots, self.budget, self.snapshots = pages, slots, budget, snapshots
        self.snapshot_every = -(-snapshot_every // pages.size) * pages.size
        self.waiting: deque[Request] = deque()
        self.filling: list[Request] = []
        """In memory, with some of the prompt to go, the longest waiting first."""
        self.generating: list[Request] = []
        self.preempted = 0
        """Requests that had to give way so far, each time counted."""
        self._free_slots = list(range(slots - 1, -1, -1))

    @property
    def running(self) -> int:
        """Requests in memory."""
        return len(self.filling) + len(self.generating)

    @property
    def slots_held(self) -> int:
        """As many as requests are in memory, unless one got lost."""
        return self.slots - len(self._free_slots)

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.waiting or self.filling or self.generating)

    def add(self, request: Request) -> None:
        """OddrankError where it could never be in memory, even alone."""
        most = self.pages.count * self.pages.size
        if request.limit > most:
            raise OddrankError(
                f"The request may come to {request.limit} tokens ({request.prompt} of the prompt and "
                f"{request.limit - request.prompt} more), and the KV cache has room for {most}. Ask for fewer tokens, "
                "or start the server with more --kv-memory."
            )
        self.waiting.append(request)

    def cancel(self, request: Request) -> None:
        """Forget a request, wherever it is."""
        if request in self.waiting:
            self.waiting.remove(request)
        else:
            self._leave(request)

    def next_work(self) -> Work:
        """Empty only where there is nothing to do."""
        self._make_room()
        generating = tuple(self._generate(request) for request in self.generating)
        begin = tuple(self._admit())
        return Work(begin, generating, tuple(self._fill()))

    def done(self, work: Work, generated: Sequence[int | None]) -> None:
        """After a step: the token that each piece that ends chose, in the order of the pieces; None where the request
        ends with it."""
        tokens = iter(generated)
        for piece in work.pieces():
            request = piece.request
            token = next(tokens) if piece.ends else None
            if request.slot != piece.slot:  # cancelled meanwhile
                if piece.keep is not None and self.snapshots is not None:
                    self.snapshots.remember(self._key_at(piece), piece.keep)
                continue
            self._cached(request, piece.start + len(piece.tokens))
            if piece.keep is not None and self.snapshots is not None:
                self.snapshots.remember(request.keys[-1], piece.keep)
            if not piece.ends:
                continue
            if token is None:
                self._leave(request)
                continue
            request.tokens.append(token)
            if request in self.filling:
                self.filling.remove(request)
                self.generating.append(request)

    # Memory -------------------------------------------------------------------------------------------------

    def _make_room(self) -> None:
        """A page for the next token of all that generate, by preempting the last to have come if need be."""
        while sum(self._missing(r, r.cached + 1) for r in self.generating) > self.pages.available:
            self._preempt(max((*self.generating, *self.filling), key=lambda r: r.id))
        for request in self.generating:
            self._extend(request, request.cached + 1)

    def _preempt(self, request: Request) -> None:
        self._leave(request)
        self.preempted += 1
        request.cached, request.preempted, request.aim = 0, request.preempted + 1, len(request.tokens)
        request.keys = []
        self.waiting.appendleft(request)

    def _missing(self, request: Request, length: int) -> int:
        return max(0, -(-length // self.pages.size) - len(request.pages))

    def _extend(self, request: Request, length: int) -> None:
        request.pages += self.pages.take(self._missing(request, length))

    def _leave(self, request: Request) -> None:
        if request in self.filling:
            self.filling.remove(request)
        elif request in self.generating:
            self.generating.remove(request)
        else:
            return
        self.pages.release(request.pages)
        request.pages = []
        self._free_slots.append(request.slot)
        request.slot = -1

    def _cached(self, request: Request, length: int) -> None:
        """The cache holds so many of its tokens now; pages that are full are known from now on."""
        request.cached = length
        size = self.pages.size
        for page in range(len(request.keys), length // size):
            parent = request.keys[-1] if request.keys else b""
            request.keys.append(key_of(parent, request.tokens[page * size : (page + 1) * size]))
            self.pages.remember(request.pages[page], request.keys[-1])

    # Prompts ------------------------------------------------------------------------------------------------

    def _admit(self) -> Iterator[tuple[int, int | None]]:
        """Take waiting requests in, first come first, while there is a slot, and room for all of the prompt beside what
        those that are in still need for theirs. Where the states of those begin."""
        share = max(1, self.budget // _LONG_PROMPTS)
        backlog = sum(min(share, r.aim - r.cached) for r in self.filling)
        while self.waiting and self._free_slots and backlog < self.budget:
            request = self.waiting[0]
            keys = keys_of(request.tokens[: request.aim], self.pages.size)
            known = self._reusable(request, keys)
            idle = sum(self.pages.is_idle(key) for key in keys[:known])
            wanted = -(-(request.aim + 1) // self.pages.size) - known
            promised = sum(self._missing(r, r.aim + 1) for r in self.filling) + len(self.generating)
            if wanted + promised > self.pages.available - idle and self.running:
                break
            self.waiting.popleft()
            request.slot = self._free_slots.pop()
            request.pages = self.pages.take_known(keys[:known])
            request.keys = keys[:known]
            request.cached = known * self.pages.size
            if not request.preempted:
                request.reused = request.cached
            self.filling.append(request)
            backlog += min(share, request.aim - request.cached)
            restored = self.snapshots.use(keys[known - 1]) if known and self.snapshots is not None else None
            yield request.slot, restored

    def _reusable(self, request: Request, keys: Sequence[Key]) -> int:
        """How many remembered pages it can start from: at least one token must go through the model."""
        if request.all_logits:
            return 0
        known = self.pages.known(keys[: (request.aim - 1) // self.pages.size])
        return known if self.snapshots is None else self.snapshots.find(keys[:known])

    def _fill(self) -> Iterator[Piece]:
        if not self.filling:
            return
        first, *others = self.filling
        others.sort(key=lambda r: r.aim - r.cached)
        half = max(1, self.budget // 2) if others else self.budget
        left, given = self.budget, dict.fromkeys((r.id for r in self.filling), 0)
        for request, most in ((first, half), *((r, left) for r in others), (first, left)):
            count = min(most, left, request.aim - request.cached - given[request.id])
            given[request.id] += count
            left -= count
        for request in list(self.filling):
            count = self._affordable(request, given[request.id])
            if count > 0:
                yield self._piece(request, count)

    def _affordable(self, request: Request, count: int) -> int:
        """As many of these tokens as there are pages for, ending where a snapshot is wanted."""
        size, start = self.pages.size, request.cached
        end = min(start + count, (len(request.pages) + self.pages.available) * size)
        if self.snapshots is not None and self.snapshots.count:
            # from the last whole page another request with this prompt, or with more of it, goes on
            boundary = (request.aim - 1) // size * size
            regular = (start // self.snapshot_every + 1) * self.snapshot_every
            end = min(end, regular, boundary if boundary > start else end)
        return end - start

    def _piece(self, request: Request, count: int) -> Piece:
        start, end = request.cached, request.cached + count
        self._extend(request, end)
        tokens, pages = tuple(request.tokens[start:end]), tuple(request.pages)
        return Piece(request, request.slot, start, tokens, pages, self._keep(request, end), end == request.aim)

    def _generate(self, request: Request) -> Piece:
        start, end = request.cached, request.cached + 1
        keep = self._keep(request, end) if end % self.snapshot_every == 0 else None
        return Piece(request, request.slot, start, (request.tokens[start],), tuple(request.pages), keep)

    def _keep(self, request: Request, end: int) -> int | None:
        """Where to keep the state after `end` tokens."""
        if self.snapshots is None or not self.pages.reuse or end % self.pages.size or not self.snapshots.count:
            return None
        return self.snapshots.reserve()

    def _key_at(self, piece: Piece) -> Key:
        end = piece.start + len(piece.tokens)
        return keys_of(piece.request.tokens[:end], self.pages.size)[-1]
