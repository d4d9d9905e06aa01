"""MXFP4: e2m1 values times a power of two per 32 columns (OCP MX 1.0)."""

import torch
from torch import Tensor

from oddrank.runtime.formats import e8m0
from oddrank.runtime.formats.base import Decoder, Parts
from oddrank.runtime.formats.e2m1 import unpack

KIND = "mxfp4"


class Mxfp4Decoder(Decoder):
    def dequantize(self, stored: Parts, dtype: torch.dtype) -> Tensor:
        packed, suffix = stored[self.values], self.format.stored[1].suffix
        values = unpack(packed.flatten(-2) if self.format.stored[0].inner else packed, dtype)
        return values.mul_(self.spread(suffix, e8m0.numbers(stored[suffix], dtype), *values.shape[-2:]))


DECODER = Mxfp4Decoder
