"""What a gated delta net does with its projections (Yang et al., 2024, arXiv 2412.06464)."""

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor

from oddrank.native.delta import delta_step
from oddrank.native.operations import compiled
from oddrank.native.prefill import prefill_delta
from oddrank.runtime.layers.convolution import ShortConvolution
from oddrank.runtime.layers.gated_delta import UNIT_EPS, one_sequence, one_token, unit
from oddrank.runtime.layers.module import Module, Parameter
from oddrank.runtime.layers.norm import RMSNorm
from oddrank.runtime.step import Step


class GatedDeltaRule(Module):
    """Short convolution of qkv, the delta rule with a state per value head, norm and gate of what it reads.

    Value slot i reads the key slot partner[i], whichever.
    """

    def __init__(
        self,
        name: str,
        partner: npt.NDArray[np.int64],
        k_heads: int,
        widths: tuple[int, int],
        kernel: int,
        eps: float,
        dtype: torch.dtype,
        device: torch.device | str,
    ) -> None:
        """partner: int64 [value slots]. widths: of a key and of a value. kernel, eps: of convolution and norm."""
        self.v_heads, self.k_heads, (self.key_width, self.value_width) = len(partner), k_heads, widths
        k, v = k_heads * self.key_width, self.v_heads * self.value_width
        self.sections, self.channels = [k, k, v], 2 * k + v
        self.conv1d = ShortConvolution(f"{name}.conv1d", self.channels, kernel, dtype)
        wide = torch.promote_types(dtype, torch.float32)
        self.A_log = Parameter([(f"{name}.A_log", self.v_heads)], (), wide)
        self.dt_bias = Parameter([(f"{name}.dt_bias", self.v_heads)], (), wide)
        self.norm = RMSNorm(f"{name}.norm", self.value_width, eps, wide, device)
        self.partner = torch.from_numpy(partner.copy()).to(device)
        self._threads = 1

    def prepare(self, threads: int) -> None:
        self._threads = threads

    def __call__(
        self, qkv: Tensor, z: Tensor, b: Tensor, a: Tensor, step: Step, inputs: Tensor, memory: Tensor
    ) -> Tensor:
        """qkv [tokens, channels], z [tokens, value slots * width], b and a [tokens, value slots], parts of one product
        -> as z. inputs [slots, kernel - 1, channels] and memory [slots, value slots, key width, value width]: the
        layer's states, which go on in place."""
        library = compiled(qkv)
        if library is not None and step.decode:
            return delta_step(
                library, (qkv, z, b, a), self.conv1d.taps, (inputs, memory), self.A_log.data, self.dt_bias.data,
                self.norm.gain(), self.partner, self.norm.eps, UNIT_EPS, self._threads, step.order,
            )  # fmt: skip
        assert not step.decode or step.in_order
        tokens, wide = len(qkv), memory.dtype
        mixed = self.conv1d(qkv, step, inputs, self._threads)
        if library is not None and wide == torch.float32:
            return prefill_delta(
                library, mixed, (z, b, a), memory, self.A_log.data, self.dt_bias.data, self.norm.gain(), self.partner,
                self.norm.eps, UNIT_EPS, step.spans, self._threads,
            )  # fmt: skip
        q, k, v = torch.split_with_sizes(mixed.to(wide), self.sections, -1)
        q, k = (unit(t.view(tokens, self.k_heads, -1)).index_select(1, self.partner) for t in (q, k))
        v = v.view(tokens, self.v_heads, -1)
        decay = -self.A_log.data.exp() * F.softplus(a.to(wide) + self.dt_bias.data)
        q, beta = q * self.key_width**-0.5, torch.sigmoid(b.to(wide))
        found: Tensor | None = None
        if qkv.is_cuda:
            from oddrank.gpu.delta import read

            found = read(q, k, v, decay, beta, step, memory, qkv.dtype)
        out = self._read(q, k, v, decay, beta, step, memory) if found is None else found
        out = self.norm(out) * F.silu(z.view(out.shape).to(wide))
        return out.view(tokens, -1).to(qkv.dtype)

    def _read(self, q: Tensor, k: Tensor, v: Tensor, decay: Tensor, beta: Tensor, step: Step, memory: Tensor) -> Tensor:
        if step.decode:
            return one_token(q, k, v, decay, beta, memory[: len(q)])
        parts = [(slice(s.start, s.stop), memory[s.slot]) for s in step.segments]
        return torch.cat([one_sequence(q[at], k[at], v[at], decay[at], beta[at], state) for at, state in parts])
