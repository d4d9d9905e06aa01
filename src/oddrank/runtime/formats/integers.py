"""Codes of 4 and 8 bits in 32-bit words, and what is common to the formats that pack them so: (code - zero) * scale."""

from abc import abstractmethod
from typing import NamedTuple

import torch
from torch import Tensor

from oddrank.runtime.formats.base import Decoder, Parts


def unpack(words: Tensor, bits: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32 [..., n] -> codes, int32 [..., n * 32 / bits], the low bits first. order: which code of a word is each."""
    places = order or range(32 // bits)
    shifts = torch.tensor([bits * place for place in places], dtype=torch.int32, device=words.device)
    return (words[..., None] >> shifts).bitwise_and_((1 << bits) - 1).flatten(-2)


class Codes(NamedTuple):
    """codes: int32 [..., N, K]. zeros: [..., N, G], or a number for all. scales: [..., N, G], as stored."""

    codes: Tensor
    zeros: Tensor | int
    scales: Tensor


class IntegerDecoder(Decoder):
    """A form of packed integers, which a subclass unpacks."""

    @property
    def bits(self) -> int:
        return int(self.name[3])

    @property
    def group(self) -> int:
        """Columns that share a scale; 0: all."""
        return max((self.blocks[s.suffix][1] for s in self.format.stored if s.shared is True), default=0)

    @property
    def index(self) -> str:
        """The suffix of what says which scale group a column is in; "" where nothing does."""
        return next((s.suffix for s in self.format.stored if s.rewritten == "groups"), "")

    def in_order(self, groups: Tensor) -> bool:
        """Whether the scale groups of columns, int32 [K], are what no index at all would say; -1 throughout is none."""
        k = len(groups)
        return bool((groups < 0).all()) or torch.equal(groups.long(), torch.arange(k) // (self.group or max(1, k)))

    @abstractmethod
    def unpacked(self, stored: Parts) -> Codes:
        """What the words of a matrix [..., N, K] say."""

    @abstractmethod
    def pack_codes(self, words: Tensor, first: int, out: Tensor) -> None:
        """Rows first, ... of the stored values, a multiple of 8 that they begin at, into int32 [N, ceil(K bits / 32)]:
        words of codes along K, the low bits first. See rows.py."""

    @abstractmethod
    def pack_zeros(self, words: Tensor) -> Tensor:
        """Stored zero points -> int32 [N, G]."""

    def dequantize(self, stored: Parts, dtype: torch.dtype) -> Tensor:
        found = self.unpacked(stored)
        k, at = found.codes.shape[-1], stored.get(self.index)
        if at is None or bool((at < 0).all()):
            at = torch.arange(k, device=found.codes.device) // (self.group or max(1, k))
        at = at.long().expand(*found.codes.shape[:-2], k).unsqueeze(-2)
        scales = torch.take_along_dim(found.scales.to(dtype), at, -1)
        zeros = found.zeros if isinstance(found.zeros, int) else torch.take_along_dim(found.zeros, at, -1)
        return scales.mul_((found.codes - zeros).to(dtype))

    def take(self, stored: Parts, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """By the whole words of rows that they are packed in."""
        step, found = self._tile_rows, {}
        blocks = rows // step
        for suffix, tensor in stored.items():
            block, shape = self.blocks[suffix][0], self._stored[suffix].shape
            if block == 0 or shape in ("one", "scalar", "k"):
                found[suffix] = tensor
                continue
            dim, each = -1 if shape == "kn" else 0, step // block
            entries = blocks[:, None] * each + torch.arange(each, device=rows.device)
            found[suffix] = tensor.index_select(dim, entries.flatten().clamp_(max=tensor.shape[dim] - 1))
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        places = torch.arange(len(rows), device=rows.device) * step + rows % step
        return self.dequantize(found, wide).index_select(0, places).to(dtype)
