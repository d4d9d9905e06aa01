"""Routed experts: tokens in blocks of one expert each, gathered as they are read. Nothing is read by the host."""

import triton
import triton.language as tl

from oddrank.gpu.kernels.words import begins, scaled, with_columns


@triton.jit
def inner(
    x, ids, order, starts, stops, values, scales, factor, out,
    width, k, chosen, x_row,
    value_expert, value_section, value_row, scale_expert, scale_section, scale_row, scale_column,
    factor_expert, factor_section, up_row,
    form: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, divides: tl.constexpr,
    by_block: tl.constexpr, native: tl.constexpr, wide: tl.constexpr,
    tile_m: tl.constexpr, tile_n: tl.constexpr, tile_k: tl.constexpr,
):  # fmt: skip
    """out [choices in order, width] = silu(gate x) * (up x).

    Program (tile of width, block of choices). ids, starts, stops: each block's expert, and its places in `order`; none
    where they are equal. order: choice = token * chosen + which of its. up_row: where up's rows begin in its section,
    which is the second where value_section is not 0.
    """
    compute: tl.constexpr = tl.float32 if wide else x.dtype.element_ty
    block = tl.program_id(1)
    start, stop = tl.load(starts + block), tl.load(stops + block)
    if start >= stop:
        return
    expert = tl.load(ids + block).to(tl.int64)
    places = start + tl.arange(0, tile_m)
    places_real = places < stop
    tokens = tl.load(order + places, mask=places_real, other=0).to(tl.int64) // chosen
    rows = tl.program_id(0) * tile_n + tl.arange(0, tile_n)
    rows_real = rows < width
    values += expert * value_expert
    scales += expert * scale_expert
    factor += expert * factor_expert
    gate_starts, gate_scales = begins(rows, value_row, block_n, scale_row)
    up_starts, up_scales = begins(rows + up_row, value_row, block_n, scale_row)
    up_starts += value_section
    up_scales += scale_section
    gate = tl.zeros([tile_n, tile_m], tl.float32)
    up = tl.zeros([tile_n, tile_m], tl.float32)
    for k0 in range(0, k, tile_k):
        columns = k0 + tl.arange(0, tile_k)
        real = (columns < k)[:, None] & places_real[None, :]
        xs = tl.load(x + tokens[None, :] * x_row + columns[:, None], mask=real, other=0).to(compute)
        gate = with_columns(
            gate, xs, values, scales, gate_starts, gate_scales, scale_column, rows_real, k0, k, form, block_k, by_block,
            native, wide,
        )  # fmt: skip
        up = with_columns(
            up, xs, values, scales, up_starts, up_scales, scale_column, rows_real, k0, k, form, block_k, by_block,
            native, wide,
        )  # fmt: skip
    gate = scaled(gate, scales, gate_scales, factor, rows_real, form, block_k, divides)
    up = scaled(up, scales, up_scales, factor + factor_section, rows_real, form, block_k, divides)
    both = gate / (1 + tl.exp(-gate)) * up
    to = out + places.to(tl.int64)[None, :] * width + rows[:, None]
    tl.store(to, both.to(out.dtype.element_ty), mask=rows_real[:, None] & places_real[None, :])


@triton.jit
def outer(
    x, ids, order, starts, stops, weights, values, scales, factor, out,
    n, k,
    value_expert, value_row, scale_expert, scale_row, scale_column, factor_expert,
    form: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, divides: tl.constexpr,
    by_block: tl.constexpr, native: tl.constexpr, wide: tl.constexpr,
    tile_m: tl.constexpr, tile_n: tl.constexpr, tile_k: tl.constexpr,
):  # fmt: skip
    """out [choices, n] in fp32 = down x times the choice's weight, of x [choices in order, k]. See `inner`."""
    compute: tl.constexpr = tl.float32 if wide else x.dtype.element_ty
    block = tl.program_id(1)
    start, stop = tl.load(starts + block), tl.load(stops + block)
    if start >= stop:
        return
    expert = tl.load(ids + block).to(tl.int64)
    places = start + tl.arange(0, tile_m)
    places_real = places < stop
    choices = tl.load(order + places, mask=places_real, other=0).to(tl.int64)
    rows = tl.program_id(0) * tile_n + tl.arange(0, tile_n)
    rows_real = rows < n
    values += expert * value_expert
    scales += expert * scale_expert
    factor += expert * factor_expert
    row_starts, scale_starts = begins(rows, value_row, block_n, scale_row)
    sums = tl.zeros([tile_n, tile_m], tl.float32)
    for k0 in range(0, k, tile_k):
        columns = k0 + tl.arange(0, tile_k)
        real = (columns < k)[:, None] & places_real[None, :]
        xs = tl.load(x + places.to(tl.int64)[None, :] * k + columns[:, None], mask=real, other=0).to(compute)
        sums = with_columns(
            sums, xs, values, scales, row_starts, scale_starts, scale_column, rows_real, k0, k, form, block_k, by_block,
            native, wide,
        )  # fmt: skip
    sums = scaled(sums, scales, scale_starts, factor, rows_real, form, block_k, divides)
    sums *= tl.load(weights + choices, mask=places_real, other=0).to(tl.float32)[None, :]
    to = out + choices[None, :] * n + rows[:, None]
    tl.store(to, sums, mask=rows_real[:, None] & places_real[None, :])


@triton.jit
def summed(terms, out, n, chosen, width: tl.constexpr):
    """out [tokens, n] = the sum of each token's terms [tokens, chosen, n] in fp32, in order. A row a program."""
    token, columns = tl.program_id(1).to(tl.int64), tl.program_id(0) * width + tl.arange(0, width)
    real = columns < n
    total = tl.zeros([width], tl.float32)
    for choice in range(chosen):
        total += tl.load(terms + (token * chosen + choice) * n + columns, mask=real, other=0)
    tl.store(out + token * n + columns, total.to(out.dtype.element_ty), mask=real)
