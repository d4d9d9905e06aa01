"""fp8: e4m3 values times a scale per block, per output channel or for the whole tensor; every dialect multiplies."""

import torch
from torch import Tensor

from oddrank.runtime.formats.base import Decoder, Parts

KIND = "fp8"


class Fp8Decoder(Decoder):
    def dequantize(self, stored: Parts, dtype: torch.dtype) -> Tensor:
        values, suffix = stored[self.values].to(dtype), self.format.stored[1].suffix
        return values.mul_(self.spread(suffix, stored[suffix].to(dtype), *values.shape[-2:]))


DECODER = Fp8Decoder
