"""The scheduler against a model whose memory is looked at: what every piece reads must be what its request said."""

from __future__ import annotations

import hashlib
import random

import pytest

from oddrank.errors import OddrankError
from oddrank.runtime.serving.pages import Pages, Snapshots, keys_of
from oddrank.runtime.serving.scheduler import Request, Scheduler, Work

VOCAB = 7


def following(tokens: list[int]) -> int:
    """What the model says after these tokens."""
    return hashlib.sha256(bytes(tokens)).digest()[0] % VOCAB


class Model:
    """Pages that hold tokens in place of keys and values, and states that are the tokens seen."""

    def __init__(self, pages: int, size: int, slots: int, snapshots: int) -> None:
        self.size = size
        self.memory: list[list[int | None]] = [[None] * size for _ in range(pages)]
        self.states: list[list[int]] = [[] for _ in range(slots)]
        self.kept: list[list[int]] = [[] for _ in range(snapshots)]
        self.tokens = 0

    def run(self, work: Work, states: bool) -> list[int]:
        for slot, place in work.begin:
            self.states[slot] = [] if place is None else list(self.kept[place])
        chosen = []
        for piece in work.pieces():
            end = piece.start + len(piece.tokens)
            assert len(piece.pages) == len(set(piece.pages)) >= -(-end // self.size)
            for position, token in enumerate(piece.tokens, piece.start):
                self.memory[piece.pages[position // self.size]][position % self.size] = token
            seen = [self.memory[piece.pages[i // self.size]][i % self.size] for i in range(end)]
            assert seen == piece.request.tokens[:end], "it reads what another wrote"
            self.states[piece.slot] += piece.tokens
            if states:
                assert self.states[piece.slot] == piece.request.tokens[:end]
            if piece.keep is not None:
                self.kept[piece.keep] = list(self.states[piece.slot])
            if piece.ends:
                chosen.append(following(seen))  # type: ignore[arg-type]
            self.tokens += len(piece.tokens)
        return chosen


def alone(prompt: list[int], limit: int) -> list[int]:
    tokens = list(prompt)
    while len(tokens) < limit:
        tokens.append(following(tokens))
    return tokens


def step(scheduler: Scheduler, model: Model, states: bool = False) -> list[Request]:
    """One step; the requests that ended with it."""
    work = scheduler.next_work()
    assert work, "there is something to do and nothing is done"
    chosen: list[int | None] = list(model.run(work, states))
    ended = []
    for i, piece in enumerate(p for p in work.pieces() if p.ends):
        if len(piece.request.tokens) + 1 == piece.request.limit:
            piece.request.tokens.append(chosen[i])  # type: ignore[arg-type]
            chosen[i] = None
            ended.append(piece.request)
    scheduler.done(work, chosen)
    return ended


def shapes(seed: int) -> tuple[int, int, int, int, int]:
    draw = random.Random(seed)
    size = draw.choice([1, 2, 4, 8])
    return draw.randint(6, 60), size, draw.randint(1, 6), draw.randint(1, 40), draw.choice([0, 1, 3, 8])


@pytest.mark.parametrize("seed", range(120))
def test_every_request_gets_what_it_gets_alone(seed: int) -> None:
    """Random pages, slots, budgets, prompts that share beginnings, arrivals, cancellations and preemptions."""
    count, size, slots, budget, kept = shapes(seed)
    draw, states = random.Random(seed), seed % 3 == 0
    pages, model = Pages(count, size, reuse=seed % 5 != 0), Model(count, size, slots, kept)
    snapshots = Snapshots(kept) if states else None
    scheduler = Scheduler(pages, slots, budget, snapshots, snapshot_every=draw.choice([1, 8, 20]))
    room = count * size
    stems = [[draw.randrange(VOCAB) for _ in range(room // 2)] for _ in range(3)]
    todo, alive, ended = 40, [], 0
    for number in range(10**6):
        if todo and draw.random() < 0.3:
            stem = draw.choice(stems)
            prompt = stem[: draw.randint(0, len(stem))] + [draw.randrange(VOCAB) for _ in range(draw.randint(1, 5))]
            prompt = prompt[: room - 1]
            request = Request(number, prompt, draw.randint(len(prompt) + 1, room), draw.random() < 0.1)
            scheduler.add(request)
            alive.append(request)
            todo -= 1
        if alive and draw.random() < 0.03:
            gone = alive.pop(draw.randrange(len(alive)))
            scheduler.cancel(gone)
            ended += 1
        if scheduler:
            for request in step(scheduler, model, states):
                assert request.tokens == alone(request.tokens[: request.prompt], request.limit)
                alive.remove(request)
                ended += 1
        elif not todo:
            break
    assert ended == 40 and not alive and pages.held == 0 and scheduler.running == 0
    assert sorted(scheduler._free_slots) == list(range(slots))
    pages.forget_all()
    assert pages.available == count == len(pages._free) and pages.remembered == 0


def test_a_prompt_that_another_had_is_not_computed_again() -> None:
    pages, model = Pages(100, 4), Model(100, 4, 4, 0)
    scheduler = Scheduler(pages, 4, 64)
    first = Request(1, list(range(7)) * 3, 22)
    scheduler.add(first)
    step(scheduler, model)
    assert model.tokens == 21
    second = Request(2, list(first.tokens[:21]), 22)
    scheduler.add(second)
    step(scheduler, model)
    assert second.reused == 20 and model.tokens == 22
    third = Request(3, list(first.tokens[:20]), 21)  # its last page must not be taken: a token has to be computed
    scheduler.add(third)
    step(scheduler, model)
    assert third.reused == 16
    echo = Request(4, list(first.tokens[:21]), 22, all_logits=True)
    scheduler.add(echo)
    step(scheduler, model)
    assert echo.reused == 0


def test_states_are_gone_on_from_at_the_end_of_a_prompt() -> None:
    pages, model, snapshots = Pages(100, 4), Model(100, 4, 4, 4), Snapshots(4)
    scheduler = Scheduler(pages, 4, 64, snapshots)
    first = Request(1, list(range(7)) * 3, 22)
    scheduler.add(first)
    step(scheduler, model, True)  # up to the last whole page
    step(scheduler, model, True)
    assert len(snapshots) == 1
    second = Request(2, [*first.tokens[:21], 5, 5], 24)
    scheduler.add(second)
    while scheduler:
        step(scheduler, model, True)
    assert second.reused == 20
    pages.forget_all()
    snapshots.forget_all()
    assert pages.remembered == len(snapshots) == 0


def test_a_long_prompt_holds_nobody_up() -> None:
    """Those that generate get a token every step, and a short prompt its first one in the second step at the latest."""
    pages, model = Pages(1000, 4), Model(1000, 4, 8, 0)
    scheduler = Scheduler(pages, 8, 16)
    running = Request(0, [1, 2, 3], 500)
    scheduler.add(running)
    step(scheduler, model)
    scheduler.add(Request(1, [4] * 1000, 1001))
    step(scheduler, model)
    short = Request(2, [5] * 6, 7)
    scheduler.add(short)
    before = len(running.tokens)
    assert step(scheduler, model) == [short]
    assert len(running.tokens) == before + 1
    work = scheduler.next_work()
    assert [len(p.tokens) for p in work.prompts] == [16]  # and alone it gets all of the budget


def test_a_long_prompt_is_not_put_off_for_ever() -> None:
    pages, model = Pages(1000, 4), Model(1000, 4, 8, 0)
    scheduler = Scheduler(pages, 8, 16)
    long = Request(0, [4] * 160, 161)
    scheduler.add(long)
    for n in range(1, 25):
        if long.slot < 0 and n > 1:
            break
        for k in range(4):
            scheduler.add(Request(10 * n + k, [n % VOCAB, k] * 4, 9))
        step(scheduler, model)
    assert len(long.tokens) == 161 and n <= 22  # half of each step's budget: 160 / 8 steps


def test_the_last_to_come_gives_way() -> None:
    pages, model = Pages(6, 2, reuse=False), Model(6, 2, 4, 0)
    scheduler = Scheduler(pages, 4, 16)
    first, second = Request(0, [1, 2, 3], 12), Request(1, [4, 5, 6], 12)
    scheduler.add(first)
    scheduler.add(second)
    order = []
    while scheduler:
        order += step(scheduler, model)
    assert order == [first, second] and first.preempted == 0 and second.preempted >= 1
    assert second.tokens == alone([4, 5, 6], 12)


def test_what_never_fits_is_refused() -> None:
    scheduler = Scheduler(Pages(4, 4), 2, 8)
    with pytest.raises(OddrankError, match="room for 16"):
        scheduler.add(Request(0, [1] * 10, 17))
    with pytest.raises(OddrankError, match="at least 1"):
        Scheduler(Pages(4, 4), 2, 0)


def test_cancelled_while_its_step_runs() -> None:
    pages, model = Pages(10, 2), Model(10, 2, 2, 0)
    scheduler = Scheduler(pages, 2, 8)
    request = Request(0, [1, 2, 3], 9)
    scheduler.add(request)
    work = scheduler.next_work()
    scheduler.cancel(request)
    scheduler.done(work, model.run(work, False))
    assert not scheduler and pages.held == 0 and request.tokens == [1, 2, 3]


def test_prefixes_of_other_tokens_have_other_keys() -> None:
    """A page is known by all that came before it, not by its own tokens alone."""
    assert keys_of([1, 2, 3, 4, 5], 2) == keys_of([1, 2, 3, 4], 2)
    assert keys_of([1, 2, 3, 4], 2)[1] != keys_of([2, 2, 3, 4], 2)[1]
    assert keys_of([1, 2, 3, 4], 2)[0] == keys_of([1, 2, 9, 4], 2)[0]
    assert len(keys_of([1], 2)) == 0
