"""RMS norms of fp32 rows."""

import ctypes

import torch
from torch import Tensor

from oddrank.native.calls import call
from oddrank.native.compiled import Library
from oddrank.native.operations import FLOAT, INT, address, fields


class NormArguments(ctypes.Structure):
    """norm.cpp's."""

    _fields_ = fields(
        "x delta weight y",
        "rows heads width x_row x_head delta_row y_row y_head",
        ("eps", FLOAT),
        ("threads", INT),
    )


def rms_norm(
    library: Library, x: Tensor, weight: Tensor, eps: float, *, delta: Tensor | None = None, threads: int = 1
) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, as a new dense tensor. x: fp32 [rows, width] or
    [rows, heads, width], the last dimension dense. delta: as x, dense; added to x, in place, first. weight: fp32
    [width].

    Zhang and Sennrich, 2019, arXiv 1910.07467.
    """
    out = torch.empty(x.shape)
    _norm(library, x, delta, weight, out, eps, threads)
    return out


def rms_norm_(library: Library, x: Tensor, weight: Tensor, eps: float, threads: int = 1) -> Tensor:
    """The same, in place."""
    _norm(library, x, None, weight, x, eps, threads)
    return x


def _norm(
    library: Library, x: Tensor, delta: Tensor | None, weight: Tensor, out: Tensor, eps: float, threads: int
) -> None:
    shape, width = x.shape, x.shape[-1]
    if x.dim() == 3:
        rows, heads = shape[0], shape[1]
        x_row, x_head, _ = x.stride()
        y_row, y_head, _ = out.stride()
    else:
        rows, heads, x_row, x_head, y_row, y_head = x.numel() // max(1, width), 1, x.stride(-2), 0, out.stride(-2), 0
    arguments = NormArguments(
        x.data_ptr(), address(delta), weight.data_ptr(), out.data_ptr(),
        rows, heads, width, x_row, x_head, 0 if delta is None else heads * width, y_row, y_head, eps, threads,
    )  # fmt: skip
    call(library.operation("norm"), arguments, x, delta, weight, out)
