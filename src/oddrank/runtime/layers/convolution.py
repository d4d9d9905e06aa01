"""A short causal convolution over the tokens of a sequence, channel by channel."""

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor

from oddrank.native.operations import compiled
from oddrank.native.prefill import prefill_convolution
from oddrank.runtime.layers.module import Module, Parameter
from oddrank.runtime.step import Step


class ShortConvolution(Module):
    """silu(sum over j of weight[c, j] * x[t - kernel + 1 + j, c]), with the inputs before the step from its state."""

    def __init__(self, name: str, channels: int, kernel: int, dtype: torch.dtype) -> None:
        self.weight = Parameter([(f"{name}.weight", channels)], (1, kernel), dtype)
        self.kernel = kernel
        self._taps: Tensor | None = None

    def prepare(self, threads: int) -> None:
        _ = self.taps

    @property
    def taps(self) -> Tensor:
        """[kernel, channels], dense; made once."""
        if self._taps is None:
            self._taps = self.weight.data.squeeze(1).t().contiguous()
        return self._taps

    def __call__(self, x: Tensor, step: Step, state: Tensor, threads: int = 1) -> Tensor:
        """x [tokens, channels]; state [slots, kernel - 1, channels], each slot's last inputs, updated in place."""
        library = compiled(x)
        if library is not None and not step.decode and state.dtype == x.dtype:
            return prefill_convolution(library, x, self.taps, state, step.spans, threads)
        taps = self.weight.data.squeeze(1)
        if step.decode:
            seen = torch.cat([state[: len(x)], x.unsqueeze(1)], 1)
            state[: len(x)] = seen[:, 1:]
            return F.silu((seen * taps.t()).sum(1))
        out = torch.empty_like(x)
        for s in step.segments:
            seen = torch.cat([state[s.slot], x[s.start : s.stop]])
            state[s.slot] = seen[len(seen) - self.kernel + 1 :]
            count = s.stop - s.start
            total = seen[:count] * taps[:, 0]
            for j in range(1, self.kernel):
                total.addcmul_(seen[j : j + count], taps[:, j])
            out[s.start : s.stop] = total
        return F.silu(out)
