"""Sums and gathered columns of rank processes, compiled and in Python: every size of group, every dtype, any shape."""

from typing import Any

import collective_targets
import pytest

from oddrank.native.compiled import library
from oddrank.runtime.parallel import run_ranks

COMPILED = library() is not None


@pytest.fixture(scope="module")
def told() -> list[dict[str, Any]]:
    """Of seven ranks, which form groups of two to seven."""
    return run_ranks(7, collective_targets.everything, COMPILED, threads=1)


def test_every_size_of_group_with_and_without_the_library(told: list[dict[str, Any]]) -> None:
    for found in told:
        assert found["wrong"] == []
        assert found["kinds"] == {("SharedMemoryGroup", kind) for kind in ((True, False) if COMPILED else (False,))}


@pytest.mark.skipif(not COMPILED, reason="no compiled kernels")
@pytest.mark.parametrize("size", [2, 3])
def test_collectives_on_tape(told: list[dict[str, Any]], size: int) -> None:
    for rank, each in enumerate(told[:size]):
        found = each[f"tape of {size}"]
        assert found["stray"] is None and found["wrong"] == 0
        longer, barrier = found["said"]
        assert "different collectives" in longer and "36 bytes" in longer and "32 bytes" in longer, (rank, longer)
        assert "different collectives" in barrier and "barrier" in barrier, (rank, barrier)
