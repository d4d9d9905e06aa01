"""Packed integers as the kernels take them, on a CPU and on a GPU, whatever order they are stored in: rows of codes,
and scales with their zero points.

`.codes` uint8 [..., N, ceil(K bits / 32) * 4]: of 4 bits two a byte, the low nibble first; of 8 bits signed bytes, the
code less 128. `.scales` uint8 [..., N, ceil(K / g), bytes], g is 32, 64 or 128: of 4 bits the bytes of an fp32 scale
whose lowest is the zero point, from 0 to 16, and no part of the number; of 8 bits those of an fp32 scale and, where
there are zero points, of a word: the zero point less 128, z, in its low half, and 128 z in the other.
`.order` int32 [K], only where columns are scattered over scale groups: the matrix's columns in the order of their
groups, as codes and scales have them.
"""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from oddrank.errors import OddrankError
from oddrank.formats import Format, Stored
from oddrank.native import library
from oddrank.runtime.formats.base import Decoder, Parts
from oddrank.runtime.formats.integers import IntegerDecoder

Held = dict[str, tuple[tuple[int, ...], torch.dtype]]
"""Suffix -> shape and type of what is held."""

_ROW_ELEMENTS = 1 << 20
"""Codes put in order at a time."""
_MANTISSA = 256
"""fp32 bits that make way for the zero point: 2^8 of them, so scales of bf16 and fp16 stay what they are."""
_SIGNS = 0x80808080 - (1 << 32)
"""What makes offset bytes signed ones, as int32."""


