"""Query and key heads made ready for attention: normed, rotated, keys and values put in the cache."""

import ctypes

from torch import Tensor

from oddrank.native.calls import call
from oddrank.native.compiled import Library
from oddrank.native.operations import FLOAT, INT, address, fields
from oddrank.native.pages import Pages


class RotaryArguments(ctypes.Structure):
    """rotary.cpp's."""

    _fields_ = fields("x cos sin places", "rows heads x_row x_head rotated", ("threads", INT))


class HeadsArguments(ctypes.Structure):
    """rotary.cpp's."""

    _fields_ = fields(
        "q k v q_weight k_weight cos sin places positions slots",
        "rows q_heads kv_heads row_stride q_stride kv_stride rotated",
        ("pages", Pages),
        ("eps", FLOAT),
        ("threads", INT),
    )


def rotate_(library: Library, x: Tensor, cos: Tensor, sin: Tensor, places: Tensor, threads: int = 1) -> Tensor:
    """Rotate the first channels of x [tokens, heads, head_dim] (fp32, heads dense) in place: x * cos + rotate_half(x) *
    sin. cos, sin: fp32 [rows, rotated], sin negative in its first half. places: int64 [tokens], each token's row."""
    row, head, _ = x.stride()
    arguments = RotaryArguments(
        x.data_ptr(), cos.data_ptr(), sin.data_ptr(), places.data_ptr(),
        x.shape[0], x.shape[1], row, head, cos.shape[-1], threads,
    )  # fmt: skip
    call(library.operation("rotary"), arguments, x, cos, sin, places)
    return x


def cache_heads(
    library: Library,
    q: Tensor,
    kv: Tensor,
    pages: Pages,
    rotary: tuple[Tensor, Tensor, Tensor],
    positions: Tensor,
    *,
    slots: Tensor | None = None,
    norms: tuple[Tensor, Tensor, float] | None = None,
    threads: int = 1,
) -> None:
    """Rotate q in place, and put rotated keys and the values in the cache.

    q: fp32 [tokens, query heads, head_dim] and kv: fp32 [tokens, 2 * KV heads, head_dim], keys first; heads are dense,
    and both go the same way from token to token (parts of one product). rotary: (cos, sin, places), see `rotate_`.
    positions: int64 [tokens], each token's place in its sequence. slots: int64 [tokens], the sequences' slots; None:
    token i is of slot i. norms: (query weight, key weight, eps) of an RMS norm of every head before its rotation.
    """
    row, q_head, _ = q.stride()
    kv_row, kv_head, _ = kv.stride()
    assert row == kv_row or len(q) <= 1
    kv_heads, start = kv.shape[1] // 2, kv.data_ptr()
    cos, sin, places = rotary
    q_weight, k_weight, eps = norms or (None, None, 0.0)
    arguments = HeadsArguments(
        q.data_ptr(), start, start + 4 * kv_heads * kv_head, address(q_weight), address(k_weight),
        cos.data_ptr(), sin.data_ptr(), places.data_ptr(), positions.data_ptr(), address(slots),
        q.shape[0], q.shape[1], kv_heads, row, q_head, kv_head, cos.shape[-1], pages, eps, threads,
    )  # fmt: skip
    call(
        library.operation("heads"), arguments,
        q, kv, q_weight, k_weight, cos, sin, places, positions, slots, *pages.kept,
    )  # fmt: skip
