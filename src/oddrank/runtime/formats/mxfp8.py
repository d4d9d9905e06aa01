"""MXFP8: e4m3 values times a power of two per 32 columns (OCP MX 1.0)."""

import torch
from torch import Tensor

from oddrank.runtime.formats import e8m0
from oddrank.runtime.formats.base import Decoder, Parts

KIND = "mxfp8"


class Mxfp8Decoder(Decoder):
    def dequantize(self, stored: Parts, dtype: torch.dtype) -> Tensor:
        values, suffix = stored[self.values].to(dtype), self.format.stored[1].suffix
        return values.mul_(self.spread(suffix, e8m0.numbers(stored[suffix], dtype), *values.shape[-2:]))


DECODER = Mxfp8Decoder
