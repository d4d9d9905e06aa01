"""A cache takes memory as it is written to."""

from __future__ import annotations

from pathlib import Path

import torch

from oddrank.runtime.pages import untouched_zeros


def anonymous_bytes() -> int:
    """RssAnon of this process, proc(5)."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("RssAnon")).split()[1])


def test_zeros_take_no_memory_until_written() -> None:
    before = anonymous_bytes()
    made = untouched_zeros((4, 1024, 64, 1024), torch.bfloat16, torch.device("cpu"))
    assert made.nbytes == 512 << 20 and made.data_ptr() % 64 == 0
    assert anonymous_bytes() - before < 32 << 20
    assert not made[1, ::16].any()
    made[0, :128] = 1
    assert anonymous_bytes() - before >= 16 << 20
