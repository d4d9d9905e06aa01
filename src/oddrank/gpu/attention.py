"""Attention of decode steps on a GPU: by flashinfer where it is installed and takes the model's heads, else by torch.

Both read lengths from the device, so that a step can be captured in a CUDA graph. flashinfer wants a plan, made by the
host before the step, of how the work is dealt out; torch masks what lies past a sequence's end, and reads the cache up
to a length that is the step's, not the sequence's.
"""

import logging
from collections.abc import Sequence
from functools import cache as once
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from oddrank.runtime.cache import KVCache
from oddrank.runtime.step import Step

PAGE = 16
"""Tokens of a page, as flashinfer is told: it deals a sequence out by pages. The cache's capacity is a multiple."""

_WIDTHS = (64, 128, 256)
_WORKSPACE = 128 << 20

log = logging.getLogger(__name__)


@once
def flashinfer() -> Any:
    """The library, or None."""
    try:
        import flashinfer as found
    except ImportError:
        log.info("flashinfer is not installed; torch computes attention on the GPU")
        return None
    return found


def by_pages(cache: KVCache) -> bool:
    """Whether flashinfer computes attention over this cache."""
    return cache.half and cache.head_dim in _WIDTHS and cache.kv_heads > 0 and flashinfer() is not None


_eager: WeakKeyDictionary[KVCache, dict[tuple[int, int | None], "PagedDecode"]] = WeakKeyDictionary()


def decode(q: Tensor, step: Step, cache: KVCache, layer: int, scale: float, window: int | None) -> Tensor | None:
    """Attention of a decode step whose keys and values are in the cache. q [n, query slots, width], the same number at
    each KV slot, in order -> as q. None where torch is to compute it."""
    if not by_pages(cache):
        return None
    key = "pages", window
    plan: PagedDecode | None = step.views.get(key)
    if plan is None:  # a step that is not captured
        made = _eager.setdefault(cache, {})
        plan = made.get((q.shape[1], window))
        if plan is None:
            plan = made[q.shape[1], window] = PagedDecode(cache, len(q), q.shape[1], scale, window, static=False)
        plan.plan([s.length for s in step.segments])
        step.views[key] = plan
    return plan.run(q.to(cache.dtype), cache.layer(layer)).to(q.dtype).reshape(q.shape)


@once
def _workspace(device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.zeros(_WORKSPACE, dtype=torch.uint8, device=device)


class PagedDecode:
    """Decode steps of n sequences in slots 0 to n - 1 by flashinfer, over the cache as it lies.

    A layer's cache [slots, 2 * kv_heads, capacity, width] is told as pages [page, kv_heads, PAGE, width], of which each
    begins PAGE tokens after the one before; a slot's begin where its first head does.
    """

    def __init__(self, cache: KVCache, n: int, q_heads: int, scale: float, window: int | None, static: bool) -> None:
        """q_heads: queries, the same number at each KV head. static: with buffers that stay where they are."""
        self._cache, self._q_heads = ref(cache), q_heads
        self._scale, self._left = scale, -1 if window is None else window - 1
        device = cache.layer(0).device
        buffers: dict[str, Any] = {}
        if static:
            pages = n * (cache.capacity // PAGE)
            for name, size in (("indptr", n + 1), ("indices", pages), ("last_page_len", n)):
                buffers[f"paged_kv_{name}_buffer"] = torch.zeros(size, dtype=torch.int32, device=device)
        self._wrapper = flashinfer().BatchDecodeWithPagedKVCacheWrapper(
            _workspace(device), "HND", use_cuda_graph=static, use_tensor_cores=True, backend="fa2", **buffers
        )

    def plan(self, lengths: Sequence[int]) -> None:
        """Deal out a step whose sequences have these lengths, its own token included. From the host alone."""
        cache = self._cache()
        assert cache is not None
        each = 2 * cache.kv_heads * cache.capacity // PAGE
        counts = [-(-length // PAGE) for length in lengths]
        ends = torch.tensor([0, *counts], dtype=torch.int32).cumsum(0, dtype=torch.int32)
        pages = torch.cat([torch.arange(slot * each, slot * each + c) for slot, c in enumerate(counts)]).int()
        last = torch.tensor([(length - 1) % PAGE + 1 for length in lengths], dtype=torch.int32)
        self._wrapper.plan(
            ends, pages, last, self._q_heads, cache.kv_heads, cache.head_dim, PAGE, pos_encoding_mode="NONE",
            window_left=self._left, q_data_type=cache.dtype, kv_data_type=cache.dtype, sm_scale=self._scale,
        )  # fmt: skip

    def run(self, q: Tensor, layer: Tensor) -> Tensor:
        """q [n, q_heads, width] in the cache's type, layer: its cache -> as q."""
        return torch.as_tensor(self._wrapper.run(q.contiguous(), paged(layer)))


def paged(layer: Tensor) -> tuple[Tensor, Tensor]:
    """A layer's keys and values [slots, 2 * kv_heads, capacity, width] as pages, two views: see `PagedDecode`."""
    slots, both, capacity, width = layer.shape
    heads = both // 2
    pages = ((slots - 1) * both * capacity + capacity) // PAGE
    shape, strides = (pages, heads, PAGE, width), (PAGE * width, capacity * width, width, 1)
    start = layer.storage_offset()
    return (
        layer.as_strided(shape, strides, start),
        layer.as_strided(shape, strides, start + heads * capacity * width),
    )
