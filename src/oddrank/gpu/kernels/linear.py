"""y = x W' + bias for a stored W, and the sum of what the parts of a product made."""

import triton
import triton.language as tl

from oddrank.gpu.kernels.words import DENSE, E4M3, MXFP4, multiplied, of_rows, of_sums, tile


@triton.jit
def product(
    x, values, scales, factor, bias, out,
    m, n, k, chunk, x_row, out_part, out_row,
    value_row, scale_row, scale_column,
    form: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, divides: tl.constexpr,
    scaled: tl.constexpr, native: tl.constexpr, wide: tl.constexpr, biased: tl.constexpr,
    tile_m: tl.constexpr, tile_n: tl.constexpr, tile_k: tl.constexpr,
):  # fmt: skip
    """A tile of `out` [parts, m, n]: one part of the columns a program.

    Program (tile of n, part, tile of m); part p sums columns [p chunk, (p + 1) chunk). block_n, block_k: rows and
    columns that a scale covers, 0 = all. scaled: see `tile`. wide: compute in fp32, whatever x is.
    """
    compute: tl.constexpr = tl.float32 if wide else x.dtype.element_ty
    part = tl.program_id(1)
    rows = tl.program_id(0) * tile_n + tl.arange(0, tile_n)
    tokens = tl.program_id(2) * tile_m + tl.arange(0, tile_m)
    rows_real, tokens_real = rows < n, tokens < m
    row_starts = rows.to(tl.int64) * value_row
    scale_starts = (rows // block_n if block_n else rows * 0).to(tl.int64) * scale_row
    token_starts = tokens.to(tl.int64) * x_row
    sums = tl.zeros([tile_n, tile_m], tl.float32)
    start = part * chunk
    for k0 in range(start, tl.minimum(start + chunk, k), tile_k):
        columns = k0 + tl.arange(0, tile_k)
        real = (columns < k)[:, None] & tokens_real[None, :]
        xs = tl.load(x + token_starts[None, :] + columns[:, None], mask=real, other=0).to(compute)
        weights = tile(
            values, scales, row_starts, scale_starts, rows_real, k0, k, form, tile_k, scaled, native, compute
        )
        if (form == E4M3 and block_k) or (form == MXFP4 and not scaled):
            some = multiplied(weights, xs, tl.zeros([tile_n, tile_m], tl.float32), wide)
            by = of_sums(scales, scale_starts, rows_real, k0, block_k, form, scale_column)
            sums += some * by[:, None]
        else:
            sums = multiplied(weights, xs, sums, wide)
    if form != DENSE:
        sums *= of_rows(scales, scale_starts, factor, rows_real, form, block_k, divides)[:, None]
    if biased:
        sums += tl.load(bias + rows, mask=rows_real, other=0).to(tl.float32)[:, None]
    to = out + part.to(tl.int64) * out_part + tokens.to(tl.int64)[None, :] * out_row + rows[:, None]
    tl.store(to, sums.to(out.dtype.element_ty), mask=rows_real[:, None] & tokens_real[None, :])


@triton.jit
def added(parts, bias, out, m, n, out_row, count: tl.constexpr, biased: tl.constexpr, width: tl.constexpr):
    """out [m, n] = parts[0] + parts[1] + ... + bias, in this order, of fp32 parts [count, m, n]. A row a program."""
    row, columns = tl.program_id(1), tl.program_id(0) * width + tl.arange(0, width)
    real = columns < n
    total = tl.zeros([width], tl.float32)
    for part in range(count):
        total += tl.load(parts + (part * m + row).to(tl.int64) * n + columns, mask=real, other=0)
    if biased:
        total += tl.load(bias + columns, mask=real, other=0).to(tl.float32)
    tl.store(out + row.to(tl.int64) * out_row + columns, total.to(out.dtype.element_ty), mask=real)
