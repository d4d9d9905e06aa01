"""A decode step of a gated delta net."""

import ctypes

import torch
from torch import Tensor

from oddrank.native.calls import call
from oddrank.native.compiled import Library
from oddrank.native.operations import FLOAT, INT, address, fields


class DeltaArguments(ctypes.Structure):
    """delta.cpp's."""

    _fields_ = fields(
        "qkv z b a taps inputs memory a_log dt_bias norm partner slots out",
        "sequences k_heads v_heads key_width value_width kernel row_stride inputs_slot memory_slot",
        ("eps", FLOAT),
        ("unit_eps", FLOAT),
        ("threads", INT),
    )


def delta_step(
    library: Library,
    projected: tuple[Tensor, Tensor, Tensor, Tensor],
    taps: Tensor,
    states: tuple[Tensor, Tensor],
    a_log: Tensor,
    dt_bias: Tensor,
    norm: Tensor,
    partner: Tensor,
    eps: float,
    unit_eps: float,
    threads: int = 1,
    slots: Tensor | None = None,
) -> Tensor:
    """One token of each of n sequences: fp32 [n, value heads * value width].

        q, k, v = silu(convolution of qkv)      q, k: of the key head partner[i], of length one; q / sqrt(key width)
        S <- exp(g) S + k (beta (v - exp(g) S'k))'      g = -exp(a_log) softplus(a + dt_bias), beta = sigmoid(b)
        norm(S'q) * silu(z)

    Yang et al., 2024, arXiv 2412.06464. projected: (qkv, z, b, a), fp32 [n, ...], parts of one product: queries, keys
    and values of all heads; gates as the values; a number a value head, twice. taps: fp32 [kernel, channels] of the
    convolution, dense. states: fp32 [slots, kernel - 1, channels] and [slots, value heads, key width, value width],
    each slot dense; both go on by the token, in place. a_log, dt_bias: fp32 [value heads]. norm: fp32 [value width].
    partner: int64 [value heads]. eps: of the norm; unit_eps: added to the squares of q and k. slots: int64 [n], the
    sequences' slots; None: sequence i is in slot i. The result does not depend on `threads`.
    """
    qkv, z, b, a = projected
    inputs, memory = states
    _, v_heads, key_width, value_width = memory.shape
    n, row = qkv.shape[0], qkv.stride(0)
    assert n <= 1 or row == z.stride(0) == b.stride(0) == a.stride(0)
    out = torch.empty(n, v_heads * value_width)
    k_heads = (qkv.shape[1] - v_heads * value_width) // (2 * key_width)
    arguments = DeltaArguments(
        qkv.data_ptr(), z.data_ptr(), b.data_ptr(), a.data_ptr(), taps.data_ptr(), inputs.data_ptr(),
        memory.data_ptr(), a_log.data_ptr(), dt_bias.data_ptr(), norm.data_ptr(), partner.data_ptr(), address(slots),
        out.data_ptr(), n, k_heads, v_heads, key_width, value_width, taps.shape[0], row, inputs.stride(0),
        memory.stride(0), eps, unit_eps, threads,
    )  # fmt: skip
    call(
        library.operation("delta"), arguments,
        qkv, z, b, a, taps, inputs, memory, a_log, dt_bias, norm, partner, slots, out,
    )  # fmt: skip
    return out
