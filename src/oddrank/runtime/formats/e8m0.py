"""e8m0: powers of two, stored as their exponent + 127; 255 is NaN (OCP Microscaling 1.0)."""

from functools import cache

import torch
from torch import Tensor


@cache
def _powers(dtype: torch.dtype, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        powers = [2.0 ** (code - 127) for code in range(255)]
        return torch.tensor([*powers, float("nan")], dtype=torch.float64).to(dtype).to(device)


def numbers(codes: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 codes of any shape -> their powers of two."""
    return _powers(dtype, codes.device).index_select(0, codes.reshape(-1).int()).reshape(codes.shape)
