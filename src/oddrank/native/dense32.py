"""Products with fp32 matrices: the few whose rounding decides something, and all of them in an fp32 run."""

import ctypes

import torch
from torch import Tensor

from oddrank.native.calls import call
from oddrank.native.compiled import Library
from oddrank.native.operations import INT, address, fields

ROWS = 8
"""Rows of x up to which this is what computes: more are torch's, which multiplies by blocks."""


class LinearF32Arguments(ctypes.Structure):
    """dense32.cpp's."""

    _fields_ = fields("a x bias y", "n k m x_row y_row", ("threads", INT))


def linear_f32(library: Library, a: Tensor, x: Tensor, bias: Tensor | None = None, threads: int = 1) -> Tensor:
    """x times the transposed matrix, plus bias: fp32 [m, n]. a: fp32 [n, k], dense. x: fp32 [m, k], the last dimension
    dense. bias: fp32 [n]. A row's result does not depend on `threads`, nor on the other rows."""
    n, k = a.shape
    out = torch.empty(len(x), n)
    arguments = LinearF32Arguments(
        a.data_ptr(), x.data_ptr(), address(bias), out.data_ptr(), n, k, len(x), x.stride(0), n, threads
    )
    call(library.operation("linear_f32"), arguments, a, x, bias, out)
    return out
