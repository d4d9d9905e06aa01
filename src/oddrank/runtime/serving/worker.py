"""A rank that serves: the first one schedules and chooses tokens, the others do as it says."""

from __future__ import annotations

import gc
import logging
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec
import torch
from torch import Tensor

from oddrank.checkpoint import Checkpoint
from oddrank.errors import OddrankError
from oddrank.layout.plan import Plan
from oddrank.runtime.experts import ExpertOptions
from oddrank.runtime.parallel.child import Link
from oddrank.runtime.parallel.group import Group
from oddrank.runtime.precision import Precision
from oddrank.runtime.room import measure_room
from oddrank.runtime.sampling import Sampler, choose, likeliest
from oddrank.runtime.serving.executor import Executor, Filled, Ordering, make_executor
from oddrank.runtime.serving.messages import (
    Cancel,
    Candidates,
    Chosen,
    Failed,
    Ready,
    Scored,
    Stats,
    Stop,
    Submit,
    Update,
)
from oddrank.runtime.serving.options import ServingOptions
from oddrank.runtime.serving.pages import Pages, Snapshots
from oddrank.runtime.serving.scheduler import Piece, Request, Scheduler, Work
from oddrank.runtime.worker import load_rank
from oddrank.words import counted

T = TypeVar("T")

log = logging.getLogger(__name__)


class ServeJob(msgspec.Struct, frozen=True):
    """What every rank is started with. plan: `Plan.to_json`. eos: tokens that end a sequence."""

    model: str
    plan: bytes
    dtype: str
    eos: tuple[int, ...]
    experts: ExpertOptions
    options: ServingOptions


def serve_rank(group: Group, link: Link, job: ServeJob) -> None:
    """The target of a rank process. Tells the launcher `Ready`, then serves until `Stop`."""
    plan = Plan.from_json(job.plan)
    with Checkpoint.open(job.model) as checkpoint:
        model, loaded = load_rank(plan, checkpoint, group, Precision.of(job.dtype, group.device), job.experts)
    room = measure_room(model, plan, group)
    with torch.inference_mode():
        executor, pages = make_executor(model, job.options, room.memory - room.reserve - room.weights)
        cache = executor.cache
        states = 0 if cache.states is None else cache.states.nbytes()
        log.info(
            "holds %.1f MiB of weights; KV cache of %s, %d tokens, %.1f MiB%s",
            room.weights / 2**20, counted(pages, "page"), pages * cache.size, (cache.nbytes() - states) / 2**20,
            f"; states of {counted(job.options.running, 'request')} and {counted(cache.snapshots, 'snapshot')}, "
            f"{states / 2**20:.1f} MiB" if states else "",
        )  # fmt: skip
        link.send(Ready(pages, cache.size, room.weights, cache.nbytes(), loaded.experts))
        gc.collect()
        gc.freeze()  # what is here now stays: no collection while serving looks through it
        if group.rank == 0:
            Leader(executor, link, job).run()
        else:
            follow(executor)


def follow(executor: Executor) -> None:
    """Do the first rank's orders until it says stop."""
    group = executor.model.group
    while (order := group.broadcast()) is not None:
        executor.begin(order)
        executor.generate(order)
        filled = executor.fill(order)
        if filled is not None:
            filled.last()
            for index, following, top in group.broadcast() if filled.scored else ():
                filled.scores(index, following, top)


class _Asked:
    """A request at the first rank."""

    def __init__(self, submit: Submit) -> None:
        self.submit, self.sampling = submit, submit.sampling
        self.sampler = Sampler(submit.sampling, submit.sampling.seed or 0)
        self.request = Request(
            submit.id, list(submit.tokens), len(submit.tokens) + submit.sampling.max_tokens,
            all_logits=submit.prompt_top is not None,
        )  # fmt: skip
        self.told = False
        self.scored = 0
        """Of the prompt, tokens whose logprobs are told, the first counted, which has none."""


