"""What the rank processes of test_recorded_ranks.py run."""

import time
from typing import Any
from unittest import mock

import torch
from recorded_models import both_ways

import oddrank.runtime.cache
from oddrank import OddrankError
from oddrank.checkpoint import Checkpoint
from oddrank.layout.plan import Plan
from oddrank.runtime.engine import Engine
from oddrank.runtime.models.llama import Llama
from oddrank.runtime.parallel import Group, Link, PeerLostError, connect
from oddrank.runtime.precision import Precision
from oddrank.runtime.request import Sampling
from oddrank.runtime.worker import load_rank

PROMPTS = [[3, 17, 52, 0, 17], [41], [8, 29, 11, 4, 4, 4, 9, 30, 2], [1, 2], [50, 49, 48]]


def loaded(path: str, plan: bytes, group: Group) -> Llama:
    with Checkpoint.open(path) as checkpoint:
        return load_rank(Plan.from_json(plan), checkpoint, group, Precision.of("bf16"))[0]


def decode(group: Group, link: Link, path: str, plans: list[bytes]) -> list[dict[str, Any]]:
    """Under every plan for no more ranks than there are: recorded and plain steps, compared."""
    results: list[dict[str, Any]] = []
    with mock.patch.object(oddrank.runtime.cache, "BLOCK", 16):
        for plan in plans:
            tp = Plan.from_json(plan).tp
            name = f"local:oddrank-test-{group.broadcast(time.monotonic_ns())}-{tp}"
            if group.rank < tp:
                part = connect(group.rank, tp, name)
                model = loaded(path, plan, part)
                long = [Sampling(max_tokens=80, ignore_eos=True)]
                mixed = [Sampling(max_tokens=24, temperature=0.8, seed=5), Sampling(max_tokens=7)]
                results.append(both_ways(model, PROMPTS[:1], long))
                results.append(both_ways(model, PROMPTS, mixed, slots=3, eos=[2, 9]))
                before = part.counts.all_reduce, part.counts.all_gather
                engine = Engine(model)
                engine.generate(PROMPTS[:1], Sampling(max_tokens=11, ignore_eos=True))
                engine.generate(PROMPTS[:1], Sampling(max_tokens=11, ignore_eos=True))
                after = part.counts.all_reduce, part.counts.all_gather
                results[-1]["collectives"] = (after[0] - before[0], after[1] - before[1], len(model.layers))
                part.close()
            group.barrier()
    return results


def until_killed(rendezvous: str, rank: int, size: int, path: str, plan_path: str) -> None:
    """Decode without end; says when steps are replayed, and when it learns that a rank is gone."""
    torch.set_num_threads(1)
    group = connect(rank, size, rendezvous)
    with open(plan_path, "rb") as file:
        engine = Engine(loaded(path, file.read(), group))
    said = False

    def on_token(_prompt: int, _token: int) -> None:
        nonlocal said
        if not said and engine.steps.replayed > 10:
            said = True
            print("ready", flush=True)

    while True:
        try:
            engine.generate(PROMPTS[:2], Sampling(max_tokens=150, ignore_eos=True), on_token)
        except OddrankError as error:
            print(time.monotonic(), isinstance(error, PeerLostError), error, flush=True)
            return
