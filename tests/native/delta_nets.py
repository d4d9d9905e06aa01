"""A gated delta net's layer, and what transformers' modules and the paper's equation give for it in float64."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers.models.qwen3_5.modeling_qwen3_5 import causal_conv1d_update, torch_recurrent_gated_delta_rule

from oddrank.native import Library
from oddrank.native.delta import delta_step
from oddrank.native.prefill import prefill_convolution, prefill_delta

EPS, UNIT = 1e-4, 1e-6


class Net(NamedTuple):
    """A layer's constants and the states of `slots` sequences."""

    k_heads: int
    partner: Tensor
    widths: tuple[int, int]
    kernel: int
    taps: Tensor  # [channels, kernel]
    inputs: Tensor
    memory: Tensor
    a_log: Tensor
    dt_bias: Tensor
    norm: Tensor

    @classmethod
    def random(cls, k_heads: int, partner: list[int], widths: tuple[int, int], kernel: int, slots: int) -> Net:
        v_heads, channels = len(partner), 2 * k_heads * widths[0] + len(partner) * widths[1]
        return cls(
            k_heads, torch.tensor(partner), widths, kernel, torch.randn(channels, kernel),
            torch.randn(slots, kernel - 1, channels), torch.randn(slots, v_heads, *widths),
            torch.randn(v_heads), torch.randn(v_heads), torch.randn(widths[1]),
        )  # fmt: skip

    def project(self, n: int) -> tuple[Tensor, ...]:
        v_heads, channels = len(self.partner), len(self.taps)
        sizes = [channels, v_heads * self.widths[1], v_heads, v_heads]
        return torch.randn(n, sum(sizes) + 3)[:, 3:].split(sizes, -1)

    def step(self, library: Library, projected: tuple[Any, ...], threads: int = 1) -> Tensor:
        return delta_step(
            library, projected, self.taps.t().contiguous(), (self.inputs, self.memory), self.a_log, self.dt_bias,
            self.norm, self.partner, EPS, UNIT, threads,
        )  # fmt: skip

    def prompts(self, library: Library, projected: tuple[Any, ...], spans: Tensor, threads: int = 1) -> Tensor:
        qkv, *gates = projected
        mixed = prefill_convolution(library, qkv, self.taps.t().contiguous(), self.inputs, spans, threads)
        return prefill_delta(
            library, mixed, tuple(gates), self.memory, self.a_log, self.dt_bias, self.norm, self.partner, EPS, UNIT,
            spans, threads,
        )  # fmt: skip


def theirs(net: Net, projected: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """(output, inputs, memory) of transformers' modules in float64, of the sequences in the first slots."""
    qkv, z, b, a = (x.double() for x in projected)
    n, (keys, values) = len(qkv), net.widths
    # its state holds one input more than it reads
    state = F.pad(net.inputs[:n].double().transpose(1, 2), (1, 0)).contiguous()
    mixed = causal_conv1d_update(qkv.unsqueeze(-1), state, net.taps.double(), None, "silu").squeeze(-1)
    q, k, v = mixed.split([net.k_heads * keys] * 2 + [len(net.partner) * values], -1)
    q, k = (x.view(n, 1, net.k_heads, keys).index_select(2, net.partner) for x in (q, k))
    g = -net.a_log.double().exp() * F.softplus(a + net.dt_bias.double())
    out, memory = torch_recurrent_gated_delta_rule(
        q.float(), k.float(), v.view(n, 1, -1, values).float(), g[:, None].float(), torch.sigmoid(b)[:, None].float(),
        initial_state=net.memory[:n].clone(), output_final_state=True, use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    out = out[:, 0].double()
    out = out / (out.square().mean(-1, keepdim=True) + EPS).sqrt() * net.norm.double() * F.silu(z.view(out.shape))
    return out.flatten(1), state[:, :, 1:].transpose(1, 2), memory.double()


def written_out(net: Net, projected: tuple[Tensor, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """The same from the paper's equation, float64 throughout."""
    qkv, z, b, a = (x.double() for x in projected)
    n, (keys, values) = len(qkv), net.widths
    seen = torch.cat([net.inputs[:n].double(), qkv[:, None]], 1)
    mixed = F.silu((seen * net.taps.double().t()).sum(1))
    out, memory = torch.empty(n, len(net.partner), values, dtype=torch.float64), net.memory[:n].double()
    for i in range(n):
        for h, j in enumerate(net.partner.tolist()):
            q, k = mixed[i, j * keys : (j + 1) * keys], mixed[i, (net.k_heads + j) * keys :][:keys]
            q, k = (x / (x.square().sum() + UNIT).sqrt() for x in (q, k))
            v = mixed[i, 2 * net.k_heads * keys + h * values :][:values]
            decay = torch.exp(-net.a_log[h].double().exp() * F.softplus(a[i, h] + net.dt_bias[h].double()))
            beta = torch.sigmoid(b[i, h])
            s = decay * memory[i, h]
            memory[i, h] = s = s + torch.outer(k, beta * (v - k @ s))
            o = q @ s * keys**-0.5
            out[i, h] = o / (o.square().mean() + EPS).sqrt() * net.norm.double() * F.silu(z[i].view(-1, values)[h])
    return out.flatten(1), seen[:, 1:], memory
