"""Two hundred requests of every kind at once: each gets what it gets alone, and afterwards nothing is held."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from clients.mixed_requests import Asked, Got, ask_all, mixed
from clients.served_models import write_synthetic
from clients.served_process import Serving, anonymous_bytes, ended, started, until

REQUESTS = mixed(200, 5)
STAY = [i for i, asked in enumerate(REQUESTS) if asked.leave is None and asked.error is None]
NEAR_TIE = 1e-3
"""Nats: far more than fp32 rounding moves a logprob of these models."""
GROWTH = 2 << 20
"""Bytes that a process may have gained by a second load like the first."""
GAUGES = (
    "oddrank_requests_running", "oddrank_requests_waiting", "oddrank_kv_cache_usage_ratio", "oddrank_state_slots_held",
    "oddrank_state_snapshots_unwritten",
)  # fmt: skip


class Loaded(NamedTuple):
    serving: Serving
    path: Path
    got: list[list[Got] | None]
    alone: list[list[Got] | None]
    again: list[list[Got] | None]
    before: list[int]
    after: list[int]


@pytest.fixture(scope="module", params=[("llama", 3, 0.0006), ("qwen3_5", 2, 0.0003)], ids=lambda p: p[0])
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Loaded]:
    """The load twice; then those that stayed to the end, one at a time, on one rank that computes every prompt whole.

    There is memory for a few of the requests only, so that some must give way."""
    family, tp, memory = request.param
    folder = tmp_path_factory.mktemp(family)
    path = write_synthetic(family, "bf16", folder / "m")
    options = ("--dtype", "fp32", "--max-model-len", 256, "--served-model-name", "m", "--max-prefill-tokens", 64)
    many = ("--tp", tp, "--max-running-requests", 12, "--kv-memory", memory)
    servings = (
        Serving(path, folder / "load.log", *options, *many),
        Serving(path, folder / "alone.log", *options, "--max-running-requests", 3, "--no-prefix-reuse"),
    )
    serving, single = started(servings)
    pids = [serving.pid, *serving.ranks]
    got = asyncio.run(ask_all(serving, REQUESTS, 16))
    before = [anonymous_bytes(pid) for pid in pids]
    again = asyncio.run(ask_all(serving, REQUESTS, 16))
    after = [anonymous_bytes(pid) for pid in pids]
    whole = [Asked(REQUESTS[i].chat, REQUESTS[i].body) for i in STAY]
    alone = asyncio.run(ask_all(single, whole, 1))
    yield Loaded(serving, path, got, alone, again, before, after)
    ended(servings)


def test_everything_is_given_back(loaded: Loaded) -> None:
    serving = loaded.serving
    until(lambda: not any(serving.metrics()[name] for name in GAUGES), f"{GAUGES} are all 0")
    found = serving.metrics()
    assert "oddrank_requests_total{failed}" not in found, _beside_requests(serving.log)
    assert found["oddrank_preemptions_total"] > 0 and found["oddrank_reused_prompt_tokens_total"] > 0
    bad = sum(asked.error is not None for asked in REQUESTS)
    assert found["oddrank_requests_total{refused}"] == 2 * bad
    assert found["oddrank_requests_total{ok}"] >= 2 * len(STAY) and found["oddrank_requests_total{cancelled}"] > 0
    assert serving.health() == (200, {"status": "ok"})


def _beside_requests(log: Path) -> str:
    """Of a server's log what is no line of a request that was answered, refused or left: those that failed, and why."""
    usual = tuple(f"outcome={outcome} " for outcome in ("ok", "refused", "cancelled"))
    return "\n".join(line for line in log.read_text().splitlines() if not any(u in line for u in usual))


def test_no_process_has_grown(loaded: Loaded) -> None:
    grown = [b - a for a, b in zip(loaded.before, loaded.after, strict=True)]
    assert max(grown) < GROWTH, grown


def test_everybody_gets_what_is_got_alone(loaded: Loaded) -> None:
    parted = 0
    for index, alone in zip(STAY, loaded.alone, strict=True):
        assert alone is not None
        for got in (loaded.got[index], loaded.again[index]):
            assert got is not None and len(got) == len(alone)
            parted += sum(_part(REQUESTS[index], x, y) for x, y in zip(got, alone, strict=True))
    assert parted <= 1, "a draw that falls on the edge between two tokens is rare"


def _part(asked: Asked, got: Got, alone: Got) -> bool:
    """Whether two answers part, as they may where rounding decides: for a greedy one between two tokens that are as
    likely. Up to there every logprob is the same."""
    same = next((i for i, (x, y) in enumerate(zip(got.ids, alone.ids, strict=False)) if x != y), None)
    until = None if same is None else len(alone.logprobs) - len(alone.ids) + same + asked.greedy
    assert got.logprobs[:until] == pytest.approx(alone.logprobs[:until], abs=NEAR_TIE), (asked, got, alone)
    if same is None:
        assert (got.ids, got.text, got.finish) == (alone.ids, alone.text, alone.finish), (asked, got, alone)
    return same is not None
