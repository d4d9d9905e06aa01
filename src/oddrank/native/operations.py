"""What the compiled operations have in common: when they compute, and how their arguments are described.

They take fp32 activations in this machine's memory. For everything else (fp64, half precision, a GPU), and where there
is no library, layers compute with torch, which is the reference for them.
"""

import ctypes
from typing import Any

import torch
from torch import Tensor

from oddrank.native.compiled import Library, library

POINTER, LONG, INT, FLOAT = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32, ctypes.c_float
_F32 = torch.float32


def compiled(x: Tensor) -> Library | None:
    """The library, where it computes with activations such as x."""
    return library() if x.dtype is _F32 and x.is_cpu else None


def fields(pointers: str = "", longs: str = "", *more: tuple[str, Any]) -> tuple[tuple[str, Any], ...]:
    """A structure's fields: pointers, then whole numbers, each a list of names, then `more`."""
    return (
        *((name, POINTER) for name in pointers.split()),
        *((name, LONG) for name in longs.split()),
        *more,
    )


def address(tensor: Tensor | None) -> int | None:
    """Of a tensor's first number."""
    return None if tensor is None else tensor.data_ptr()
