"""Attention of a decode step: one token of each sequence over what the cache holds of it."""

import ctypes

import torch
from torch import Tensor

from oddrank.native.calls import call
from oddrank.native.compiled import Library
from oddrank.native.operations import FLOAT, INT, address, fields
from oddrank.native.pages import Pages


class AttentionArguments(ctypes.Structure):
    """attention.cpp's."""

    _fields_ = fields(
        "q out gate sinks positions starts queries",
        "sequences q_heads kv_heads q_row q_stride out_row gate_row gate_stride window",
        ("pages", Pages),
        ("scale", FLOAT),
        ("threads", INT),
    )


def decode_attention(
    library: Library,
    q: Tensor,
    pages: Pages,
    positions: Tensor,
    starts: Tensor,
    queries: Tensor,
    scale: float,
    *,
    window: int | None = None,
    gate: Tensor | None = None,
    sinks: Tensor | None = None,
    threads: int = 1,
) -> Tensor:
    """softmax(q k^T * scale) v, times sigmoid(gate), of one token of each sequence: fp32 [sequences, query heads *
    head_dim]. Keys are read once for all queries of a KV head, whatever their number; a KV head without one is not
    read.

    q: fp32 [sequences, query heads, head_dim], gate the same; heads dense. pages: the layer's cache, which holds the
    tokens themselves already; sequence i is in slot i. positions: int64 [sequences], the tokens' places: a sequence
    sees the places up to its own, of those the `window` last. starts: int64 [KV heads + 1], queries: int64 [query
    heads]: the query heads that read KV head h are queries[starts[h] : starts[h + 1]]. sinks: fp32 [query heads],
    scores that take part in the softmax and have no value. The result does not depend on `threads`.

    One pass with running maxima: Milakov and Gimelshein, 2018, arXiv 1805.02867.
    """
    n, heads, dim = q.shape
    out = torch.empty(n, heads * dim)
    row, head, _ = q.stride()
    gate_row, gate_head, _ = (0, 0, 0) if gate is None else gate.stride()
    arguments = AttentionArguments(
        q.data_ptr(), out.data_ptr(), address(gate), address(sinks), positions.data_ptr(), starts.data_ptr(),
        queries.data_ptr(), n, heads, starts.shape[0] - 1, row, head, heads * dim, gate_row, gate_head, window or 0,
        pages, scale, threads,
    )  # fmt: skip
    call(library.operation("attention"), arguments, q, out, gate, sinks, positions, starts, queries, *pages.kept)
    return out
