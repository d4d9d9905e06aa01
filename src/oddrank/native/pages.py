"""Where the cache's keys and values lie, for the operations that write and read them."""

import ctypes

import torch
from torch import Tensor

from oddrank.errors import OddrankError

_NUMBERS = {torch.bfloat16: 0, torch.float16: 1, torch.float32: 2}


class Pages(ctypes.Structure):
    """pages.h's Pages. `kept`: what it points into."""

    _fields_ = (
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("table", ctypes.c_void_p),
        ("table_row", ctypes.c_int64),
        ("page_size", ctypes.c_int64),
        ("page_stride", ctypes.c_int64),
        ("head_stride", ctypes.c_int64),
        ("dim", ctypes.c_int64),
        ("number", ctypes.c_int32),
    )

    kept: tuple[Tensor, ...] = ()

    @classmethod
    def of(cls, layer: Tensor, table: Tensor | None = None) -> "Pages":
        """layer: [pages, 2 * KV heads, page size, head_dim], keys first, a layer's part of a cache on the CPU in bf16,
        fp16 or fp32, its last two dimensions dense. table: int64 [slots, most pages of one], the pages of each slot in
        order; None where slot i has page i, alone.

        OddrankError for numbers of another type.
        """
        if layer.dtype not in _NUMBERS:
            raise OddrankError(f"The compiled attention reads a cache of bf16, fp16 or fp32, not of {layer.dtype}.")
        page, head, row, _ = layer.stride()
        assert row == layer.shape[3] and (table is None or table.stride(-1) == 1)
        start, values = layer.data_ptr(), layer.shape[1] // 2 * head * layer.element_size()
        made = cls(
            start, start + values, None if table is None else table.data_ptr(),
            0 if table is None else table.stride(0), layer.shape[2], page, head, layer.shape[3],
            _NUMBERS[layer.dtype],
        )  # fmt: skip
        made.kept = (layer,) if table is None else (layer, table)
        return made
