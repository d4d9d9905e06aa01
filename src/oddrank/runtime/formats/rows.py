"""int4 as the kernels take it, on a CPU and on a GPU, whatever order it is stored in: rows of codes, a scale and its
zero a word.

`.codes` uint8 [..., N, 4 * ceil(K / 8)]: two a byte, the low nibble first. `.scales` uint8 [..., N, ceil(K / g), 4]:
the bytes of an fp32 scale whose lowest is the zero point, from 0 to 16, and no part of the number; g is 32, 64 or 128.
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


class RowsDecoder(Decoder):
    """group: columns that share a scale. k: of the matrix; the last word of a row may have more codes."""

    def __init__(self, group: int, k: int) -> None:
        parts = (
            Stored(".codes", ("U8",), (1, 8), inner=4),
            Stored(".scales", ("U8",), (1, group), shared=True, inner=4),
            Stored(".order", ("I32",), (0, 1), "k", optional=True),
        )
        super().__init__(Format("int4-rows", parts))
        self.group, self.k = group, k

    def shape(self, suffix: str, n: int, k: int, leading: tuple[int, ...] = ()) -> tuple[int, ...]:
        found = super().shape(suffix, n, k, leading)
        return (*found[:-2], found[-2] * found[-1]) if suffix == ".codes" else found

    def dequantize(self, stored: Parts, dtype: torch.dtype) -> Tensor:
        codes = nibbles(stored[".codes"])[..., : self.k]
        words = stored[".scales"]
        zeros, scales = words[..., 0].to(dtype), scales_of(words).to(dtype)
        at = torch.arange(self.k, device=codes.device) // self.group
        found = scales.index_select(-1, at).mul_(codes.to(dtype).sub_(zeros.index_select(-1, at)))
        order = stored.get(".order")
        return found if order is None else torch.empty_like(found).index_copy_(-1, order.long(), found)

    def take(self, stored: Parts, rows: Tensor, dtype: torch.dtype) -> Tensor:
        found = {suffix: t if suffix == ".order" else t.index_select(0, rows) for suffix, t in stored.items()}
        return self.dequantize(found, torch.float64 if dtype == torch.float64 else torch.float32).to(dtype)


def nibbles(codes: Tensor) -> Tensor:
    """uint8 [..., n] -> uint8 [..., 2 n]."""
    return torch.stack((codes & 15, codes >> 4), -1).flatten(-2)


def scales_of(words: Tensor) -> Tensor:
    """uint8 [..., 4] -> fp32 [...]."""
    return words.view(torch.int32).bitwise_and(-_MANTISSA).view(torch.float32)[..., 0]


class Packing:
    """How a stored form becomes rows, some rows of a stored tensor at a time.

    stored: its decoder. k: the matrix's columns. decoder: of the rows.
    """

    def __init__(self, stored: IntegerDecoder, k: int) -> None:
        self.stored, self.k = stored, k
        self.decoder = RowsDecoder(math.gcd(stored.group, 128) or 128, k)
        self._repeated = stored.group // self.decoder.group  # 0: one scale for all columns
        values, scales = stored.format.stored[:2]
        points = stored.format.zero_points
        self._middle = 8 if points is None else None
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
            self.stored.pack_codes(words, first, out.view(torch.int32))
        elif self.sources[suffix] == ".scales" and words.is_floating_point():
            self._pack_scales(suffix, words, first, out)
        else:
            zeros = self.stored.pack_zeros(words)  # the last word of a column may have more than there are rows
            if self.stored.format.at(suffix).shape == "kn":
                self._spread(zeros[: len(out)], first, out[..., 0])
            else:
                rows = out[8 * first : 8 * first + len(zeros)]
                self._spread(zeros[: len(rows)], 0, rows[..., 0])

    def _pack_scales(self, suffix: str, scales: Tensor, first: int, out: Tensor) -> None:
        turned = self.stored.format.at(suffix).shape == "kn"
        found = scales.t() if turned else scales
        bits = torch.empty(found.shape).copy_(found).view(torch.int32)  # of one column `contiguous` leaves any strides
        if scales.element_size() > 2:
            bits = bits + _MANTISSA // 2  # to the nearest; infinities and NaN stay what they are
        whole = bits.view(torch.uint8).view(*bits.shape, 4)
        if not turned:
            out, first = out[first : first + len(whole)], 0
        if self._middle is not None:
            out[..., 0] = self._middle
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
            found = torch.zeros(len(rows), 2 * rows.shape[1], dtype=torch.uint8)
            found[:, : self.k] = nibbles(rows).index_select(1, order)
            rows.copy_(found[:, 0::2] | found[:, 1::2] << 4)
        return order.int()


def packing_of(
    stored: Decoder, k: int, dtype_of: Callable[[str], str], *, exact: bool, device: torch.device | str = "cpu"
) -> Packing | None:
    """How the kernels have a stored form packed; None where they do not take it, or where there are none for `device`.

    dtype_of: safetensors dtype of the stored tensor of a suffix. Scales wider than 16 bits are rounded by up to 2^-17,
    so only where products need not be exact.
    """
    if not isinstance(stored, IntegerDecoder) or stored.bits != 4 or stored.group % 32 or not k:
        return None
    if not _kernels(torch.device(device).type):
        return None
    return None if exact and dtype_of(stored.format.stored[1].suffix) not in ("BF16", "F16") else Packing(stored, k)


def _kernels(device: str) -> bool:
    if device == "cpu":
        return library() is not None
    if device != "cuda":
        return False
    from oddrank.gpu import triton_works

    return triton_works()
