"""e2m1: four-bit numbers, two a byte, the low nibble first (OCP Microscaling 1.0)."""

from functools import cache

import torch
from torch import Tensor

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


@cache
def _pairs(dtype: torch.dtype, device: torch.device) -> Tensor:
    """The two numbers of every byte, [256, 2]."""
    numbers = [*_MAGNITUDES, *(-m for m in _MAGNITUDES)]
    pairs = [[numbers[byte & 15], numbers[byte >> 4]] for byte in range(256)]
    with torch.inference_mode(False):
        return torch.tensor(pairs, dtype=dtype, device=device)


def unpack(packed: Tensor, dtype: torch.dtype) -> Tensor:
    """uint8 [..., K / 2] -> numbers [..., K]."""
    pairs = _pairs(dtype, packed.device).index_select(0, packed.reshape(-1).int())
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])
