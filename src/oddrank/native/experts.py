"""The routed experts of a layer by the compiled kernels: all that a batch chose, in one call."""

import ctypes
from collections.abc import Callable, Mapping

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor

from oddrank.native.calls import call
from oddrank.native.compiled import Library, Matrix
from oddrank.native.matrix import Decodes, NativeMatrix, native_matrix

Stored = Mapping[str, Tensor]
Activation = Callable[[Tensor], Tensor]


class ExpertsArguments(ctypes.Structure):
    """routed.cpp's."""

    _fields_ = (
        ("gate", ctypes.c_void_p),
        ("up", ctypes.c_void_p),
        ("down", ctypes.c_void_p),
        ("experts", ctypes.c_int64),
        ("up_row", ctypes.c_int64),
        ("width", ctypes.c_int64),
        ("hidden", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("tokens", ctypes.c_int64),
        ("ids", ctypes.c_void_p),
        ("weights", ctypes.c_void_p),
        ("k", ctypes.c_int64),
        ("out", ctypes.c_void_p),
        ("threads", ctypes.c_int32),
    )


class NativeExperts:
    """Experts whose matrices [width, hidden], [width, hidden] and [hidden, width] are in the caller's memory."""

    def __init__(
        self, library: Library, gate: list[NativeMatrix], up: list[NativeMatrix], down: list[NativeMatrix],
        stacked: bool,
    ) -> None:  # fmt: skip
        """stacked: gate and up are the same matrices, of gate's rows over up's."""
        self._operation, self._kept = library.operation("experts"), (gate, up, down)
        self._gate, self._up, self._down = (
            (Matrix * len(matrices))(*(m.matrix for m in matrices)) for matrices in (gate, up, down)
        )
        self.count, self.width, self.hidden = len(gate), down[0].k, down[0].n
        self._up_row = self.width if stacked else 0

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, threads: int) -> Tensor:
        """x [tokens, hidden], weights and ids [tokens, k], each token's ids different -> [tokens, hidden] in fp32, the
        weighted sum in the order of the experts. It does not depend on `threads`."""
        x, weights, ids = x.float().contiguous(), weights.float().contiguous(), ids.long().contiguous()
        out = torch.empty(len(x), self.hidden)
        arguments = ExpertsArguments(
            ctypes.addressof(self._gate), ctypes.addressof(self._up), ctypes.addressof(self._down),
            self.count, self._up_row, self.width, self.hidden,
            x.data_ptr(), len(x), ids.data_ptr(), weights.data_ptr(), ids.shape[-1], out.data_ptr(), threads,
        )  # fmt: skip
        call(self._operation, arguments, x, weights, ids, out, self)
        return out


def native_experts(
    gate_up: tuple[Decodes, Stored], down: tuple[Decodes, Stored], activation: Activation, exact: bool = True
) -> NativeExperts | None:
    """Decoders and stored parts [experts, sections, ...] of a layer's two banks. None where the kernels cannot compute
    with them, or where the activation is not silu. exact: see NativeMatrix."""
    if activation is not F.silu:
        return None
    both, lower = _matrices(*gate_up, exact), _matrices(*down, exact)
    if not both or not lower:
        return None
    gate, up, down_ = [one[0] for one in both], [one[-1] for one in both], [one[0] for one in lower]
    return NativeExperts(gate[0].library, gate, up, down_, len(both[0]) == 1)


def _matrices(decoder: Decodes, parts: Stored, exact: bool) -> list[list[NativeMatrix]] | None:
    found = []
    experts, sections = next(iter(parts.values())).shape[:2]
    for e in range(experts):
        each = [
            native_matrix(decoder, {suffix: t[e, s] for suffix, t in parts.items()}, exact) for s in range(sections)
        ]
        if any(one is None for one in each):
            return None
        found.append([one for one in each if one is not None])
    return found
