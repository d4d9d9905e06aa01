"""How a rank's matrix [N, K] is held and multiplied by, knowing nothing of ranks. Here dense ones; others: stored.py.

A placement (column, row, merged) asks a `WeightFormat` for the weight of a local matrix made of named parts and
calls it. A format decides which stored tensors a part has, what it keeps of them, and which kernel multiplies.
"""

import math
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor

from oddrank.native import NativeMatrix, library, native_matrix
from oddrank.native.dense32 import ROWS, linear_f32
from oddrank.native.operations import compiled
from oddrank.runtime.formats import decoder
from oddrank.runtime.layers.module import Module, Parameter
from oddrank.runtime.precision import Precision
from oddrank.runtime.threads import side_by_side, torch_threads

_PACK_ELEMENTS = 1 << 24
"""Elements packed at a time: bounds the fp32 copy that packing needs to 64 MB."""

_CONVERT_ELEMENTS = 1 << 20
"""Elements converted at a time where a product is done in fp32: 4 MB, which the last-level cache keeps."""

_SMALLEST, _LARGEST = 2.0**-10, torch.finfo(torch.float16).max
"""What the largest weight of a matrix must be between for it to be packed."""

THREADED_ELEMENTS = 1 << 21
"""Matrices of fewer elements are multiplied on one thread: more would cost as much as they bring, and on a busy
machine far more (see threads)."""

_SPLIT_ROWS = 64
"""From this many rows of x on, one-threaded products of a part of the rows each run side by side."""


class Rows(NamedTuple):
    """A named linear layer of the checkpoint, without its suffix, and how many of the matrix's rows it is."""

    name: str
    rows: int


class LinearWeight(Module):
    """A loaded matrix [N, K]: called with x [..., K] and an optional bias [N], gives [..., N]."""

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        raise NotImplementedError

    @property
    def native(self) -> NativeMatrix | None:
        """The matrix as the compiled kernels multiply by it, where they do; known once prepared."""
        return None


class WeightFormat(Protocol):
    """How matrices are stored."""

    def linear(self, parts: Sequence[Rows], k: int) -> LinearWeight:
        """The weight of the matrix whose rows are the parts', stacked in order."""
        ...


class DenseFormat:
    """A matrix stored as itself, in bf16, fp16, fp32 or fp64."""

    def __init__(self, precision: Precision) -> None:
        self.precision = precision

    def linear(self, parts: Sequence[Rows], k: int) -> LinearWeight:
        weights, activations = self.precision.weights, self.precision.activations
        weight = Parameter([(f"{part.name}.weight", part.rows) for part in parts], (k,), weights)
        if weights == activations:
            return DenseWeight(weight)
        if library() is None and half_packing_works():
            return HalfPackedWeight(weight)
        return NarrowWeight(weight)


class DenseWeight(LinearWeight):
    """Weights in the type of the activations."""

    def __init__(self, weight: Parameter) -> None:
        self.weight = weight
        self._available = 1

    def prepare(self, threads: int) -> None:
        self._available = threads

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return dense_product(self.weight.data, x, bias, self._available)


def dense_product(weight: Tensor, x: Tensor, bias: Tensor | None, threads: int) -> Tensor:
    """x times a matrix of its own type: few rows of fp32 by the compiled product."""
    library = compiled(x)
    if library is None or x.dim() != 2 or len(x) > ROWS or x.stride(1) != 1 or not weight.is_contiguous():
        return F.linear(x, weight, bias)
    return linear_f32(library, weight, x, bias, threads)


