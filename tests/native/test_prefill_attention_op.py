"""Attention of prompts, each level, against plain loops in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from oddrank.native import Library
from oddrank.native.pages import Pages
from oddrank.native.prefill import prefill_attention
from oddrank.runtime.layers.attention import HeadMap

SCALE = 0.3
TYPES = [torch.float32, torch.bfloat16, torch.float16]
PARTNERS = [([0], 1), ([0, 0, 0, 1, 1, 1], 2), ([2, 0, 0, 2, 0, 2, 0], 4)]


class Prompts:
    """Sequences of which the last `new` tokens of each are a step's, in a cache whose other memory is NaN."""

    def __init__(
        self, partner: list[int], kv_heads: int, sequences: list[tuple[int, int]], dim: int, dtype: torch.dtype,
        page: int = 0,
    ) -> None:  # fmt: skip
        """sequences: (tokens before the step, tokens of it) of each; sequence i is in slot n - 1 - i."""
        self.partner, self.kv_heads, self.sequences, self.dim = partner, kv_heads, sequences, dim
        draw, n = torch.Generator().manual_seed(dim), len(sequences)
        lengths = [past + new for past, new in sequences]
        self.k = [torch.randn(kv_heads, t, dim, generator=draw).to(dtype) for t in lengths]
        self.v = [torch.randn(kv_heads, t, dim, generator=draw).to(dtype) for t in lengths]
        self.heads = HeadMap(np.array(partner, dtype=np.int64), kv_heads)
        tokens = sum(new for _, new in sequences)
        wide = torch.randn(tokens, len(partner), 2, dim, generator=draw)  # heads are not where a dense tensor has them
        self.q, self.gate = wide.unbind(2)
        starts = np.cumsum([0, *(new for _, new in sequences)])
        self.spans = torch.tensor(
            [(n - 1 - i, starts[i], new, past) for i, (past, new) in enumerate(sequences)], dtype=torch.int64
        )
        size = page or max(lengths)
        each = -(-max(lengths) // size)
        order = (torch.randperm(n * each, generator=draw) if page else torch.arange(n)).reshape(n, each)
        self.table = order if page else None
        self.buffer = torch.full((n * each, 2 * kv_heads, size, dim), float("nan"), dtype=dtype)
        for i, t in enumerate(lengths):
            for at in range(t):
                row = self.buffer[order[n - 1 - i, at // size]]
                row[:kv_heads, at % size], row[kv_heads:, at % size] = self.k[i][:, at], self.v[i][:, at]

    def run(self, library: Library, threads: int = 1, **more: object) -> Tensor:
        pages, heads = Pages.of(self.buffer, self.table), self.heads
        return prefill_attention(
            library, self.q, pages, self.spans, heads.starts, heads.queries, SCALE,
            threads=threads, **more,  # type: ignore[arg-type]
        )  # fmt: skip

    def want(self, window: int | None = None, gated: bool = False, sinks: Tensor | None = None) -> Tensor:
        found = []
        for (_, row, new, past), k, v in zip(self.spans.tolist(), self.k, self.v, strict=True):
            at, key = torch.arange(past, past + new)[:, None], torch.arange(past + new)
            hidden = key > at if window is None else (key > at) | (key <= at - window)
            heads = []
            for h, j in enumerate(self.partner):
                scores = self.q[row : row + new, h].double() @ k[j].double().T * SCALE
                scores = scores.masked_fill(hidden, float("-inf"))
                if sinks is not None:
                    scores = torch.cat([scores, sinks[h].double().expand(new, 1)], 1)
                heads.append(torch.softmax(scores, 1)[:, : past + new] @ v[j].double())
            out = torch.stack(heads, 1)
            found.append(out * torch.sigmoid(self.gate[row : row + new].double()) if gated else out)
        return torch.cat(found).flatten(1)


def close(got: Tensor, want: Tensor, within: float = 1e-5) -> bool:
    """Values are near one; a score of 99 products near ten is off by 1e-5 at most, and so is its weight."""
    return torch.allclose(got.double(), want, rtol=0, atol=within)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("dim", [8, 20, 99])
@pytest.mark.parametrize("partner,kv_heads", PARTNERS, ids=str)
def test_prompts(dtype: torch.dtype, dim: int, partner: list[int], kv_heads: int, level: str, kernels: Library) -> None:
    case = Prompts(partner, kv_heads, [(0, 50), (0, 1), (70, 33), (47, 49)], dim, dtype)
    for window in (None, 1, 30):
        assert close(case.run(kernels, window=window), case.want(window)), window
    assert close(case.run(kernels, gate=case.gate), case.want(gated=True))


@pytest.mark.parametrize("page", [0, 16, 48, 100])
@pytest.mark.parametrize("window", [None, 150])
def test_pages_and_threads(page: int, window: int | None, level: str, kernels: Library) -> None:
    case = Prompts([0, 1, 1, 0, 1], 2, [(300, 130), (0, 96), (5, 1)], 32, torch.float32, page)
    got = case.run(kernels, window=window, gate=case.gate)
    assert close(got, case.want(window, True))
    for threads in (2, 3):
        assert torch.equal(case.run(kernels, threads, window=window, gate=case.gate), got)


@pytest.mark.parametrize("window", [None, 40])
def test_neither_other_prompts_nor_cuts_change_a_bit(window: int | None, level: str, kernels: Library) -> None:
    whole = Prompts([0, 1, 1], 2, [(0, 150), (20, 7)], 16, torch.float32)
    got = whole.run(kernels, window=window)
    whole.spans, q = whole.spans[:1], whole.q
    assert torch.equal(whole.run(kernels, window=window)[:150], got[:150])
    for start, stop in ((0, 37), (37, 101), (101, 150)):
        whole.spans, whole.q = torch.tensor([[1, 0, stop - start, start]]), q[start:stop]
        assert torch.equal(whole.run(kernels, window=window), got[start:stop])


def test_sinks_of_prompts(level: str, kernels: Library) -> None:
    sinks = torch.tensor([-3.0, 0.5, 40.0])
    case = Prompts([0, 1, 1], 2, [(0, 70), (60, 20)], 24, torch.float32)
    assert close(case.run(kernels, sinks=sinks), case.want(sinks=sinks))


def test_scores_far_apart_in_prompts(level: str, kernels: Library) -> None:
    """Weights from e^-400 to one, in rising and in falling order; nothing overflows on the way."""
    case = Prompts([0], 1, [(0, 300)], 8, torch.float32)
    case.q = torch.tensor([0.7, 0, 0, 0, 0, 0, 0, 0]).expand(300, 1, 8)
    for scores in (torch.linspace(-1000, 1000, 300), torch.linspace(1000, -1000, 300)):
        case.k[0][0] = scores[:, None]
        case.buffer[0, 0] = case.k[0][0]
        assert close(case.run(kernels), case.want(), 1e-4)


def test_not_a_number_is_not_hidden_in_prompts(level: str, kernels: Library) -> None:
    case = Prompts([0, 1], 2, [(0, 60)], 16, torch.float32)
    case.buffer[0, 0, 17, 3] = float("nan")
    got = case.run(kernels).view(60, 2, 16)
    assert got[17:, 0].isnan().all() and got[:, 1].isfinite().all()
