"""Products with stored matrices by the Triton kernels."""

import math

import torch
from torch import Tensor

from oddrank.gpu.kernels.linear import added, product
from oddrank.gpu.launch import DECODE_TOKENS, INTERPRETED, Tiles, by_block, device_of, fastest, parts, tiles_for
from oddrank.gpu.matrix import GpuMatrix

_ADDED_COLUMNS = 1024


class GpuLinear:
    """x [..., k] times the transposed matrix [n, k], plus bias [n], gives [..., n] in x's type: fp32, bf16 or fp16.

    Weights are decoded to x's type without rounding, sums are in fp32. Up to 16 rows of x, what a row gets does not
    depend on how many there are.
    """

    def __init__(self, matrix: GpuMatrix) -> None:
        self.matrix = matrix

    def __call__(self, x: Tensor, bias: Tensor | None = None, processors: int | None = None) -> Tensor:
        """processors: that the work is cut for, by default the GPU's."""
        k, n = self.matrix.k, self.matrix.n
        rows = x.reshape(math.prod(x.shape[:-1]), k)
        if self.matrix.order is not None:
            rows = rows.index_select(1, self.matrix.order)
        elif rows.stride(-1) != 1:
            rows = rows.contiguous()
        m = len(rows)
        out = torch.empty(m, n, dtype=x.dtype, device=x.device)
        if m:
            candidates = tiles_for(self.matrix, m, x.dtype)
            count = processors or device_of(x.device).processors
            key = (x.device, self.matrix.form, n, k, self.matrix.block_k, x.dtype, 1 << (m - 1).bit_length())
            tiles = fastest(key, candidates, lambda t: self._launch(rows, bias, out, t, count))
            self._launch(rows, bias, out, tiles, count)
        return out.reshape(*x.shape[:-1], n)

    def _launch(self, x: Tensor, bias: Tensor | None, out: Tensor, tiles: Tiles, processors: int) -> None:
        matrix, m = self.matrix, len(x)
        n, k = matrix.n, matrix.k
        count, chunk = parts(n, k, tiles, processors) if m <= DECODE_TOKENS else (1, k)
        to = out if count == 1 else torch.empty(count, m, n, dtype=torch.float32, device=x.device)
        here = count == 1 and bias is not None
        product[(-(-n // tiles.n), count, -(-m // tiles.m))](
            x, matrix.values, matrix.scales, matrix.factor, bias if here else x, to,
            m, n, k, chunk, x.stride(0), m * n, n,
            matrix.value_row, matrix.scale_row, matrix.scale_column,
            form=matrix.form, block_n=matrix.block_n, block_k=matrix.block_k, divides=matrix.divides,
            by_block=by_block(matrix, x.dtype), native=device_of(x.device).native,
            wide=INTERPRETED or x.dtype == torch.float32, biased=here,
            tile_m=tiles.m, tile_n=tiles.n, tile_k=tiles.k, num_warps=tiles.warps, num_stages=tiles.stages,
        )  # fmt: skip
        if count > 1:
            width = min(_ADDED_COLUMNS, 1 << (n - 1).bit_length())
            added[(-(-n // width), m)](
                to, x if bias is None else bias, out, m, n, n, count=count, biased=bias is not None, width=width
            )
