"""The kernel of routed experts: the compiled one where it takes them, and the reference in plain torch.

A batch is sorted by expert once; each expert that was chosen decodes its weights once, computes for its tokens, and its
weighted outputs are added in the order of the experts, so a sum has one order whoever computed its terms.
"""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from oddrank.native import NativeExperts, native_experts, native_matrix
from oddrank.runtime.formats import Decoder

Activation = Callable[[Tensor], Tensor]
BIAS = "_bias"
"""The suffix of a bank's biases, [experts, 1, N]."""

Stored = Mapping[str, Tensor]
"""A stored matrix: suffix -> tensor."""


class Routed(NamedTuple):
    """The part of a batch that chose one expert. tokens: int64 [n], rows of the batch, ascending. weights: [n, 1]."""

    expert: int
    tokens: Tensor
    weights: Tensor


class Batch(NamedTuple):
    """x: [tokens, hidden] in the type to compute in. routed: one entry for each expert that was chosen, ascending."""

    x: Tensor
    routed: list[Routed]

    def to(self, device: torch.device | str) -> "Batch":
        """The same on another device."""
        target = torch.device(device)
        if self.x.device == target:
            return self
        moved = [Routed(r.expert, r.tokens.to(target), r.weights.to(target)) for r in self.routed]
        return Batch(self.x.to(target), moved)


def compute_dtype(x: torch.dtype) -> torch.dtype:
    """Experts are computed in float64 for float64 activations and in fp32 for all others."""
    return torch.float64 if x == torch.float64 else torch.float32


def route(x: Tensor, weights: Tensor, ids: Tensor) -> Batch:
    """x [tokens, hidden], weights and ids [tokens, k] (each token's experts, all different) -> the batch by expert."""
    dtype, k = compute_dtype(x.dtype), ids.shape[-1]
    flat = ids.reshape(-1)
    order = flat.argsort(stable=True)
    tokens, scale = order // k, weights.reshape(-1, 1).index_select(0, order).to(dtype)
    chosen, counts = torch.unique_consecutive(flat.index_select(0, order), return_counts=True)
    routed, start = [], 0
    for expert, count in zip(chosen.tolist(), counts.tolist(), strict=True):
        routed.append(Routed(expert, tokens[start : start + count], scale[start : start + count]))
        start += count
    return Batch(x.to(dtype), routed)


class ExpertKernel(NamedTuple):
    """What it takes to compute one expert: how its two matrices are stored, and the activation between them. exact: see
    NativeMatrix.

    unit: what makes [..., gate and up] one, where that is not act(gate) * up. adds_bias: None where banks have no
    biases, else whether this rank is the one that adds the output's: ranks are summed after the router's weights.
    """

    gate_up: Decoder
    down: Decoder
    activation: Activation
    exact: bool = True
    unit: Activation | None = None
    adds_bias: bool | None = None

    @property
    def plain(self) -> bool:
        """Whether an expert is down(act(gate(x)) * up(x)) and nothing else: what whole layers are compiled for."""
        return self.unit is None and self.adds_bias is None

    def term(self, batch: Batch, routed: Routed, gate_up: Stored, down: Stored) -> Tensor:
        """One expert's weighted output for its tokens, [n, hidden], on the device of the stored parts."""
        dtype = batch.x.dtype
        rows = batch.x.index_select(0, routed.tokens)
        if dtype == torch.float32 and (one := self.native(_alone(gate_up), _alone(down))) is not None:
            zero = torch.zeros(len(rows), 1, dtype=torch.int64)
            return one(rows, routed.weights, zero, torch.get_num_threads())
        both = self._product(self.gate_up, gate_up, rows, gate_up.get(BIAS))
        if self.unit is None:
            gate, up = both.chunk(2, -1)
            inner = self.activation(gate).mul_(up)
        else:
            inner = self.unit(both)
        out = self._product(self.down, down, inner, down.get(BIAS) if self.adds_bias else None)
        return out.mul_(routed.weights)

    def _product(self, decoder: Decoder, stored: Stored, x: Tensor, bias: Tensor | None) -> Tensor:
        """x [n, K] times the transposed matrix, whose sections are one above the other, plus bias [1, N]."""
        values = stored[decoder.values]
        if x.dtype == torch.float32 and len(values) == 1 and not self.plain:
            one = native_matrix(decoder, {suffix: tensor[0] for suffix, tensor in stored.items()}, self.exact)
            if one is not None and one.k == x.shape[-1]:
                return one.linear(x, bias, torch.get_num_threads())
        out = x @ decoder.dequantize(stored, x.dtype).flatten(0, -2).t()
        return out if bias is None else out.add_(bias)

    def native(self, gate_up: Stored, down: Stored) -> NativeExperts | None:
        """The compiled kernel for a layer's banks, parts [experts, sections, ...]; None where it does not take them. It
        adds an expert's terms up as `add_up` does, to the same bits."""
        if not self.plain:
            return None
        return native_experts((self.gate_up, gate_up), (self.down, down), self.activation, self.exact)


def _alone(stored: Stored) -> Stored:
    return {suffix: tensor[None] for suffix, tensor in stored.items()}


def add_up(batch: Batch, terms: Iterable[tuple[Routed, Tensor]]) -> Tensor:
    """The sum of the experts' terms, [tokens, hidden] in the batch's type, added in the order given."""
    out = torch.zeros_like(batch.x)
    for routed, term in terms:
        out.index_add_(0, routed.tokens, term)
    return out
