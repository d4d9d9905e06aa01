"""y = x W' + bias for a stored W, and the sum of what the parts of a product made."""

import triton
import triton.language as tl

from oddrank.gpu.kernels.words import begins, scaled, with_columns


@triton.jit
def product(
    x, values, scales, factor, bias, out,
    m, n, k, chunk, x_row, out_part, out_row,
    value_row, scale_row, scale_column,
    form: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, divides: tl.constexpr,
    by_block: tl.constexpr, native: tl.constexpr, wide: tl.constexpr, biased: tl.constexpr,
    tile_m: tl.constexpr, tile_n: tl.constexpr, tile_k: tl.constexpr,
):  # fmt: skip
    """A tile of `out` [parts, m, n]: one part of the columns a program.

    Program (tile of n, part, tile of m); part p sums columns [p chunk, (p + 1) chunk). block_n, block_k: rows and
    columns that a scale covers, 0 = all. by_block: see `tile`. wide: compute in fp32, whatever x is.
    """
    compute: tl.constexpr = tl.float32 if wide else x.dtype.element_ty
    part = tl.program_id(1)
    rows = tl.program_id(0) * tile_n + tl.arange(0, tile_n)
    tokens = tl.program_id(2) * tile_m + tl.arange(0, tile_m)
    rows_real, tokens_real = rows < n, tokens < m
    row_starts, scale_starts = begins(rows, value_row, block_n, scale_row)
    token_starts = tokens.to(tl.int64) * x_row
    sums = tl.zeros([tile_n, tile_m], tl.float32)
    start = part * chunk
    for k0 in range(start, tl.minimum(start + chunk, k), tile_k):
        columns = k0 + tl.arange(0, tile_k)
        real = (columns < k)[:, None] & tokens_real[None, :]
        xs = tl.load(x + token_starts[None, :] + columns[:, None], mask=real, other=0).to(compute)
        sums = with_columns(
            sums, xs, values, scales, row_starts, scale_starts, scale_column, rows_real, k0, k, form, block_k, by_block,
            native, wide,
        )  # fmt: skip
    sums = scaled(sums, scales, scale_starts, factor, rows_real, form, block_k, divides)
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
