"""int8 values times a scale per output channel or for the whole tensor. Activations are not rounded to int8."""

import torch
from torch import Tensor

from oddrank.runtime.formats.base import Decoder, Parts

KIND = ("int8-channel", "int8-tensor")


class Int8Decoder(Decoder):
    def dequantize(self, stored: Parts, dtype: torch.dtype) -> Tensor:
        values, suffix = stored[self.values].to(dtype), self.format.stored[1].suffix
        return values.mul_(self.spread(suffix, stored[suffix].to(dtype), *values.shape[-2:]))


DECODER = Int8Decoder
