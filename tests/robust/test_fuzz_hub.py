"""Mutated models on a hub: planned, or refused in a paragraph, exactly as the same files are on disk."""

from __future__ import annotations

import shutil
from pathlib import Path
from random import Random
from typing import Any

import pytest
from fuzz_model import originals, write
from fuzz_mutations import mutate
from hub.hub_server import Hub, Repo

from oddrank.errors import OddrankError
from oddrank.planner import make_plan

ELSEWHERE = ("index_path", "link", "linked_folder", "pipe")
"""Mutations about where files are in a directory; a repository has names only."""


def verdict(model: str | Path, tp: int, executor: str) -> tuple[Any, str]:
    """What is planned, None where it is refused; and why."""
    try:
        plan = make_plan(model, tp, executor=executor).plan
    except OddrankError as error:
        assert str(error).isprintable()
        return None, str(error)
    return (plan.model, plan.uses, plan.layouts, plan.pairings, plan.config_digest), ""


@pytest.mark.parametrize("cases", [range(100), pytest.param(range(100, 2000), marks=pytest.mark.long)], ids=str)
def test_as_on_disk(hub: Hub, tmp_path: Path, cases: range) -> None:
    models = originals(tmp_path / "originals")
    planned = 0
    for number in cases:
        rng = Random(f"hub:{number}")
        model = rng.choice(models).copy()
        done = mutate(rng, model, models)
        if any(said.partition(":")[0] in ELSEWHERE for said in done):
            continue
        folder = write(model, tmp_path / "case", tmp_path)
        hub.repos["a/b"] = Repo(folder)
        asked = rng.choice([1, 2, 3, 5]), rng.choice(["runtime", "vllm"])
        there, here = verdict("a/b", *asked), verdict(folder, *asked)
        if "are read. Fetch the model first" in there[1]:
            there = here  # order of columns, in a tensor that is too large to ask for
        assert there[0] == here[0], (number, model.name, done, asked, there[1], here[1])
        planned += there[0] is not None
        shutil.rmtree(tmp_path / "case")
    assert planned > len(cases) // 20
    assert hub.sent < len(cases) << 20
