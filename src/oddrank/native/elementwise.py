"""Activations, sums and copies."""

import ctypes

import torch
from torch import Tensor

from oddrank.native.calls import call
from oddrank.native.compiled import Library
from oddrank.native.operations import INT, address, compiled, fields

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu")
"""In the order of operations.h."""

_SHARED = 1 << 17
"""Numbers from which a sum is shared out among torch's threads: a prompt's, not a decode step's."""


class GatedArguments(ctypes.Structure):
    """elementwise.cpp's."""

    _fields_ = fields("gate up scale y", "rows width apart", ("activation", INT), ("threads", INT))


class AddArguments(ctypes.Structure):
    """elementwise.cpp's."""

    _fields_ = fields("x y", "rows width y_row", ("set", INT), ("threads", INT))


def gated(library: Library, gate_up: Tensor, activation: int, scale: Tensor | None = None, threads: int = 1) -> Tensor:
    """activation(gate) * up, fp32 [..., width], of gate_up, fp32 [..., 2 * width], dense: gates, then ups. activation:
    of `ACTIVATIONS`. scale: fp32, a number for each row; sigmoid of it multiplies the row."""
    width = gate_up.shape[-1] // 2
    out = torch.empty(*gate_up.shape[:-1], width)
    start = gate_up.data_ptr()
    arguments = GatedArguments(
        start, start + 4 * width, address(scale), out.data_ptr(), out.numel() // max(1, width), width, 2 * width,
        activation, threads,
    )  # fmt: skip
    call(library.operation("gated"), arguments, gate_up, scale, out)
    return out


def add_(x: Tensor, y: Tensor) -> Tensor:
    """x += y. x: any floats, dense. y: of x's shape, its last dimension dense; it may be one row for all of x's."""
    library = compiled(x)
    if library is None or y.dtype is not x.dtype or not x.is_contiguous():
        return x.add_(y)
    return _rows(library, x, y, False)


def copy_of(y: Tensor) -> Tensor:
    """A dense copy of y, whose rows may be one (an expanded bias)."""
    library = compiled(y)
    if library is None:
        return y.clone(memory_format=torch.contiguous_format)
    return _rows(library, torch.empty(y.shape), y, True)


def zeros(shape: torch.Size | tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A dense tensor of zeros."""
    x = torch.empty(shape, dtype=dtype, device=device)
    library = compiled(x)
    return x.zero_() if library is None else _rows(library, x, None, True)


def _rows(library: Library, x: Tensor, y: Tensor | None, copy: bool) -> Tensor:
    width = x.shape[-1] if x.dim() else 1
    rows, apart = x.numel() // max(1, width), width
    if y is not None and not y.is_contiguous():
        if y.dim() == 2 and y.stride(-1) == 1:
            apart = y.stride(0)
        elif not any(y.stride()[:-1]) and y.stride(-1) == 1:
            apart = 0
        else:
            y = y.contiguous()
    threads = torch.get_num_threads() if x.numel() >= _SHARED else 1
    call(library.operation("add"), AddArguments(x.data_ptr(), address(y), rows, width, apart, copy, threads), x, y)
    return x
