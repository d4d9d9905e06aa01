"""Dense: the matrix itself, in bf16, fp16, fp32 or fp64."""

import torch
from torch import Tensor

from oddrank.runtime.formats.base import Decoder, Parts

KIND = "dense"


class DenseDecoder(Decoder):
    def dequantize(self, stored: Parts, dtype: torch.dtype) -> Tensor:
        return stored[self.values].to(dtype)


DECODER = DenseDecoder
