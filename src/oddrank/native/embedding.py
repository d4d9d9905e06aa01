"""Rows of a dense table, looked up by tokens."""

import ctypes

import torch
from torch import Tensor

from oddrank.native.calls import call
from oddrank.native.compiled import Library

TABLES = (torch.bfloat16, torch.float16, torch.float32)
"""Types of a table, in embedding.cpp's order."""


class TakeRowsArguments(ctypes.Structure):
    """embedding.cpp's."""

    _fields_ = (
        ("table", ctypes.c_void_p),
        ("tokens", ctypes.c_void_p),
        ("row", ctypes.c_void_p),
        ("out", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("known", ctypes.c_int64),
        ("dtype", ctypes.c_int64),
    )


def take_rows(library: Library, table: Tensor, tokens: Tensor, row: Tensor | None = None) -> Tensor:
    """table [rows, width], of a type in `TABLES`, dense; tokens int64 [n] -> fp32 [n, width]. row: int32 [m], where in
    the table token 0, 1, ... is, -1 for nowhere; a token that is nowhere, or m or more, gives zeros. None: token t is
    row t."""
    out = torch.empty(len(tokens), table.shape[1])
    known = len(table if row is None else row)
    arguments = TakeRowsArguments(
        table.data_ptr(), tokens.data_ptr(), None if row is None else row.data_ptr(), out.data_ptr(),
        len(tokens), table.shape[1], known, TABLES.index(table.dtype),
    )  # fmt: skip
    call(library.operation("take_rows"), arguments, table, tokens, row, out)
    return out
