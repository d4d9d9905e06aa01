"""Root-mean-square normalisation."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from oddrank.errors import OddrankError
from oddrank.native.norm import rms_norm
from oddrank.native.operations import compiled
from oddrank.runtime.layers.module import Module, Parameter
from oddrank.runtime.parallel.group import Group

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
        self._threads = 1

    def prepare(self, threads: int) -> None:
        self._threads = threads

    def _held_in(self, dtype: torch.dtype) -> torch.dtype:
        return dtype

    def gain(self) -> Tensor:
        """What the normed numbers are multiplied by, [width]."""
        return self.weight.data

    def add(self, x: Tensor, term: Tensor) -> Tensor:
        """x += term, both dense; then the norm of x."""
        library = compiled(x)
        if library is None:
            return self.torch(x.add_(term))
        return rms_norm(library, x, self.gain(), self.eps, delta=term, threads=self._threads)

    def __call__(self, x: Tensor) -> Tensor:
        library = compiled(x)
        if library is None or x.dim() > 3 or x.stride(-1) != 1:
            return self.torch(x)
        return rms_norm(library, x, self.gain(), self.eps, threads=self._threads)

    def torch(self, x: Tensor) -> Tensor:
        """The same by torch: for what the compiled norm does not take."""
        weight = self.gain()
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

    def prepare(self, threads: int) -> None:
        super().prepare(threads)
        self.gain()

    def _held_in(self, dtype: torch.dtype) -> torch.dtype:
        return torch.float32 if dtype in _HALF else dtype

    def gain(self) -> Tensor:
        if self._sum is None:
            self._sum = 1 + self.weight.data
        return self._sum


class RMSNormAcrossRanks(Module):
    """An RMS norm over all heads of the model, of which this rank has some: the ranks' sums of squares are added, and
    divided by the real number of channels. A head that several ranks hold counts once, a dummy not at all.

    x [tokens, slots * dim] -> the same. One all-reduce of a number a token. Every rank constructs it at the same time:
    they tell each other which heads they hold (one all-gather).
    """

    def __init__(
        self,
        name: str,
        source: npt.NDArray[np.int64],
        heads: int,
        dim: int,
        eps: float,
        dtype: torch.dtype,
        group: Group,
    ) -> None:
        """source: int64 [slots], the head in each of this rank's slots, -1 for a dummy. heads: of the model.

        OddrankError where some head is on no rank.
        """
        self.weight = Parameter([(f"{name}.weight", len(source) * dim)], (), dtype)
        self.group, self.eps, self.dim, self.width = group, eps, dim, heads * dim
        held = group.all_gather(torch.from_numpy(np.array(source)).to(group.device), 0).cpu().numpy()
        copies = np.bincount(held[held >= 0], minlength=heads)
        if (copies == 0).any():
            raise OddrankError(f"{name}: head {int(copies.argmin())} of {heads} is on no rank, so no rank can norm it.")
        share = np.where(source >= 0, 1 / copies[source], 0)
        wide = torch.promote_types(dtype, torch.float32)
        self._share = torch.from_numpy(share).to(group.device, wide)

    def __call__(self, x: Tensor) -> Tensor:
        wide = x.to(self._share.dtype)
        squares = wide.view(len(x), len(self._share), self.dim).square().sum(-1) @ self._share
        mean = self.group.all_reduce(squares).div_(self.width)
        return (wide * torch.rsqrt(mean.add_(self.eps))[:, None]).to(x.dtype).mul_(self.weight.data)
