"""Stored matrices as the compiled kernels take them: where their bytes are, held as the checkpoint has them."""

import ctypes
import math
from collections.abc import Mapping, Sequence
from typing import Protocol, cast

import torch
from torch import Tensor

from oddrank.formats import Format
from oddrank.native.calls import call
from oddrank.native.compiled import FORMATS, Library, LinearArguments, Matrix, library

_THREADED_BYTES, _THREADED_ROWS = 1 << 18, 64
"""Matrices of fewer bytes are multiplied on one thread, unless there are this many rows of x: waking another takes the
time in which one reads so much."""

_LARGEST_SCALE = 2.0**40
"""Of integers: so that sums of them stay in fp32's range."""

_INT8_COLUMNS = 128
"""Columns of a scale of int8 that covers all of a row's: a group, as the kernels take it."""

_DENSE = {torch.bfloat16: "bf16", torch.float16: "f16"}
_SEGMENT = 32
"""Scales of fp8 must cover a multiple of this many columns."""


class Decodes(Protocol):
    """A decoder of oddrank.runtime.formats, as far as its layout matters here."""

    format: Format
    name: str
    blocks: dict[str, tuple[int, int]]


class DecodesRows(Decodes, Protocol):
    """oddrank.runtime.formats.rows.RowsDecoder."""

    bits: int
    group: int
    k: int


class NativeMatrix:
    """A matrix [n, k] in the caller's memory: `tensors` are kept as long as this is.

    Of an exact one products are rounded in fp32 only. Else kernels may round x first, by no more than 2^-16 of the
    largest |x| of 512 columns (4-bit formats and integers), which is finer than bf16, or to bf16 where the CPU
    multiplies that (level avx512bf16; bf16, e4m3 and MXFP8, and of 64 x and more NVFP4 and MXFP4).
    """

    def __init__(self, found: Library, matrix: Matrix, tensors: list[Tensor]) -> None:
        self.library, self.matrix, self.n, self.k = found, matrix, int(matrix.n), int(matrix.k)
        self.nbytes = self.n * int(matrix.row_bytes)
        self._kept = tensors
        self._alone: NativeStack | None = None

    @property
    def alone(self) -> "NativeStack":
        """The stack of this matrix only."""
        if self._alone is None:
            self._alone = NativeStack([self])
        return self._alone

    def threads(self, x: Tensor, available: int) -> int:
        """See NativeStack."""
        return self.alone.threads(x, available)

    def linear(self, x: Tensor, bias: Tensor | None = None, threads: int = 1) -> Tensor:
        """x [..., k] times the transposed matrix, plus bias [n], gives [..., n] in x's type (none of 64 bits). See
        NativeStack."""
        return self.alone(x, bias, threads)


class NativeStack:
    """Matrices [n_i, k] of the same input, of any formats, one above the other: one call for all of them."""

    def __init__(self, matrices: Sequence[NativeMatrix]) -> None:
        self.matrices, first = list(matrices), matrices[0]
        self.n, self.k = sum(m.n for m in matrices), first.k
        self.nbytes = sum(m.nbytes for m in matrices)
        self._parts = (Matrix * len(matrices))(*(m.matrix for m in matrices))
        self._address = ctypes.addressof(self._parts)
        self._operation = first.library.operation("linear")

    def threads(self, x: Tensor, available: int) -> int:
        """How many of the available threads a product with x is worth."""
        rows = x.numel() // max(1, self.k)
        return available if self.nbytes >= _THREADED_BYTES or rows >= _THREADED_ROWS else 1

    def __call__(self, x: Tensor, bias: Tensor | None = None, threads: int = 1) -> Tensor:
        """x [..., k] times the transposed stack, plus bias [n], gives [..., n] in x's type (none of 64 bits). Sums are
        in fp32; they do not depend on `threads`, nor on how many rows x has beyond one."""
        rows = x if x.dtype is torch.float32 and x.is_contiguous() else x.float().contiguous()
        out = torch.empty(*x.shape[:-1], self.n)
        added = None if bias is None else bias.float().contiguous()
        arguments = LinearArguments(
            self._address,
            len(self.matrices),
            rows.data_ptr(),
            rows.numel() // self.k,
            self.k,
            None if added is None else added.data_ptr(),
            out.data_ptr(),
            self.n,
            threads,
        )
        call(self._operation, arguments, rows, added, out, self)
        return out if x.dtype is torch.float32 else out.to(x.dtype)


def native_linear(matrices: Sequence[NativeMatrix], x: Tensor, bias: Tensor | None = None, threads: int = 1) -> Tensor:
    """The product of x [..., k] with matrices [n_i, k] one above the other, plus bias: [..., sum of n_i]. Whoever
    multiplies by the same matrices again keeps a NativeStack."""
    return NativeStack(matrices)(x, bias, threads)


def native_matrix(decoder: Decodes, stored: Mapping[str, Tensor], exact: bool = True) -> NativeMatrix | None:
    """A stored matrix [n, k] for the kernels; None where there are none, where it is not in this machine's memory, or
    where they do not compute with matrices stored so. exact: see NativeMatrix."""
    found = library()
    if found is None or any(t.device.type != "cpu" or not t.is_contiguous() for t in stored.values()):
        return None
    kind = decoder.name.partition("-")[0]
    declared = decoder.format.stored[0]
    values = stored[declared.suffix]
    apart = kind == "mxfp4" and declared.inner > 0  # a group's bytes lie in a dimension of their own
    if values.dim() != (3 if apart else 2) or declared.shape != "nk" or not values.numel():
        return None
    described = _KINDS.get(kind, _none)(decoder, stored)
    if described is None:
        return None
    matrix, kept = described
    matrix.exact = exact
    return NativeMatrix(found, matrix, [values, *kept])


