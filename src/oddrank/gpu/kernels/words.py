"""Stored words as numbers, in registers: a tile of a weight matrix, and what its sums are multiplied by.

A tile holds numbers that bf16 and fp16 represent exactly, so nothing is rounded before the products are summed in fp32:

- e4m3 values are exact in both. Their scales, floats or (MXFP8) powers of two, multiply the sums: after every block of
  columns, or at the end where a scale covers a whole row.
- NVFP4: e2m1 times its e4m3 scale has at most six significant bits. The tile holds 2^-8 of it, which fp16 can hold,
  and the end gives 2^8 back together with the scale of the whole tensor.
- MXFP4: e2m1 times a power of two is exact in bf16 and fp32 over the whole range of e8m0. fp16's range is too short, so
  there the powers multiply the sums after every block of 32 columns.
- Integers: a code less its zero point is an integer of five bits, or of nine. Scales, floats, multiply the sums: after
  every group, or at the end.

Codes are turned into numbers by moving their bits to where fp32 has them and multiplying by the power of two by which
the biases of the exponents differ. This needs subnormal fp32 numbers, which the GPUs compute with at full speed.
"""

import triton
import triton.language as tl

DENSE = tl.constexpr(0)
E4M3 = tl.constexpr(1)
NVFP4 = tl.constexpr(2)
MXFP4 = tl.constexpr(3)
INT4 = tl.constexpr(4)
INT8 = tl.constexpr(5)
INT8_ZEROS = tl.constexpr(6)


@triton.jit
def e4m3(codes, native: tl.constexpr):
    """uint8 codes as fp32. native: by the instruction that GPUs from compute capability 8.9 on have."""
    if native:
        return codes.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    wide = codes.to(tl.uint32)
    bits = ((wide & 0x80) << 24) | ((wide & 0x7F) << 20)
    numbers = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), numbers)


@triton.jit
def e8m0(codes):
    """uint8 codes as fp32: 2^(code - 127); 255 is NaN."""
    wide = codes.to(tl.uint32)
    bits = tl.where(wide == 0, 0x00400000, wide << 23)
    bits = tl.where(wide == 255, 0x7FC00000, bits)
    return bits.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def alternating(low, high):
    """[n, k / 2] each, as [n, k]: the first of either, the second of either, ..."""
    return tl.reshape(tl.join(low, high), [low.shape[0], 2 * low.shape[1]])


@triton.jit
def e2m1_pairs(packed):
    """uint8 [n, k / 2], two codes a byte, as fp32 [n, k]: 2^-126 of the numbers."""
    wide = packed.to(tl.uint32)
    low = ((wide & 0x08) << 28) | ((wide & 0x07) << 22)
    high = ((wide & 0x80) << 24) | ((wide & 0x70) << 18)
    return alternating(low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True))


@triton.jit
def spread(numbers, scales, group: tl.constexpr):
    """numbers [n, k] times scales [n, k / group], each for `group` columns."""
    rows: tl.constexpr = numbers.shape[0]
    groups: tl.constexpr = scales.shape[1]
    scaled = tl.reshape(numbers, [rows, groups, group]) * tl.expand_dims(scales, 2)
    return tl.reshape(scaled, [rows, groups * group])


@triton.jit
def begins(rows, value_row, block_n: tl.constexpr, scale_row):
    """Where rows begin among the values and among the scales, int64 [rows] each. block_n: rows of a scale, 0 = all."""
    scale_rows = rows // block_n if block_n else rows * 0
    return rows.to(tl.int64) * value_row, scale_rows.to(tl.int64) * scale_row


