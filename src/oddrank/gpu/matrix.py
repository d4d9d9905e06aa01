"""Stored matrices as the Triton kernels take them: where the words are, and how far apart."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from oddrank.runtime.formats import Decoder
from oddrank.runtime.formats.rows import RowsDecoder

DENSE, E4M3, NVFP4, MXFP4, INT4, INT8, INT8_ZEROS = range(7)
"""As in kernels/words.py."""

_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_DIVIDES = ".weight_global_scale"
_SHORTEST = 16
"""Columns that a scale must cover a multiple of: what a tensor core takes at once."""


class Strides(NamedTuple):
    """Of one tensor of a bank, in entries: from an expert, and from a section, to the next."""

    expert: int
    section: int


class GpuMatrix(NamedTuple):
    """A matrix [n, k], or a bank of them [experts, sections, n, k]. values, scales: words, as bytes or floats. factor:
    the scale of whole matrices; it divides where `divides`. Rows and scales of a row are so many entries apart.
    block_n, block_k: what a scale covers of fp8, MXFP4, MXFP8 or integers, 0 = all. order: int64 [k], the column of x
    that a column belongs to, where not its own."""

    form: int
    values: Tensor
    scales: Tensor
    factor: Tensor
    n: int
    k: int
    value_row: int
    scale_row: int
    scale_column: int
    block_n: int
    block_k: int
    divides: bool
    order: Tensor | None = None

    def strides(self, tensor: Tensor) -> Strides:
        """Of a bank's tensor; zeros for a part that the format does not have."""
        if tensor is self.values or (tensor is self.scales and self.form != DENSE) or self._has_factor(tensor):
            return Strides(tensor.stride(0), tensor.stride(1))
        return Strides(0, 0)

    def _has_factor(self, tensor: Tensor) -> bool:
        return tensor is self.factor and self.form == NVFP4


def described(decoder: Decoder, stored: Mapping[str, Tensor], leading: int = 0) -> GpuMatrix | None:
    """A stored matrix with `leading` dimensions before [n, k]; None where the kernels do not take it: views that are
    not whole, infinite scales, scales that cover a number of columns that no tensor core takes."""
    if any(not t.is_contiguous() for t in stored.values()):
        return None
    kind = decoder.name.partition("-")[0]
    values = stored[decoder.values]
    if values.dim() != leading + 2 or not values.numel():
        return None
    if kind == "dense":
        n, k = values.shape[-2:]
        taken = values.dtype in _FLOATS
        return GpuMatrix(DENSE, values, values, values, n, k, k, 0, 0, 0, 0, False) if taken else None
    if isinstance(decoder, RowsDecoder):
        return _rows(decoder, stored)
    if decoder.name in ("int8-channel", "int8-tensor"):
        return _eight_bits(decoder, stored, leading, INT8)
    if kind == "fp8":
        return _eight_bits(decoder, stored, leading, E4M3)
    if kind == "mxfp8":
        return _mxfp8(decoder, stored)
    if kind in ("nvfp4", "mxfp4"):
        return _four_bits(decoder, stored, NVFP4 if kind == "nvfp4" else MXFP4)
    return None


def _eight_bits(decoder: Decoder, stored: Mapping[str, Tensor], leading: int, form: int) -> GpuMatrix | None:
    values, declared = stored[decoder.values], decoder.format.stored[1]
    scales = stored[declared.suffix]
    if scales.dtype not in _FLOATS or bool(scales.isinf().any()):
        return None  # infinite times zero is not a number, element by element
    n, k = values.shape[-2:]
    rows, columns = decoder.blocks[declared.suffix]
    if columns >= k:
        columns = 0
    if declared.shape in ("scalar", "one"):
        row = column = rows = columns = 0
    elif declared.shape == "n":
        row, column, columns = 1, 0, 0
    else:
        row, column = scales.stride(leading), scales.stride(leading + 1)
    if columns % _SHORTEST:
        return None
    words = values.view(torch.uint8) if form == E4M3 else values
    return GpuMatrix(
        form, words, scales, scales, n, k, k, row if rows else 0, column if columns else 0, rows, columns, False
    )


def _mxfp8(decoder: Decoder, stored: Mapping[str, Tensor]) -> GpuMatrix | None:
    values, exponents = (s.suffix for s in decoder.format.stored[:2])
    if decoder.blocks[exponents] != (1, 32):
        return None
    words, scales = stored[values].view(torch.uint8), stored[exponents]
    n, k = words.shape[-2:]
    return GpuMatrix(E4M3, words, scales, scales, n, k, k, scales.shape[-1], 1, 1, 32, False)


def _four_bits(decoder: Decoder, stored: Mapping[str, Tensor], form: int) -> GpuMatrix | None:
    packed, blocks = (s.suffix for s in decoder.format.stored[:2])
    group = 16 if form == NVFP4 else 32
    if decoder.blocks[packed] != (1, 2) or decoder.blocks[blocks] != (1, group):
        return None
    values, scales = stored[packed], stored[blocks].view(torch.uint8)
    n, width = values.shape[-2:]
    divides, factor = False, scales
    if form == NVFP4:
        whole = decoder.format.stored[2].suffix
        factor, divides = stored[whole], whole == _DIVIDES
        if factor.dtype not in _FLOATS:
            return None
    return GpuMatrix(
        form, values, scales, factor, n, 2 * width, width, scales.shape[-1], 1, 1, 0 if form == NVFP4 else group,
        divides,
    )  # fmt: skip


def _rows(decoder: RowsDecoder, stored: Mapping[str, Tensor]) -> GpuMatrix | None:
    codes, words, order = stored[".codes"], stored[".scales"], stored.get(".order")
    if bool(decoder.scales(words).isinf().any()):
        return None
    form = INT4 if decoder.bits == 4 else INT8_ZEROS if decoder.points else INT8
    scales = words.view(torch.float32)[..., 0]
    return GpuMatrix(
        form, codes if form == INT4 else codes.view(torch.int8), scales, scales, codes.shape[-2], decoder.k,
        codes.shape[-1], scales.stride(-2), scales.stride(-1), 1, decoder.group, False,
        None if order is None else order.long(),
    )  # fmt: skip