Described = tuple[Matrix, list[Tensor]] | None


def _matrix(form: str, values: Tensor, scales: Tensor | None, k: int, factor: float = 1.0) -> Matrix:
    row = values.shape[1] * values.element_size()
    return Matrix(
        values.data_ptr(),
        None if scales is None else scales.data_ptr(),
        values.shape[0],
        k,
        row,
        0 if scales is None else scales.shape[-1],
        1,
        0,
        factor,
        FORMATS.index(form),
    )


def _none(_decoder: Decodes, _stored: Mapping[str, Tensor]) -> Described:
    return None


def _dense(decoder: Decodes, stored: Mapping[str, Tensor]) -> Described:
    values = stored[decoder.format.stored[0].suffix]
    form = _DENSE.get(values.dtype)
    return None if form is None else (_matrix(form, values, None, values.shape[1]), [])


def _fp8(decoder: Decodes, stored: Mapping[str, Tensor]) -> Described:
    values, declared = stored[decoder.format.stored[0].suffix], decoder.format.stored[1]
    scales = stored[declared.suffix].float()  # few: the values' bytes over those of a block
    if scales.isinf().any():
        return None  # infinite times zero is not a number, element by element
    rows, columns = decoder.blocks[declared.suffix]
    n, k = values.shape
    if declared.shape in ("scalar", "one"):
        rows = columns = 0
    elif declared.shape == "n":
        columns = 0
    if columns >= k:
        columns = 0
    if columns % _SEGMENT:
        return None
    scales = scales.reshape(-(-n // rows) if rows else 1, -(-k // columns) if columns else 1)
    matrix = _matrix("e4m3", values, scales, k)
    matrix.block_n, matrix.block_k = rows, columns
    return matrix, [scales]


def _nvfp4(decoder: Decodes, stored: Mapping[str, Tensor]) -> Described:
    packed, blocks, whole = (s.suffix for s in decoder.format.stored[:3])
    if decoder.blocks[packed] != (1, 2) or decoder.blocks[blocks] != (1, 16) or stored[whole].numel() != 1:
        return None
    factor = float(stored[whole].float())
    if whole == ".weight_global_scale":  # divides
        factor = 1 / factor if factor else math.inf
    if not 2.0**-100 < abs(factor) < 2.0**100:
        return None
    values = stored[packed]
    return _matrix("nvfp4", values, stored[blocks], 2 * values.shape[1], factor), [stored[blocks]]


def _rows(decoder: Decodes, stored: Mapping[str, Tensor]) -> Described:
    """Packed integers, only as oddrank.runtime.formats.rows has them."""
    if not decoder.name.endswith("-rows"):
        return None
    rows = cast(DecodesRows, decoder)
    codes, words, order = stored[".codes"], stored[".scales"], stored.get(".order")
    numbers = words.view(torch.float32)
    if not _moderate(numbers[..., 0]):
        return None
    form = "int4" if rows.bits == 4 else "int8 with zeros" if numbers.shape[-1] == 2 else "int8"
    matrix = _matrix(form, codes, words, rows.k)
    matrix.scale_row, matrix.block_k = words[0].nbytes, rows.group
    matrix.order = None if order is None else order.data_ptr()
    return matrix, [words, *([] if order is None else [order])]


def _int8(decoder: Decodes, stored: Mapping[str, Tensor]) -> Described:
    """W8A8's, with a scale for a row or for the whole matrix, which is written for every 128 columns."""
    if decoder.name not in ("int8-channel", "int8-tensor"):
        return _rows(decoder, stored)
    values, scales = stored[decoder.format.stored[0].suffix], stored[decoder.format.stored[1].suffix].float()
    n, k = values.shape
    if not _moderate(scales):
        return None
    every = scales.reshape(-1, 1).expand(n, -(-k // _INT8_COLUMNS)).contiguous()
    matrix = _matrix("int8", values, every, k)
    matrix.scale_row, matrix.block_k = every[0].nbytes, _INT8_COLUMNS
    return matrix, [every]


def _moderate(scales: Tensor) -> bool:
    """Whether the integer products' sums stay in range; no number does not."""
    least, most = (float(extreme) for extreme in scales.aminmax())
    return max(-least, most) < _LARGEST_SCALE


def _mxfp4(decoder: Decodes, stored: Mapping[str, Tensor]) -> Described:
    packed, exponents = (s.suffix for s in decoder.format.stored[:2])
    inner = decoder.format.stored[0].inner
    if decoder.blocks[packed] != (1, 2 * inner or 2) or decoder.blocks[exponents] != (1, 32):
        return None
    values = stored[packed].flatten(-2) if inner else stored[packed]
    return _matrix("mxfp4", values, stored[exponents], 2 * values.shape[1]), [stored[exponents]]


def _mxfp8(decoder: Decodes, stored: Mapping[str, Tensor]) -> Described:
    values, exponents = (s.suffix for s in decoder.format.stored[:2])
    if decoder.blocks[exponents] != (1, 32):
        return None
    return _matrix("mxfp8", stored[values], stored[exponents], stored[values].shape[1]), [stored[exponents]]


_KINDS = {"dense": _dense, "fp8": _fp8, "nvfp4": _nvfp4, "mxfp4": _mxfp4, "mxfp8": _mxfp8, "int4": _rows, "int8": _int8}
