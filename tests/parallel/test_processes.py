"""Groups of real processes: the same sums as in one process, and no process left waiting or left over."""

import os
import secrets
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import rank_targets
import torch

from oddrank import CheckFailedError, OddrankError
from oddrank.runtime.parallel import LocalGroup, Ranks, connect, run_ranks

HERE = str(Path(__file__).parent)


def _gone(pids: list[int], within: float = 10.0) -> bool:
    """Whether the processes end (or are only waited for) within some seconds."""
    end = time.monotonic() + within
    while time.monotonic() < end:
        if not any(_runs(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _shared_memory_files() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if "oddrank" in name or name.startswith("psm_")}


@pytest.fixture(scope="module", params=[2, 3, 4])
def ranks(request: pytest.FixtureRequest) -> list[dict[str, Any]]:
    return run_ranks(request.param, rank_targets.everything, request.param == 3, threads=1)


def test_sums_over_processes(ranks: list[dict[str, Any]]) -> None:
    size = len(ranks)
    local = LocalGroup.run(size, rank_targets.reductions)[0]
    for result in ranks:
        assert result["kind"] == "SharedMemoryGroup"
        if size == 3:
            assert (result["over tcp"], result["fallback"]) == ("SharedMemoryGroup", "DistributedGroup")
        assert result["counts"] == (len(local), len(local))
        assert result["wrong"] == 0
        for key, expected in local.items():
            assert torch.equal(result["reductions"][key], expected), key
            if size == 3:
                assert torch.equal(result["gloo reductions"][key], expected), key
    for key, found in ranks[0]["reductions"].items():
        dtype, elements, repeat = key if isinstance(key, tuple) else (torch.float32, 24, 0)
        each = rank_targets.terms(size, elements, dtype).double() * 2**repeat
        exact = each.sum(0).view(found.shape)
        # One rounding to the dtype, and size - 1 additions in the accumulator.
        narrow, wide = torch.finfo(dtype).eps, torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        bound = exact.abs() * narrow + each.abs().sum(0).view(found.shape) * size * wide
        if dtype == torch.float16:
            bound = bound + torch.finfo(dtype).tiny
        assert ((found.double() - exact).abs() <= bound).all(), key


def test_gathers_over_processes(ranks: list[dict[str, Any]]) -> None:
    size = len(ranks)
    expected: list[Any] = []
    for dtype in (torch.bfloat16, torch.float32, torch.int64):
        for widths in rank_targets.WIDTHS:
            parts = [rank_targets.part(rank, dtype, widths[rank]) for rank in range(size)]
            whole = torch.cat(parts, 1)
            expected += [whole, whole.T, [part.flatten() for part in parts]]
    expected.append([torch.tensor(float(rank)) for rank in range(size)])
    expected += [(rank, 700_000) for rank in range(size)]
    for result in ranks:
        for kind in ("gathers", "gloo gathers") if size == 3 else ("gathers",):
            assert len(result[kind]) == len(expected)
            for found, wanted in zip(result[kind], expected, strict=True):
                if isinstance(wanted, list):
                    assert all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))
                elif isinstance(wanted, tuple):
                    assert found == wanted
                else:
                    assert found.dtype == wanted.dtype and torch.equal(found, wanted)


def test_ranks_that_disagree_are_told() -> None:
    results = run_ranks(3, rank_targets.disagreements)
    words = ["all_reduce of 36 bytes", "32 bytes of torch.int32", "all_gather", "barrier"]
    for number, text in enumerate(words):
        for rank in range(3):
            said = results[rank][number]
            assert "different collectives" in said and text in said, (rank, said)
            assert "all_reduce of 32 bytes of torch.float32" in said, (rank, said)
    for rank in (0, 2):
        assert "Rank 1 of 3" in results[rank][4] and "has left the group" in results[rank][4]
    assert results[1][4] == "no error"


