"""Short convolutions of prompts, each level, against torch's conv1d in float64."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812

from oddrank.native import Library
from oddrank.native.prefill import prefill_convolution


@pytest.mark.parametrize("kernel", [2, 4])
@pytest.mark.parametrize("channels", [1, 37, 600])
def test_convolution_of_prompts(channels: int, kernel: int, level: str, kernels: Library) -> None:
    draw = torch.Generator().manual_seed(channels + kernel)
    new = [5, 1, 70]
    wide = torch.randn(sum(new), channels + 9, generator=draw)
    x, taps = wide[:, 3 : 3 + channels], torch.randn(kernel, channels, generator=draw)
    before = torch.randn(4, kernel - 1, channels, generator=draw)
    spans, want, after, row = [], [], before.clone(), 0
    for slot, count in zip((2, 0, 3), new, strict=True):
        seen = torch.cat([before[slot], x[row : row + count]]).double()
        summed = F.conv1d(seen.t()[None], taps.double().t()[:, None], groups=channels)
        want.append(F.silu(summed[0].t()))
        after[slot] = seen[count:].float()
        spans.append((slot, row, count, 0))
        row += count
    for threads in (1, 3):
        inputs = before.clone()
        got = prefill_convolution(kernels, x, taps, inputs, torch.tensor(spans), threads)
        assert torch.allclose(got.double(), torch.cat(want), rtol=1e-5, atol=1e-5)
        assert torch.equal(inputs, after)