class NarrowWeight(LinearWeight):
    """bf16 or fp16 weights under fp32 activations: by the compiled kernels once prepared, where there are any, else by
    what torch has everywhere. The compiled kernels may round x (NativeMatrix says when).

    In torch, one to three rows of x go through the half-precision product, which rounds x and the result; more are
    multiplied in fp32 by blocks of the matrix that are converted as they are needed.
    """

    def __init__(self, weight: Parameter) -> None:
        self.weight = weight
        self._threads = self._available = 1
        self._native: NativeMatrix | None = None

    @property
    def native(self) -> NativeMatrix | None:
        return self._native

    @property
    def rounds(self) -> bool:
        """Whether products with few rows of x are rounded to half precision."""
        return self._native is None

    def prepare(self, threads: int) -> None:
        self._prepare_torch(threads)
        self._native = native_matrix(decoder("dense"), {".weight": self.weight.data}, exact=False)
        self._available = threads

    def _prepare_torch(self, threads: int) -> None:
        self._threads = threads if math.prod(self.weight.shape) >= THREADED_ELEMENTS else 1

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._native is not None:
            return self._native.linear(x, bias, self._native.threads(x, self._available))
        if self._threads == 1:
            return self._product(x, bias)
        with torch_threads(self._threads):
            return self._product(x, bias)

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        weight = self.weight.data
        n, k = weight.shape
        flat = x.reshape(-1, k)
        if len(flat) <= 3:
            out = F.linear(flat.to(weight.dtype), weight).to(x.dtype)
        else:
            out = torch.empty(len(flat), n, dtype=x.dtype)
            step = max(1, _CONVERT_ELEMENTS // max(k, 1))
            for start in range(0, n, step):
                block = weight[start : start + step].to(x.dtype)
                torch.mm(flat, block.t(), out=out[:, start : start + step])
        if bias is not None:
            out += bias
        return out.reshape(*x.shape[:-1], n)

    def exact(self, x: Tensor, rows: Tensor) -> Tensor:
        """The products of x [K] with some rows of the matrix, rounded only in x's type: [len(rows)]."""
        return self.weight.data.index_select(0, rows).to(x.dtype).mv(x)


class HalfPackedWeight(NarrowWeight):
    """bf16 or fp16 weights that `prepare` packs as fp16, in place of the stored form, for a kernel that
    multiplies them in fp32: x is not rounded, and a matrix is streamed at twice the speed of torch's own product.

    fp16 holds every bf16 number between 2^-17 and 65504 exactly and is off by at most 2^-25 on smaller ones. So
    a matrix is packed where its largest weight is between 2^-10 and 65504 (the error is then below 2^-15 of
    it; bf16 itself rounds by up to 2^-8) and kept as it is otherwise.
    """

    def __init__(self, weight: Parameter) -> None:
        super().__init__(weight)
        self._packs: list[Any] = []
        self._serial: Any = None  # the only pack, where one thread multiplies by it
        self._all_threads = 1

    def prepare(self, threads: int) -> None:
        if self._packs:
            return
        self._prepare_torch(threads)
        weight = self.weight.data
        n, k = weight.shape
        if weight.numel() == 0:
            return
        low, high = (float(extreme) for extreme in weight.aminmax())
        largest = max(-low, high)
        if not (_SMALLEST <= largest <= _LARGEST or largest == 0):
            return
        serial = _SERIAL is not None and self._threads == 1
        step, held = max(16, _PACK_ELEMENTS // k // 16 * 16), 0
        for start in range(0, n, step):
            block = weight[start : start + step]
            self._packs.append(_pack(block.float(), serial))
            held += -(-len(block) // 16) * 16 * k * 2  # the kernel takes rows in groups of 16
        if serial and len(self._packs) == 1:
            self._serial, self._all_threads = self._packs[0], threads
        self.weight.tensor, self.weight.held = None, held

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._serial is None:
            return super().__call__(x, bias)
        if x.shape[0] >= _SPLIT_ROWS and self._all_threads > 1 and x.dim() == 2:
            rows = x.chunk(self._all_threads)
            return torch.cat(side_by_side(self._all_threads, lambda part: self._one(part, bias), rows))
        return _SERIAL(x, self._serial, bias)  # type: ignore[misc]

    def _one(self, x: Tensor, bias: Tensor | None) -> Tensor:
        return _SERIAL(x, self._serial, bias)  # type: ignore[misc]

    def _product(self, x: Tensor, bias: Tensor | None) -> Tensor:
        if not self._packs:
            return super()._product(x, bias)
        parts = [_multiply(x, pack) for pack in self._packs]
        out = parts[0] if len(parts) == 1 else torch.cat(parts, -1)
        return out if bias is None else out.add_(bias)


_SERIAL: Callable[[Tensor, Any, Tensor | None], Tensor] | None
_SERIAL = getattr(torch, "fbgemm_linear_fp16_weight_fp32_activation", None)
"""One thread's product with a packed matrix. It costs less to start than the other; torch may drop it."""


def _pack(weight: Tensor, serial: bool) -> Any:
    """fp32 [N, K] in the kernel's form: a tensor for the serial product, an object for the other."""
    if not serial:
        return torch.ops.quantized.linear_prepack_fp16(weight, None)
    return torch.fbgemm_pack_gemm_matrix_fp16(weight)


def _multiply(x: Tensor, packed: Any) -> Tensor:
    if isinstance(packed, Tensor):
        assert _SERIAL is not None
        return _SERIAL(x, packed, None)
    out: Tensor = torch.ops.quantized.linear_dynamic_fp16.default(x, packed)
    return out


_works: bool | None = None


def half_packing_works() -> bool:
    """Does this build of torch, on this machine, multiply packed fp16 weights by fp32 activations?"""
    global _works
    if _works is None:
        x, w = torch.full((1, 16), 2.0), torch.eye(16)
        try:
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="fbgemm_")  # torch says, once, that these may go
                kinds = (False,) if _SERIAL is None else (False, True)
                _works = all(bool((_multiply(x, _pack(w, serial)) == x).all()) for serial in kinds)
        except (RuntimeError, AttributeError, TypeError):
            _works = False
    return _works
