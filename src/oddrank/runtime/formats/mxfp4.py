"""MXFP4: e2m1 values times a power of two per 32 columns, stored as its exponent + 127; 255 is NaN (OCP MX 1.0)."""

from functools import cache

import torch
from torch import Tensor

from oddrank.runtime.formats.base import Decoder, Parts
from oddrank.runtime.formats.e2m1 import unpack

KIND = "mxfp4"


@cache
def _powers(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        powers = [2.0 ** (code - 127) for code in range(255)]
        return torch.tensor([*powers, float("nan")], dtype=torch.float64).to(dtype).to(device)


class Mxfp4Decoder(Decoder):
    def dequantize(self, stored: Parts, dtype: torch.dtype) -> Tensor:
        packed, suffix = stored[self.values], self.format.stored[1].suffix
        values = unpack(packed.flatten(-2) if self.format.stored[0].inner else packed, dtype)
        codes = stored[suffix]
        scale = _powers(dtype, codes.device).index_select(0, codes.reshape(-1).int()).reshape(codes.shape)
        return values.mul_(self.spread(suffix, scale, *values.shape[-2:]))


DECODER = Mxfp4Decoder