@triton.jit
def tile(
    values, scales, row_starts, scale_starts, scale_column, rows_real, k0, k, form: tl.constexpr, block_k: tl.constexpr,
    by_block: tl.constexpr, width: tl.constexpr, native: tl.constexpr, compute: tl.constexpr,
):  # fmt: skip
    """Columns [k0, k0 + width) of some rows, [rows, width] in `compute`; something finite where there is none.

    values, scales: pointers to a matrix's words. row_starts, scale_starts: see `begins`. by_block: whether scales are
    left to `of_sums`.
    """
    if form == DENSE or form == E4M3 or form == INT8 or form == INT8_ZEROS:  # noqa: SIM109 (Triton has no `in`)
        columns = k0 + tl.arange(0, width)
        real = rows_real[:, None] & (columns < k)[None, :]
        words = tl.load(values + row_starts[:, None] + columns[None, :], mask=real, other=0)
        if form == E4M3:
            return e4m3(words, native).to(compute)
        if form == INT8_ZEROS:
            at = scale_starts + (k0 // block_k) * scale_column + 1
            zeros = tl.load(scales + at, mask=rows_real, other=0).to(tl.int32, bitcast=True) << 16 >> 16
            return (words.to(tl.int32) - zeros[:, None]).to(compute)
        return words.to(compute)
    else:
        columns = k0 // 2 + tl.arange(0, width // 2)
        real = rows_real[:, None] & (2 * columns < k)[None, :]
        packed = tl.load(values + row_starts[:, None] + columns[None, :], mask=real, other=0)
        if form == INT4:
            at = scale_starts + (k0 // block_k) * scale_column
            zeros = tl.load(scales + at, mask=rows_real, other=0).to(tl.int32, bitcast=True) & 255
            codes = alternating(packed & 15, packed >> 4)
            return (codes.to(tl.int32) - zeros[:, None]).to(compute)
        numbers = e2m1_pairs(packed)
        group: tl.constexpr = 16 if form == NVFP4 else 32
        if form == MXFP4:
            numbers = numbers * 8.507059173023462e37  # 2^126
        if not by_block:
            blocks = k0 // group + tl.arange(0, width // group)
            real = rows_real[:, None] & (group * blocks < k)[None, :]
            words = tl.load(scales + scale_starts[:, None] + blocks[None, :], mask=real, other=0)
            # 2^118, of which the numbers' 2^-126 leaves 2^-8
            factors = e4m3(words, False) * 3.323069989462290e35 if form == NVFP4 else e8m0(words)
            numbers = spread(numbers, factors, group)
        return numbers.to(compute)


@triton.jit
def of_sums(scales, scale_starts, scale_column, rows_real, k0, form: tl.constexpr, block_k: tl.constexpr):
    """What the sums over a block of block_k columns that begins at k0 are multiplied by, fp32 [rows]."""
    words = tl.load(scales + scale_starts + (k0 // block_k) * scale_column, mask=rows_real, other=0)
    if form == INT4:
        return (words.to(tl.int32, bitcast=True) & -256).to(tl.float32, bitcast=True)
    return e8m0(words) if words.dtype == tl.uint8 else words.to(tl.float32)


@triton.jit
def multiplied(weights, x, sums, wide: tl.constexpr):
    """sums + weights @ x. wide: fp32 products, not rounded to TF32."""
    if wide:
        return tl.dot(weights, x, sums, input_precision="ieee")
    return tl.dot(weights, x, sums)


@triton.jit
def with_columns(
    sums, x, values, scales, row_starts, scale_starts, scale_column, rows_real, k0, k, form: tl.constexpr,
    block_k: tl.constexpr, by_block: tl.constexpr, native: tl.constexpr, wide: tl.constexpr,
):  # fmt: skip
    """sums [rows, m] + the product of as many columns of some rows, from k0 on, as x [columns, m] has. Zeros in x where
    there is none. See `tile`."""
    weights = tile(
        values, scales, row_starts, scale_starts, scale_column, rows_real, k0, k, form, block_k, by_block, x.shape[0],
        native, x.dtype,
    )  # fmt: skip
    if by_block:
        some = multiplied(weights, x, tl.zeros_like(sums), wide)
        return sums + some * of_sums(scales, scale_starts, scale_column, rows_real, k0, form, block_k)[:, None]
    return multiplied(weights, x, sums, wide)


@triton.jit
def scaled(
    sums, scales, scale_starts, factor, rows_real, form: tl.constexpr, block_k: tl.constexpr, divides: tl.constexpr
):
    """The sums of all columns, [rows, m], times what scales whole rows or the matrix."""
    if (form == E4M3 or form == INT8) and block_k == 0:  # noqa: SIM109
        return sums * tl.load(scales + scale_starts, mask=rows_real, other=0).to(tl.float32)[:, None]
    if form == NVFP4:
        whole = tl.load(factor).to(tl.float32)
        return sums * (256.0 / whole if divides else 256.0 * whole)
    return sums
