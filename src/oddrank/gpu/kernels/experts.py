"""Routed experts: tokens in blocks of one expert each, gathered as they are read. Nothing is read by the host."""

import triton
import triton.language as tl

from oddrank.gpu.kernels.words import DENSE, E4M3, MXFP4, multiplied, of_rows, of_sums, tile


@triton.jit
def inner(
    x, ids, order, starts, stops, values, scales, factor, out,
    width, k, chosen, x_row,
    value_expert, value_section, value_row, scale_expert, scale_section, scale_row, scale_column,
    factor_expert, factor_section, up_row,
    form: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, divides: tl.constexpr,
    scaled: tl.constexpr, native: tl.constexpr, wide: tl.constexpr,
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
    upper = rows + up_row
    values += expert * value_expert
    scales += expert * scale_expert
    factor += expert * factor_expert
    gate_starts = rows.to(tl.int64) * value_row
    up_starts = upper.to(tl.int64) * value_row + value_section
    gate_scales = (rows // block_n if block_n else rows * 0).to(tl.int64) * scale_row
    up_scales = (upper // block_n if block_n else rows * 0).to(tl.int64) * scale_row + scale_section
    gate = tl.zeros([tile_n, tile_m], tl.float32)
    up = tl.zeros([tile_n, tile_m], tl.float32)
    for k0 in range(0, k, tile_k):
        columns = k0 + tl.arange(0, tile_k)
        real = (columns < k)[:, None] & places_real[None, :]
        xs = tl.load(x + tokens[None, :] * x_row + columns[:, None], mask=real, other=0).to(compute)
        of_gate = tile(
            values, scales, gate_starts, gate_scales, rows_real, k0, k, form, tile_k, scaled, native, compute
        )
        of_up = tile(values, scales, up_starts, up_scales, rows_real, k0, k, form, tile_k, scaled, native, compute)
        if (form == E4M3 and block_k) or (form == MXFP4 and not scaled):
            nothing = tl.zeros([tile_n, tile_m], tl.float32)
            by = of_sums(scales, gate_scales, rows_real, k0, block_k, form, scale_column)
            gate += multiplied(of_gate, xs, nothing, wide) * by[:, None]
            by = of_sums(scales, up_scales, rows_real, k0, block_k, form, scale_column)
            up += multiplied(of_up, xs, nothing, wide) * by[:, None]
        else:
            gate = multiplied(of_gate, xs, gate, wide)
            up = multiplied(of_up, xs, up, wide)
    if form != DENSE:
        gate *= of_rows(scales, gate_scales, factor, rows_real, form, block_k, divides)[:, None]
        up *= of_rows(scales, up_scales, factor + factor_section, rows_real, form, block_k, divides)[:, None]
    both = gate / (1 + tl.exp(-gate)) * up
    to = out + places.to(tl.int64)[None, :] * width + rows[:, None]
    tl.store(to, both.to(out.dtype.element_ty), mask=rows_real[:, None] & places_real[None, :])


@triton.jit
def outer(
    x, ids, order, starts, stops, weights, values, scales, factor, out,
    n, k,
    value_expert, value_row, scale_expert, scale_row, scale_column, factor_expert,
    form: tl.constexpr, block_n: tl.constexpr, block_k: tl.constexpr, divides: tl.constexpr,
    scaled: tl.constexpr, native: tl.constexpr, wide: tl.constexpr,
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
    row_starts = rows.to(tl.int64) * value_row
    scale_starts = (rows // block_n if block_n else rows * 0).to(tl.int64) * scale_row
    sums = tl.zeros([tile_n, tile_m], tl.float32)
    for k0 in range(0, k, tile_k):
        columns = k0 + tl.arange(0, tile_k)
        real = (columns < k)[:, None] & places_real[None, :]
        xs = tl.load(x + places.to(tl.int64)[None, :] * k + columns[:, None], mask=real, other=0).to(compute)
        of_down = tile(
            values, scales, row_starts, scale_starts, rows_real, k0, k, form, tile_k, scaled, native, compute
        )
        if (form == E4M3 and block_k) or (form == MXFP4 and not scaled):
            some = multiplied(of_down, xs, tl.zeros([tile_n, tile_m], tl.float32), wide)
            by = of_sums(scales, scale_starts, rows_real, k0, block_k, form, scale_column)
            sums += some * by[:, None]
        else:
            sums = multiplied(of_down, xs, sums, wide)
    if form != DENSE:
        sums *= of_rows(scales, scale_starts, factor, rows_real, form, block_k, divides)[:, None]
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
