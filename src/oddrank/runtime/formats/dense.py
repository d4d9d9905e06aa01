"""Dense: the matrix itself, in bf16, fp16, fp32 or fp64."""

import torch
from torch import Tensor

from oddrank.runtime.formats.base import Decoder, Parts

KIND = "dense"


class DenseDecoder(Decoder):
    def dequantize(self, stored: Parts, dtype: torch.dtype) -> Tensor:
        values = stored[self.values].to(dtype)
        return values.mT if self.format.stored[0].shape == "kn" else values


DECODER = DenseDecoder
