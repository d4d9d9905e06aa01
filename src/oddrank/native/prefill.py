"""Prompts: attention of the tokens of a step over what the cache holds of their sequences, short convolutions, and the
gated delta rule."""

import ctypes

import torch
from torch import Tensor

from oddrank.native.calls import call
from oddrank.native.compiled import Library
from oddrank.native.operations import FLOAT, INT, address, fields
from oddrank.native.pages import Pages


class PrefillArguments(ctypes.Structure):
    """prefill_attention.cpp's."""

    _fields_ = fields(
        "q out gate sinks segments starts queries",
        "sequences q_heads kv_heads q_row q_stride out_row gate_row gate_stride window",
        ("pages", Pages),
        ("scale", FLOAT),
        ("threads", INT),
    )


def prefill_attention(
    library: Library,
    q: Tensor,
    pages: Pages,
    segments: Tensor,
    starts: Tensor,
    queries: Tensor,
    scale: float,
    *,
    window: int | None = None,
    gate: Tensor | None = None,
    sinks: Tensor | None = None,
    threads: int = 1,
) -> Tensor:
    """softmax(q k^T * scale) v, causal, times sigmoid(gate), of all tokens of a step: fp32 [tokens, query heads *
    head_dim].

    q: fp32 [tokens, query heads, head_dim], gate the same; heads dense. pages: the layer's cache, which holds the
    tokens themselves already. segments: int64 [sequences, 4], of each its slot, its first row of q, how many rows it
    has, and how many tokens the cache held before them. A token sees itself and the tokens before it, the `window` last
    of them all. starts, queries, sinks: as in `decode_attention`. The result does not depend on `threads`, nor on the
    other sequences.
    """
    tokens, heads, dim = q.shape
    out = torch.empty(tokens, heads * dim)
    row, head, _ = q.stride()
    gate_row, gate_head, _ = (0, 0, 0) if gate is None else gate.stride()
    arguments = PrefillArguments(
        q.data_ptr(), out.data_ptr(), address(gate), address(sinks), segments.data_ptr(), starts.data_ptr(),
        queries.data_ptr(), segments.shape[0], heads, starts.shape[0] - 1, row, head, heads * dim, gate_row, gate_head,
        window or 0, pages, scale, threads,
    )  # fmt: skip
    call(library.operation("prefill_attention"), arguments, q, out, gate, sinks, segments, starts, queries, *pages.kept)
    return out


class PrefillConvolutionArguments(ctypes.Structure):
    """prefill_convolution.cpp's."""

    _fields_ = fields("x taps inputs y segments", "sequences channels kernel x_row inputs_slot", ("threads", INT))


def prefill_convolution(
    library: Library, x: Tensor, taps: Tensor, inputs: Tensor, segments: Tensor, threads: int = 1
) -> Tensor:
    """silu(sum over j of taps[j] * x[t - kernel + 1 + j]) of every token t of a step, channel by channel: fp32 [tokens,
    channels], dense.

    x: fp32 [tokens, channels], rows dense. taps: fp32 [kernel, channels], dense. inputs: fp32 [slots, kernel - 1,
    channels], each slot dense, a sequence's inputs before the step; those after it are left there. segments: see
    `prefill_attention`.
    """
    y = torch.empty(x.shape)
    arguments = PrefillConvolutionArguments(
        x.data_ptr(), taps.data_ptr(), inputs.data_ptr(), y.data_ptr(), segments.data_ptr(), segments.shape[0],
        x.shape[1], taps.shape[0], x.stride(0), inputs.stride(0), threads,
    )  # fmt: skip
    call(library.operation("prefill_convolution"), arguments, x, taps, inputs, y, segments)
    return y


class PrefillDeltaArguments(ctypes.Structure):
    """prefill_delta.cpp's."""

    _fields_ = fields(
        "mixed z b a memory a_log dt_bias norm partner segments out",
        "sequences k_heads v_heads key_width value_width row_stride memory_slot",
        ("eps", FLOAT),
        ("unit_eps", FLOAT),
        ("threads", INT),
    )


def prefill_delta(
    library: Library,
    mixed: Tensor,
    gates: tuple[Tensor, Tensor, Tensor],
    memory: Tensor,
    a_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    partner: Tensor,
    eps: float,
    unit_eps: float,
    segments: Tensor,
    threads: int = 1,
) -> Tensor:
    """All tokens of a step through the gated delta rule of each head, in chunks, and the gated norm of what they read:
    fp32 [tokens, value heads * value width]. The formula is `delta_step`'s.

    mixed: fp32 [tokens, channels], dense: what `prefill_convolution` gave. gates: (z, b, a), fp32 [tokens, ...], parts
    of one product. memory: fp32 [slots, value heads, key width, value width], each slot dense, a sequence's state
    before the step; that after it is left there. a_log, dt_bias, norm, partner, eps, unit_eps: `delta_step`'s.
    segments: see `prefill_attention`. The result does not depend on `threads`, nor on the other sequences.
    """
    z, b, a = gates
    _, v_heads, key_width, value_width = memory.shape
    row = z.stride(0)
    assert len(z) <= 1 or row == b.stride(0) == a.stride(0)
    out = torch.empty(len(mixed), v_heads * value_width)
    k_heads = (mixed.shape[1] - v_heads * value_width) // (2 * key_width)
    arguments = PrefillDeltaArguments(
        mixed.data_ptr(), z.data_ptr(), b.data_ptr(), a.data_ptr(), memory.data_ptr(), a_log.data_ptr(),
        dt_bias.data_ptr(), norm.data_ptr(), partner.data_ptr(), segments.data_ptr(), out.data_ptr(),
        segments.shape[0], k_heads, v_heads, key_width, value_width, row, memory.stride(0), eps, unit_eps, threads,
    )  # fmt: skip
    call(
        library.operation("prefill_delta"), arguments,
        mixed, z, b, a, memory, a_log, dt_bias, norm, partner, segments, out,
    )  # fmt: skip
    return out
