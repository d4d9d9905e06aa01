"""Root-mean-square normalisation."""

import torch
from torch import Tensor

from oddrank.runtime.layers.module import Module, Parameter

_HALF = (torch.bfloat16, torch.float16)


class RMSNorm(Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, `width` wide.

    Half-precision x is normalised in fp32 and rounded before the weight multiplies it, as transformers does.
    """

    def __init__(
        self, name: str, width: int, eps: float, dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self.weight = Parameter([(f"{name}.weight", width)], (), dtype)
        self.eps = eps
        self.inverse_width = 1.0 / width
        wide = torch.float32 if dtype in _HALF else dtype
        self._eps = torch.tensor(eps, dtype=wide, device=device)

    def __call__(self, x: Tensor) -> Tensor:
        weight = self.weight.data
        if x.dtype in _HALF:
            wide = x.float()
            scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(self.eps))
            return (wide * scale).to(x.dtype).mul_(weight)
        # The norm and one fused multiply-add: half the cost of torch's composite for a single token.
        length = torch.linalg.vector_norm(x, 2, -1, True)
        scale = torch.addcmul(self._eps, length, length, value=self.inverse_width).rsqrt_()
        return (x * scale).mul_(weight)
