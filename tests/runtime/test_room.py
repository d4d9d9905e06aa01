"""KV capacity as `plan` predicts it and as a loaded rank finds it; the bar while it loads."""

from __future__ import annotations

import io
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from oddrank.checkpoint import Checkpoint
from oddrank.layout.capacity import GIB, Room, rooms, tokens_together
from oddrank.planner import make_plan
from oddrank.runtime.parallel import Group, LocalGroup
from oddrank.runtime.precision import Precision
from oddrank.runtime.progress import load_bar
from oddrank.runtime.room import describe, measure_room, tokens_of_all
from oddrank.runtime.worker import load_rank
from oddrank.synth import describe_release, write_checkpoint
from oddrank.transform.slice import RankSlice


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny qwen3_5 with an MTP layer, bf16."""
    path = tmp_path_factory.mktemp("hybrid") / "model"
    write_checkpoint(describe_release("qwen3_5", "bf16", size="tiny"), path)
    return path


def test_arithmetic_by_hand() -> None:
    room = Room(memory=1000, weights=400, token=7, state=50)
    assert room.reserve == 100
    assert room.tokens() == (1000 - 100 - 400 - 50) // 7 == 64
    assert room.tokens(sequences=4) == 300 // 7
    assert room.tokens(sequences=11) == 0
    assert Room(1000, 950, 7).tokens() == 0
    assert Room(1000, 400, 0).tokens() is None and Room(1000, 950, 0).tokens() == 0
    assert tokens_together([room, Room(1000, 400, 0), Room(2000, 400, 7)]) == 64
    assert tokens_together([Room(1000, 400, 0)]) is None


def test_a_hybrid_has_room_as_predicted(hybrid: Path) -> None:
    plan = make_plan(hybrid, 3, rank_memory=(3, 3, 2)).plan
    with Checkpoint.open(hybrid) as checkpoint:

        def rank(group: Group) -> tuple[Room, int | None, int, int, str]:
            model, loaded = load_rank(plan, checkpoint, group, Precision.of("fp32", group.device))
            found = measure_room(model, plan, group)
            together, cache = tokens_of_all(found, group), model.new_cache(1)
            assert cache.states is not None
            return found, together, loaded.stored_bytes, cache.states.inputs.nbytes, describe(found, together)

        measured = LocalGroup.run(3, rank)
    config = checkpoint.config.get("text_config", checkpoint.config)
    full = sum(kind == "full_attention" for kind in config["layer_types"])
    nets = len(config["layer_types"]) - full
    for number, (predicted, (found, together, stored, inputs, text)) in enumerate(
        zip(rooms(plan, plan.shares), measured, strict=True)
    ):
        assert found.memory == predicted.memory == (3, 3, 2)[number] * GIB
        heads = plan.layout("kv_heads").counts()[number]
        # only attention layers keep keys and values; on CPUs in fp32, where the plan counts the config's bf16
        assert found.token == full * heads * 2 * config["head_dim"] * 4 == 2 * predicted.token
        values = plan.layout("gdn_v_heads").counts()[number]
        assert predicted.state == nets * values * config["linear_key_head_dim"] * config["linear_value_head_dim"] * 4
        assert found.state == predicted.state + inputs
        assert stored < predicted.weights < 1.5 * stored  # the plan has the MTP layer, which is not run
        assert 1.9 * stored < found.weights < 2.1 * stored  # fp32 of bf16
        assert together == min(other.tokens() or 0 for other, *_ in measured)
        assert f"{found.token} bytes of KV cache a token: room for {found.tokens()} tokens" in text


@pytest.mark.parametrize(("rank", "terminal"), [(0, True), (1, True), (0, False)])
def test_the_bar_is_on_rank_0_alone_and_ends_full(
    hybrid: Path, rank: int, terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = RankSlice(make_plan(hybrid, 2).plan, None, rank)
    screen = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", screen)
    monkeypatch.setenv("TERM", "xterm")
    main = [name for name in part.names() if part.part_of(name) is None]
    with load_bar(part, cast(Group, SimpleNamespace(rank=rank, size=2)), ("MTP", "vision")) as advance:
        for name in main:
            advance(name)
    shown = screen.getvalue()
    assert ("loading, rank 0 of 2" in shown) == (rank == 0 and terminal)
    if shown:
        total = sum(math.prod(part.shape(name)) * {"BF16": 2, "F32": 4}[part.dtype(name)] for name in main)
        done, whole = re.findall(r"([0-9.]+)/([0-9.]+) (?:KiB|MiB)", shown)[-1]
        assert done == whole
        assert abs(float(whole) - total / (2**20 if "MiB" in shown else 2**10)) < 0.1