class RowsDecoder(Decoder):
    """group: columns that share a scale. k: of the matrix; the last word of a row may have more codes. bits: of a code.
    points: whether codes of 8 bits have zero points; of 4 bits they do."""

    def __init__(self, group: int, k: int, bits: int = 4, points: bool = True) -> None:
        parts = (
            Stored(".codes", ("U8",), (1, 32 // bits), inner=4),
            Stored(".scales", ("U8",), (1, group), shared=True, inner=8 if bits == 8 and points else 4),
            Stored(".order", ("I32",), (0, 1), "k", optional=True),
        )
        super().__init__(Format(f"int{bits}-rows", parts))
        self.group, self.k, self.bits, self.points = group, k, bits, points

    def shape(self, suffix: str, n: int, k: int, leading: tuple[int, ...] = ()) -> tuple[int, ...]:
        found = super().shape(suffix, n, k, leading)
        return (*found[:-2], found[-2] * found[-1]) if suffix == ".codes" else found

    def dequantize(self, stored: Parts, dtype: torch.dtype) -> Tensor:
        words = stored[".scales"]
        codes = nibbles(stored[".codes"]) if self.bits == 4 else stored[".codes"].view(torch.int8)
        numbers = codes[..., : self.k].to(dtype)
        at = torch.arange(self.k, device=codes.device) // self.group
        if self.bits == 4:
            numbers.sub_(words[..., 0].to(dtype).index_select(-1, at))
        elif self.points:
            numbers.sub_(words.view(torch.int16)[..., 2].to(dtype).index_select(-1, at))
        found = self.scales(words).to(dtype).index_select(-1, at).mul_(numbers)
        order = stored.get(".order")
        return found if order is None else torch.empty_like(found).index_copy_(-1, order.long(), found)

    def scales(self, words: Tensor) -> Tensor:
        """`.scales` -> fp32 [..., N, ceil(K / group)]."""
        bits = words.view(torch.int32)[..., 0]
        return (bits & -_MANTISSA if self.bits == 4 else bits).view(torch.float32)

    def take(self, stored: Parts, rows: Tensor, dtype: torch.dtype) -> Tensor:
        found = {suffix: t if suffix == ".order" else t.index_select(0, rows) for suffix, t in stored.items()}
        return self.dequantize(found, torch.float64 if dtype == torch.float64 else torch.float32).to(dtype)


def nibbles(codes: Tensor) -> Tensor:
    """uint8 [..., n] -> uint8 [..., 2 n]."""
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)


class Packing:
    """How a stored form becomes rows, some rows of a stored tensor at a time.

    stored: its decoder. k: the matrix's columns. decoder: of the rows.
    """

    def __init__(self, stored: IntegerDecoder, k: int) -> None:
        self.stored, self.k = stored, k
        values, scales = stored.format.stored[:2]
        points = stored.format.zero_points
        self.decoder = RowsDecoder(math.gcd(stored.group, 128) or 128, k, stored.bits, points is not None)
        self._repeated = stored.group // self.decoder.group  # 0: one scale for all columns
        self.sources = {values.suffix: ".codes", scales.suffix: ".scales"}
        if points is not None:
            self.sources[points.suffix] = ".scales"

    def held(self, n: int) -> Held:
        """What is held of a matrix [n, k], without an order of columns."""
        return {suffix: (self.decoder.shape(suffix, n, self.k), torch.uint8) for suffix in (".codes", ".scales")}

    def pack(self, suffix: str, words: Tensor, first: int, out: Tensor) -> None:
        """Put rows first, first + 1, ... of a stored tensor where they belong in `out`, what is held of its matrix.
        first: a multiple of 8."""
        if suffix == self.stored.values:
            signed = words if self.stored.bits == 4 else words ^ _SIGNS
            self.stored.pack_codes(signed, first, out.view(torch.int32))
        elif self.sources[suffix] == ".scales" and words.is_floating_point():
            self._pack_scales(suffix, words, first, out)
        else:
            zeros = self.stored.pack_zeros(words)  # the last word of a column may have more than there are rows
            if self.stored.format.at(suffix).shape != "kn":
                per = 32 // self.stored.bits
                out, first = out[per * first : per * first + len(zeros)], 0
            self._pack_zeros(zeros[: len(out)], first, out)

    def _pack_zeros(self, zeros: Tensor, first: int, out: Tensor) -> None:
        if self.stored.bits == 4:
            self._spread(zeros.byte(), first, out[..., 0])
            return
        zeros = zeros - 128
        self._spread(zeros & 0xFFFF | zeros << 23, first, out.view(torch.int32)[..., 1])

    def _pack_scales(self, suffix: str, scales: Tensor, first: int, out: Tensor) -> None:
        turned = self.stored.format.at(suffix).shape == "kn"
        found = scales.t() if turned else scales
        bits = torch.empty(found.shape).copy_(found).view(torch.int32)  # of one column `contiguous` leaves any strides
        if not turned:
            out, first = out[first : first + len(bits)], 0
        if self.stored.bits == 8:
            self._spread(bits, first, out.view(torch.int32)[..., 0])
            return
        if scales.element_size() > 2:
            bits = bits + _MANTISSA // 2  # to the nearest; infinities and NaN stay what they are
        if not self.decoder.points:
            out[..., 0] = 8
        whole = bits.view(torch.uint8).view(*bits.shape, 4)
        for byte in range(1, 4):
            self._spread(whole[..., byte], first, out[..., byte])

    def _spread(self, values: Tensor, first: int, out: Tensor) -> None:
        """values [n, some groups from `first` on] into out [n, all groups of the rows]."""
        if not self._repeated:
            out.copy_(values.expand(out.shape))
            return
        at = first * self._repeated
        part = values.repeat_interleave(self._repeated, 1)[:, : out.shape[1] - at]
        out[:, at : at + part.shape[1]] = part

    def order(self, groups: Tensor, codes: Tensor, name: str) -> Tensor:
        """Put the columns of `codes` in the order of their scale groups, int32 [k]; returns it. OddrankError where the
        groups have other numbers of columns than the config says; name: the stored tensor's, for that."""
        order = groups.argsort(stable=True)
        if not torch.equal(groups[order].long(), torch.arange(self.k) // (self.stored.group or self.k)):
            raise OddrankError(
                f"{name}: its {self.k} columns do not lie in groups of {self.stored.group}, 0, 1, 2, ... one after the "
                "other, in any order. The compiled kernels take no others; ODDRANK_KERNELS=torch does without them."
            )
        step = max(1, _ROW_ELEMENTS // max(1, self.k))
        for start in range(0, len(codes), step):
            rows = codes[start : start + step]
            if self.stored.bits == 8:
                rows[:, : self.k] = rows.index_select(1, order)
                continue
            found = torch.zeros(len(rows), 2 * rows.shape[1], dtype=torch.uint8)
            found[:, : self.k] = nibbles(rows).index_select(1, order)
            rows.copy_(found[:, 0::2] | found[:, 1::2] << 4)
        return order.int()


def packing_of(
    stored: Decoder, k: int, dtype_of: Callable[[str], str], *, exact: bool, device: torch.device | str = "cpu"
) -> Packing | None:
    """How the kernels have a stored form packed; None where they do not take it, or where there are none for `device`.

    dtype_of: safetensors dtype of the stored tensor of a suffix. Scales of int4 wider than 16 bits are rounded by up to
    2^-17, those of int8 wider than 32, so only where products need not be exact.
    """
    if not isinstance(stored, IntegerDecoder) or stored.group % 32 or not k:
        return None
    if not _kernels(torch.device(device).type):
        return None
    kept = ("BF16", "F16") if stored.bits == 4 else ("BF16", "F16", "F32")
    return None if exact and dtype_of(stored.format.stored[1].suffix) not in kept else Packing(stored, k)


def _kernels(device: str) -> bool:
    if device == "cpu":
        return library() is not None
    if device != "cuda":
        return False
    from oddrank.gpu import triton_works

    return triton_works()