@pytest.mark.parametrize(
    ("how", "size", "error", "words"),
    [
        ("raise", 2, OddrankError, "Rank 1 of 2 failed: ZeroDivisionError: by hand"),
        ("check", 2, CheckFailedError, "Rank 1 of 2 failed: The logits differ."),
        ("kill", 3, OddrankError, r"Rank 1 of 3 \(pid \d+\) was killed by SIGKILL"),
    ],
)
def test_a_rank_that_fails_ends_the_others(how: str, size: int, error: type[Exception], words: str) -> None:
    before = _shared_memory_files()
    with Ranks(size, rank_targets.fail, how) as ranks:
        with pytest.raises(error, match=words) as caught:
            ranks.join()
        assert type(caught.value) is error
        assert _gone(ranks.pids, within=1.0)
        with pytest.raises(error, match=words):
            ranks.receive()
        with pytest.raises(error, match=words):
            ranks.send("hello")
    if how == "raise":
        assert 'raise ZeroDivisionError("by hand")' in caught.value.__notes__[0]
    assert _shared_memory_files() == before


def test_a_killed_peer_is_noticed_without_a_launcher() -> None:
    before = _shared_memory_files()
    name = f"local:oddrank-test-{secrets.token_hex(8)}"
    code = "import sys, rank_targets; rank_targets.lockstep(sys.argv[1], int(sys.argv[2]))"
    processes = [
        subprocess.Popen([sys.executable, "-c", code, name, str(rank)], stdout=subprocess.PIPE, cwd=HERE, text=True)
        for rank in range(2)
    ]
    try:
        for process in processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        time.sleep(0.3)  # rank 0 sleeps in its second all-reduce by now
        killed = time.monotonic()
        processes[1].send_signal(signal.SIGKILL)  # and is not waited for: a zombie counts as dead
        out = processes[0].communicate(timeout=20)[0]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    noticed, _, message = out.partition(" ")
    assert f"Rank 1 of 2 (pid {processes[1].pid}) has died" in message
    assert float(noticed) - killed < 1.0
    assert _shared_memory_files() == before


def test_messages_results_and_threads() -> None:
    with Ranks(2, rank_targets.echo) as ranks:
        ranks.send(1)
        ranks.send(5, rank=1)
        got = sorted((rank, tensor.tolist()) for rank, tensor in (ranks.receive(timeout=60) for _ in range(3)))
        assert got == [(0, [1.0, 1.0]), (1, [1.0, 1.0]), (1, [5.0, 5.0])]
        with pytest.raises(TimeoutError):
            ranks.receive(timeout=0.05)
        ranks.send("stop")
        counts = [len(placement.threads) for placement in ranks.placements]
        assert ranks.join() == [(rank, threads, str(threads)) for rank, threads in enumerate(counts)]
        with pytest.raises(OddrankError, match="Every rank has returned"):
            ranks.receive(timeout=5)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_ranks_end_with_their_launcher(number: signal.Signals) -> None:
    code = (
        "import rank_targets\n"
        "from oddrank.runtime.parallel import Ranks\n"
        "with Ranks(2, rank_targets.wait_forever) as ranks:\n"
        "    print(*[ranks.receive()[1] for _ in range(2)], flush=True)\n"
        "    ranks.join()\n"
    )
    launcher = subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=HERE, text=True
    )
    assert launcher.stdout is not None and launcher.stderr is not None
    with launcher, launcher.stdout, launcher.stderr:
        pids = [int(pid) for pid in launcher.stdout.readline().split()]
        assert len(pids) == 2 and all(_runs(pid) for pid in pids)
        launcher.send_signal(number)
        assert _gone([*pids, launcher.pid])
        if number == signal.SIGINT:
            assert launcher.stderr.read().strip().endswith("KeyboardInterrupt")


def test_the_launcher_imports_no_torch() -> None:
    code = (
        "import sys, oddrank.runtime.parallel as parallel\n"
        "parallel.Ranks, parallel.run_ranks, parallel.Link\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_bad_arguments_are_refused() -> None:
    with pytest.raises(OddrankError, match="At least one rank"):
        run_ranks(0, rank_targets.wait_forever)
    with pytest.raises(OddrankError, match="at least one thread"):
        run_ranks(1, rank_targets.wait_forever, threads=0)
    with pytest.raises(OddrankError, match="no rank 2 in a group of 2"):
        connect(2, 2, "local:nowhere")
    for rendezvous in ("nowhere", "tcp://host", "local:", "tcp:host:1"):
        with pytest.raises(OddrankError, match="cannot meet at"):
            connect(0, 2, rendezvous)
    assert type(connect(0, 1, "local:nowhere")).__name__ == "SoloGroup"
