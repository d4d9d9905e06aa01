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
        self.eps, self.width = eps, width
        wide = torch.float32 if dtype in _HALF else dtype
        self._eps = torch.tensor(eps, dtype=wide, device=device)
        self._zero = torch.zeros(1, dtype=wide, device=device)
        self._on_host = torch.device(device).type == "cpu"

    def __call__(self, x: Tensor) -> Tensor:
        weight = self.weight.data
        if x.dtype in _HALF:
            wide = x.float()
            scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(self.eps))
            return (wide * scale).to(x.dtype).mul_(weight)
        # Torch's own is a composite of six operations, and what an operation costs to start is most of what a
        # norm costs a single token.
        if self._on_host and x.numel() == self.width:
            norm = torch.linalg.vector_norm(x).item()
            return torch.addcmul(self._zero, x, weight, value=(norm * norm / self.width + self.eps) ** -0.5)
        length = torch.linalg.vector_norm(x, 2, -1, True)
        scale = torch.addcmul(self._eps, length, length, value=1 / self.width).rsqrt_()
        return (x * scale).mul_(weight)
