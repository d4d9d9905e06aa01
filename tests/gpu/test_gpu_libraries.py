"""What flashinfer and flash-linear-attention are given, by stand-ins that do what their documentation says."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import oddrank.gpu.attention as attention
import oddrank.gpu.delta as delta
from oddrank.runtime.cache import KVCache
from oddrank.runtime.layers.gated_delta import one_sequence, one_token
from oddrank.runtime.step import Step

F64 = torch.float64


class PagedWrapper:
    """flashinfer.BatchDecodeWithPagedKVCacheWrapper for the layout "HND": sequence i has the pages
    indices[indptr[i] : indptr[i + 1]], of which the last has last_page_len[i] tokens. Computes in float64."""

    def __init__(self, workspace: Tensor, layout: str, *, use_cuda_graph: bool, **options: Any) -> None:
        assert layout == "HND" and workspace.numel() >= 1 << 20
        self.static, self.buffers = use_cuda_graph, options
        if use_cuda_graph:
            assert len(options["paged_kv_indptr_buffer"]) == len(options["paged_kv_last_page_len_buffer"]) + 1

    def plan(
        self, indptr: Tensor, indices: Tensor, last: Tensor, q_heads: int, kv_heads: int, width: int, page: int,
        *, pos_encoding_mode: str, window_left: int, q_data_type: Any, kv_data_type: Any, sm_scale: float,
    ) -> None:  # fmt: skip
        assert pos_encoding_mode == "NONE" and all(t.dtype == torch.int32 for t in (indptr, indices, last))
        assert bool((last >= 1).all() and (last <= page).all()) and len(indptr) == len(last) + 1
        assert q_heads % kv_heads == 0 and len(indices) == int(indptr[-1])
        if self.static:
            assert len(indices) <= len(self.buffers["paged_kv_indices_buffer"])
        self.planned = indptr.tolist(), indices.tolist(), last.tolist()
        self.group, self.page, self.left, self.scale = q_heads // kv_heads, page, window_left, sm_scale

    def run(self, q: Tensor, paged: tuple[Tensor, Tensor]) -> Tensor:
        indptr, indices, last = self.planned
        out = torch.empty(q.shape, dtype=F64)
        for i, rows in enumerate(q.double()):
            pages = indices[indptr[i] : indptr[i + 1]]
            length = (len(pages) - 1) * self.page + last[i]
            k, v = (torch.cat([side[p] for p in pages], 1)[:, :length].double() for side in paged)
            first = 0 if self.left < 0 else max(0, length - 1 - self.left)
            for h, row in enumerate(rows):
                keys, values = k[h // self.group, first:], v[h // self.group, first:]
                out[i, h] = torch.softmax(keys @ row * self.scale, 0) @ values
        return out.to(q.dtype)


@pytest.fixture
def flashinfer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        attention, "flashinfer", lambda: SimpleNamespace(BatchDecodeWithPagedKVCacheWrapper=PagedWrapper)
    )


def full_cache(slots: int, kv_heads: int, layers: int = 2) -> KVCache:
    cache = KVCache(layers, slots, kv_heads, 64, torch.bfloat16)
    cache.reserve(300)
    for layer in range(layers):
        cache.layer(layer).copy_(torch.randn(slots, 2 * kv_heads, cache.capacity, 64))
    return cache


def exact(q: Tensor, layer: Tensor, lengths: Sequence[int], group: int, window: int | None, scale: float) -> Tensor:
    out = torch.empty(q.shape, dtype=F64)
    kv_heads = layer.shape[1] // 2
    for i, length in enumerate(lengths):
        first = 0 if window is None else max(0, length - window)
        for h in range(q.shape[1]):
            keys = layer[i, h // group, first:length].double()
            values = layer[i, kv_heads + h // group, first:length].double()
            out[i, h] = torch.softmax(keys @ q[i, h].double() * scale, 0) @ values
    return out


@pytest.mark.parametrize("window", [None, 5, 40])
@pytest.mark.parametrize("static", [True, False])
def test_the_cache_as_pages(flashinfer: None, static: bool, window: int | None) -> None:
    """Lengths in the middle of a page, at its ends, and of one token; a layer that is not the first; fewer sequences
    than slots."""
    cache, lengths = full_cache(6, 3), [1, 16, 17, 299]
    plan = attention.PagedDecode(cache, 4, 6, 0.125, window, static)
    plan.plan(lengths)
    q = torch.randn(4, 6, 64).bfloat16()
    got = plan.run(q, cache.layer(1))
    want = exact(q, cache.layer(1), lengths, 2, window, 0.125)
    assert got.dtype == torch.bfloat16 and torch.allclose(got.double(), want, rtol=2**-7, atol=2**-8)
    lengths = [2, 3, 4, 5]  # another step
    plan.plan(lengths)
    got, want = plan.run(q, cache.layer(0)), exact(q, cache.layer(0), lengths, 2, window, 0.125)
    assert torch.allclose(got.double(), want, rtol=2**-7, atol=2**-8)


def test_a_step_plans_once_for_all_layers(flashinfer: None) -> None:
    cache = full_cache(3, 2)
    step = Step.of([(0, [1], 20), (1, [1], 7)], "cpu")
    q = torch.randn(2, 2, 64).bfloat16()
    for layer in range(2):
        got = attention.decode(q, step, cache, layer, 0.125, None)
        assert got is not None
        want = exact(q, cache.layer(layer), [21, 8], 1, None, 0.125)
        assert torch.allclose(got.double(), want, rtol=2**-7, atol=2**-8)
    assert len(step.views) == 1


def test_heads_that_flashinfer_does_not_take(flashinfer: None) -> None:
    assert not attention.by_pages(KVCache(1, 1, 1, 80, torch.bfloat16))
    assert not attention.by_pages(KVCache(1, 1, 1, 64, torch.float32))
    assert not attention.by_pages(KVCache(1, 1, 0, 64, torch.bfloat16))


def recurrent(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, scale: float, initial_state: Tensor,
    output_final_state: bool, cu_seqlens: Tensor | None = None, **others: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """fla's gated delta rule, token by token, as its documentation has it: q, k [B, T, H, K], v [B, T, H, V], g (log)
    and beta [B, T, H], states [N, H, K, V]; with cu_seqlens [N + 1], B is 1 and sequences lie end to end."""
    assert output_final_state and not others
    batch, tokens = q.shape[:2]
    bounds = [(b, 0, tokens, b) for b in range(batch)]
    if cu_seqlens is not None:
        ends = cu_seqlens.tolist()
        assert batch == 1 and cu_seqlens.dtype == torch.int64 and ends[-1] == tokens
        bounds = [(0, a, b, i) for i, (a, b) in enumerate(pairwise(ends))]
    assert initial_state.shape == (len(bounds), q.shape[2], q.shape[3], v.shape[3])
    state, out = initial_state.double().clone(), torch.zeros(v.shape, dtype=F64)
    for b, start, stop, n in bounds:
        for t in range(start, stop):
            for h in range(q.shape[2]):
                s = state[n, h] * torch.exp(g[b, t, h].double())
                key = k[b, t, h].double()
                s = s + torch.outer(key, beta[b, t, h].double() * (v[b, t, h].double() - key @ s))
                state[n, h], out[b, t, h] = s, scale * q[b, t, h].double() @ s
    return out.to(v.dtype), state.to(initial_state.dtype)


def chunked(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
    assert all(t.dtype == torch.bfloat16 for t in args)  # it refuses fp32
    return recurrent(*args, **kwargs)


@pytest.fixture
def fla(monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(fused_recurrent_gated_delta_rule=recurrent, chunk_gated_delta_rule=chunked)
    monkeypatch.setattr(delta, "library", lambda: found)


def inputs(tokens: int, heads: int = 3, key: int = 8, value: int = 5) -> list[Tensor]:
    torch.manual_seed(tokens)
    q, k = (torch.nn.functional.normalize(torch.randn(tokens, heads, key), dim=-1) for _ in range(2))
    v, g, beta = torch.randn(tokens, heads, value), -torch.rand(tokens, heads), torch.rand(tokens, heads)
    return [t.bfloat16().float() for t in (q, k, v)] + [g, beta]


def test_decode_steps_of_the_delta_rule(fla: None) -> None:
    x, memory = inputs(4), torch.randn(6, 3, 8, 5)
    ours = memory.clone()
    step = Step.of([(i, [1], 3) for i in range(4)], "cpu")
    got = delta.read(*x, step, memory, torch.bfloat16)
    want = one_token(*x, ours[:4])
    assert got is not None and torch.allclose(got, want, rtol=1e-5, atol=1e-5)
    assert torch.allclose(memory, ours, rtol=1e-5, atol=1e-5)


def test_prompts_in_any_slots(fla: None) -> None:
    x, memory = inputs(12), torch.randn(5, 3, 8, 5)
    ours = memory.clone()
    step = Step.of([(3, [1] * 7, 2), (0, [1], 0), (4, [1] * 4, 0)], "cpu")
    got = delta.read(*x, step, memory, torch.bfloat16)
    want = torch.cat([one_sequence(*(t[s.start : s.stop] for t in x), ours[s.slot]) for s in step.segments])
    assert got is not None and torch.allclose(got, want, rtol=2**-6, atol=2**-6)  # rounded to bf16
    assert torch.allclose(memory, ours, rtol=1e-4, atol=1e-4)


def test_what_fla_does_not_take(fla: None) -> None:
    x, memory = inputs(1), torch.randn(1, 3, 8, 5)
    step = Step.of([(0, [1], 3)], "cpu")
    assert delta.read(*x, step, memory, torch.float32) is None
    assert delta.read(*x, step, memory.double(), torch.bfloat16) is None
