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
        self.weight = Parameter([(f"{name}.weight", width)], (), self._held_in(dtype))
        self.eps, self.width = eps, width
        wide = torch.float32 if dtype in _HALF else dtype
        self._eps = torch.tensor(eps, dtype=wide, device=device)
        self._zero = torch.zeros(1, dtype=wide, device=device)
        self._on_host = torch.device(device).type == "cpu"

    def _held_in(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def _gain(self) -> Tensor:
        return self.weight.data

    def __call__(self, x: Tensor) -> Tensor:
        weight = self._gain()
        if x.dtype in _HALF:
            wide = x.float()
            scale = torch.rsqrt(wide.square().mean(-1, keepdim=True).add_(self.eps))
            normed = (wide * scale).to(weight.dtype)
            return normed.mul_(weight).to(x.dtype)
        # Torch's own is a composite of six operations, and what an operation costs to start is most of what a
        # norm costs a single token.
        if self._on_host and x.numel() == self.width:
            norm = torch.linalg.vector_norm(x).item()
            return torch.addcmul(self._zero, x, weight, value=(norm * norm / self.width + self.eps) ** -0.5)
        length = torch.linalg.vector_norm(x, 2, -1, True)
        scale = torch.addcmul(self._eps, length, length, value=1 / self.width).rsqrt_()
        return (x * scale).mul_(weight)


class UnitOffsetRMSNorm(RMSNorm):
    """The same with 1 + weight. Half-precision x is rounded after the product, as transformers does."""

    _sum: Tensor | None = None

    def _held_in(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if dtype in _HALF else dtype

    def _gain(self) -> Tensor:
        if self._sum is None:
            self._sum = 1 + self.weight.data
        return self._sum
