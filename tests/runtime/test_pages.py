"""Large pages under tensors."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch

from oddrank.runtime import pages
from oddrank.runtime.pages import in_large_pages


def large(tensor: torch.Tensor) -> int:
    """Kilobytes of large pages in the mappings that have the tensor's memory, as the kernel counts them."""
    first, last, found, inside = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes, 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) < last and int(span[2], 16) > first
        elif inside and line.startswith("AnonHugePages:"):
            found += int(line.split()[1])
    return found


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists(), reason="no large pages here")
def test_a_large_tensor_is_in_large_pages() -> None:
    if "[never]" in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        pytest.skip("large pages are switched off")
    tensor = torch.empty(64 << 20, dtype=torch.uint8)
    assert in_large_pages(tensor) is tensor
    tensor.fill_(1)
    if not large(tensor):
        pytest.skip("this machine's memory has no room in whole large pages")
    assert large(tensor) <= tensor.nbytes >> 10
    assert bool((tensor == 1).all())


def test_small_tensors_and_systems_without(monkeypatch: pytest.MonkeyPatch) -> None:
    for size in (0, 1, 4096, (2 << 20) + 1):
        tensor = torch.zeros(size, dtype=torch.uint8)
        assert in_large_pages(tensor) is tensor and not tensor.any()
    monkeypatch.setattr(pages, "_SIZE", Path("/nonexistent"))
    pages._system.cache_clear()
    tensor = torch.zeros(8 << 20, dtype=torch.uint8)
    assert in_large_pages(tensor) is tensor and not tensor.any()
    pages._system.cache_clear()
