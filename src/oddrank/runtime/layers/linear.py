"""Linear layers by placement: what of the matrix this rank has, and what that makes of the result.

Sizes are this rank's own, from the rank slice. How the matrix is stored is the format's business.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from oddrank.runtime.layers.kernels import Rows, WeightFormat
from oddrank.runtime.layers.module import Module, Parameter
from oddrank.runtime.parallel.group import Group
from oddrank.runtime.parallel.partial import Partial


class MergedColumnParallelLinear(Module):
    """Several linear layers of the same input as one product: this rank's rows of each, stacked.

    x [..., K] -> [..., sum of the parts' rows], this rank's outputs only.
    """

    def __init__(self, form: WeightFormat, parts: Sequence[Rows], k: int, *, bias: bool, dtype: torch.dtype) -> None:
        self.weight = form.linear(parts, k)
        self.bias = Parameter([(f"{p.name}.bias", p.rows) for p in parts], (), dtype) if bias else None

    def __call__(self, x: Tensor) -> Tensor:
        return self.weight(x) if self.bias is None else self.weight(x, self.bias.data)


class ColumnParallelLinear(MergedColumnParallelLinear):
    """This rank's `n` rows of one linear layer. x [..., K] -> [..., n]."""

    def __init__(self, form: WeightFormat, name: str, n: int, k: int, *, bias: bool, dtype: torch.dtype) -> None:
        super().__init__(form, [Rows(name, n)], k, bias=bias, dtype=dtype)


class RowParallelLinear(Module):
    """This rank's `k` columns of a linear layer of `n` outputs: its result is a term of the sum over ranks.

    x [..., k] (this rank's inputs) -> Partial [..., n]. The bias joins the sum through its owner.
    """

    def __init__(
        self,
        form: WeightFormat,
        name: str,
        n: int,
        k: int,
        group: Group,
        *,
        bias_owner: bool | None,
        dtype: torch.dtype,
    ) -> None:
        """bias_owner: None where there is no bias, else whether this rank is the one that adds it."""
        self.weight = form.linear([Rows(name, n)], k)
        self.bias = None if bias_owner is None else Parameter([(f"{name}.bias", n)], (), dtype)
        self.bias_owner = bool(bias_owner)
        self.group = group
        self.n, self._empty = n, k == 0

    def __call__(self, x: Tensor) -> Partial:
        if self._empty:
            total = Partial.nothing((*x.shape[:-1], self.n), x.dtype, self.group)
        else:
            total = Partial(self.weight(x), self.group)
        if self.bias is None:
            return total
        return total + Partial.from_replicated(self.bias.data, self.bias_owner, self.group, total.shape)
