"""Recorded decode steps of rank processes: collectives on the tape, at every size; and a rank that dies in a replay."""

import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from runtime.capture import recorded_targets
from runtime.tiny import tiny

from oddrank.native.compiled import library
from oddrank.planner import make_plan
from oddrank.runtime.parallel import run_ranks

pytestmark = pytest.mark.skipif(library() is None, reason="no compiled kernels")
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny llama with biases, an untied head and 5 heads' worth of unevenness, in float64."""
    path = tmp_path_factory.mktemp("model")
    tiny("llama", max_position_embeddings=256).hf.save_pretrained(path)
    return path


def test_ranks_replay_the_bits_of_their_own_steps(saved: Path) -> None:
    plans = [make_plan(saved, tp).plan.to_json() for tp in (1, 2, 3)]
    for rank, results in enumerate(run_ranks(3, recorded_targets.decode, str(saved), plans, threads=1)):
        assert len(results) == 2 * (3 - rank)
        for number, told in enumerate(results):
            assert told["different"] == 0 and told["texts equal"], (rank, number, told)
            assert told["refused"] == [] and told["not recorded"] == 0, (rank, number, told)
            assert told["replayed"] > (64 if number % 2 == 0 else 10), (rank, number, told)
        for tp, told in zip(range(rank + 1, 4), results[1::2], strict=True):
            reduces, gathers, layers = told["collectives"]
            # two prompts of one prefill and ten steps each; one step is computed twice, and two are agreed on
            assert reduces == 23 * (2 * layers + 1), (rank, tp)
            assert gathers == 23 + (2 if tp > 1 else 0), (rank, tp)


def test_a_rank_killed_in_a_replay_is_noticed_by_all_others(saved: Path, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_bytes(make_plan(saved, 3).plan.to_json())
    name = f"local:oddrank-test-{secrets.token_hex(8)}"
    code = "import sys, recorded_targets as t; a = sys.argv; t.until_killed(a[1], int(a[2]), 3, a[3], a[4])"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", code, name, str(rank), str(saved), str(plan)],
            stdout=subprocess.PIPE, cwd=HERE, text=True,
        )
        for rank in range(3)
    ]  # fmt: skip
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        time.sleep(0.2)
        killed = time.monotonic()
        processes[1].send_signal(signal.SIGKILL)
        for rank in (0, 2):
            noticed, lost, message = processes[rank].communicate(timeout=30)[0].split(" ", 2)
            assert lost == "True" and "Rank 1 of 3" in message and "has died" in message
            assert float(noticed) - killed < 2.0
    finally:
        for process in processes:
            process.kill()
            process.wait()