class Leader:
    """The first rank: takes requests, decides what runs, chooses tokens, tells the server."""

    def __init__(self, executor: Executor, link: Link, job: ServeJob) -> None:
        self.executor, self.link, self.eos = executor, link, frozenset(job.eos)
        o, cache = job.options, executor.cache
        self.pages = Pages(cache.count, cache.size, o.reuse)
        snapshots = None if cache.states is None else Snapshots(cache.snapshots)
        self.scheduler = Scheduler(self.pages, o.running, o.chunk, snapshots, o.snapshot_every)
        self._ordering = Ordering()
        self._asked: dict[int, _Asked] = {}
        self._queried = self._reused = 0
        self._since = self._in_model = 0.0  # when the step began; seconds of it in the model

    def run(self) -> None:
        group = self.executor.model.group
        while True:
            failed: list[Failed] = []
            if not self.scheduler:
                message = self.link.receive()
                self._since = time.perf_counter()
                if not self._take(message, failed):
                    break
            ended = False
            while self.link.waiting():
                if not self._take(self.link.receive(), failed):
                    ended = True
                    break
            if ended:
                break
            if self.scheduler:
                self.link.send(self.step(failed))
            else:  # all that came was refused, or cancelled
                self.link.send(Update([], [], failed, self._stats()))
        if group.size > 1:
            group.broadcast(None)

    def _take(self, message: Submit | Cancel | Stop, failed: list[Failed]) -> bool:
        """Whether to go on."""
        if isinstance(message, Stop):
            return False
        if isinstance(message, Cancel):
            asked = self._asked.pop(message.id, None)
            if asked is not None:
                self.scheduler.cancel(asked.request)
            return True
        try:
            asked = _Asked(message)
            self.scheduler.add(asked.request)
        except OddrankError as error:
            failed.append(Failed(message.id, str(error)))
            return True
        self._asked[message.id] = asked
        return True

    def step(self, failed: list[Failed]) -> Update:
        """One step of all ranks. failed: requests that are refused already; those that fail in the step join them."""
        self._in_model = 0.0
        work = self.scheduler.next_work()
        order, group, executor = self._ordering(work), self.executor.model.group, self.executor
        if group.size > 1:
            group.broadcast(order)
        executor.begin(order)
        chosen: list[Chosen] = []
        scored: list[Scored] = []
        tokens: list[int | None] = []
        logits = self._timed(lambda: executor.generate(order))
        if logits is not None:
            tokens += self._choose(logits, work.generating, chosen, failed)
        filled = self._timed(lambda: executor.fill(order))
        if filled is not None:
            last = self._timed(filled.last)
            ends = [(i, p) for i, p in enumerate(p for p in work.prompts if p.ends or p.request.all_logits) if p.ends]
            scored += self._score(filled, work.prompts)
            if last is not None and ends:
                rows = last[[i for i, _ in ends]] if len(ends) < len(last) else last
                tokens += self._choose(rows, [p for _, p in ends], chosen, failed)
        self.scheduler.done(work, tokens)
        self._count(work)
        through = sum(len(p.tokens) for p in work.pieces())
        before, self._since = self._since, time.perf_counter()
        return Update(chosen, scored, failed, self._stats(self._since - before, through, self._in_model))

    def _timed(self, work: Callable[[], T]) -> T:
        """The result of work, which is the model's."""
        start = time.perf_counter()
        done = work()
        self._in_model += time.perf_counter() - start
        return done

    def _choose(
        self, logits: Tensor, pieces: Sequence[Piece], chosen: list[Chosen], failed: list[Failed]
    ) -> list[int | None]:
        """A token for each row; None where its request ends with it."""
        asked = [self._asked[piece.request.id] for piece in pieces]
        rows = [i for i, a in enumerate(asked) if a.sampling.max_tokens]  # of others only the prompt's logprobs
        found: list[int | None] = [None] * len(pieces)
        tokens: dict[int, int] = {}
        some = logits if len(rows) == len(pieces) else logits[rows]
        for i, token in zip(rows, choose(some, [asked[i].sampler for i in rows]) if rows else (), strict=True):
            if isinstance(token, OddrankError):
                failed.append(Failed(pieces[i].request.id, str(token)))
            else:
                tokens[i] = token
        told = self._logprobs(logits, asked, tokens)
        for i, piece in enumerate(pieces):
            finish = ""
            if i in tokens:
                event = self._event(asked[i], piece.request, tokens[i], *told.get(i, (None, [])))
                chosen.append(event)
                finish = event.finish
            if i not in tokens or finish:
                del self._asked[piece.request.id]
            else:
                found[i] = tokens[i]
        return found

    def _logprobs(
        self, logits: Tensor, asked: Sequence[_Asked], tokens: dict[int, int]
    ) -> dict[int, tuple[float, Candidates]]:
        """Of the tokens of those rows that want them, and the candidates as many as the row wants."""
        wanted = [i for i in tokens if asked[i].submit.top is not None]
        if not wanted:
            return {}
        most = max(asked[i].submit.top or 0 for i in wanted)
        own, tops = likeliest(logits[wanted], [tokens[i] for i in wanted], most)
        return {i: (p, top[: asked[i].submit.top]) for i, p, top in zip(wanted, own, tops, strict=True)}

    def _event(self, asked: _Asked, request: Request, token: int, logprob: float | None, top: Candidates) -> Chosen:
        ends_text = token in asked.sampling.stop or (token in self.eos and not asked.sampling.ignore_eos)
        finish = "stop" if ends_text else "length" if len(request.tokens) + 1 >= request.limit else ""
        reused = 0 if asked.told else request.reused
        asked.told = True
        return Chosen(request.id, token, finish, ends_text, logprob, top, reused)

    def _score(self, filled: Filled, pieces: Sequence[Piece]) -> list[Scored]:
        """Logprobs of the prompts of which they are wanted, of those tokens that follow one in this step."""
        if not filled.scored:
            return []
        jobs = []
        for index in filled.scored:
            piece = pieces[index]
            end = piece.start + len(piece.tokens)
            following = piece.request.tokens[piece.start + 1 : min(end + 1, piece.request.prompt)]
            jobs.append((index, following, self._asked[piece.request.id].submit.prompt_top or 0))
        group = self.executor.model.group
        if group.size > 1:
            group.broadcast(jobs)
        found = []
        for index, following, top in jobs:
            piece, asked = pieces[index], self._asked[pieces[index].request.id]
            logprobs, tops = filled.scores(index, following, top)
            start, end = piece.start + 1, piece.start + 1 + len(logprobs)
            known = max(0, asked.scored - start)  # told before it had to give way
            ended = piece.ends and asked.sampling.max_tokens == 0
            if end > asked.scored or ended:
                finish = "length" if ended else ""
                found.append(Scored(piece.request.id, start + known, logprobs[known:], tops[known:], finish))
                asked.scored = end
            if piece.ends:
                piece.request.all_logits = False  # should it start again, they are not wanted
        return found

    def _count(self, work: Work) -> None:
        for piece in work.prompts:
            if piece.ends and not piece.request.preempted:
                self._queried += piece.request.prompt
                self._reused += piece.request.reused

    def _stats(self, seconds: float = 0.0, tokens: int = 0, model: float = 0.0) -> Stats:
        """As things are. seconds, tokens, model: of the step that has just been, if one has."""
        s, kept = self.scheduler, self.scheduler.snapshots
        return Stats(
            len(s.waiting), s.running, self.pages.count, self.pages.held, self.pages.remembered, seconds, tokens,
            s.preempted, self._queried, self._reused, s.slots_held,
            0 if kept is None else len(kept), 0 if kept is None else kept.unwritten, model,
        )  # fmt: skip
