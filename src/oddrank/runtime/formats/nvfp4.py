"""NVFP4: e2m1 values, an e4m3 scale per 16 columns, one fp32 scale for the tensor.

ModelOpt's `weight_scale_2` multiplies, compressed-tensors' `weight_global_scale` is its reciprocal and divides.
"""

import torch
from torch import Tensor

from oddrank.runtime.formats.base import Decoder, Parts
from oddrank.runtime.formats.e2m1 import unpack

KIND = "nvfp4"
_DIVIDES = ".weight_global_scale"


class Nvfp4Decoder(Decoder):
    def dequantize(self, stored: Parts, dtype: torch.dtype) -> Tensor:
        values = unpack(stored[self.values], dtype)
        n, k = values.shape[-2:]
        blocks, whole = (s.suffix for s in self.format.stored[1:3])
        over_all = self.spread(whole, stored[whole].to(dtype), n, k)
        scale = stored[blocks].to(dtype)
        scale = scale.div_(over_all) if whole == _DIVIDES else scale.mul_(over_all)
        return values.mul_(self.spread(blocks, scale, n, k))


DECODER = Nvfp4Decoder
