"""Stored words as numbers, in registers: a tile of a weight matrix, and what its sums are multiplied by.

A tile holds numbers that bf16 and fp16 represent exactly, so nothing is rounded before the products are summed in fp32:

- e4m3 values are exact in both. Their scales, floats, multiply the sums: after every block of columns, or at the end
  where a scale covers a whole row.
- NVFP4: e2m1 times its e4m3 scale has at most six significant bits. The tile holds 2^-8 of it, which fp16 can hold,
  and the end gives 2^8 back together with the scale of the whole tensor.
- MXFP4: e2m1 times a power of two is exact in bf16 and fp32 over the whole range of e8m0. fp16's range is too short, so
  there the powers multiply the sums after every block of 32 columns.

Codes are turned into numbers by moving their bits to where fp32 has them and multiplying by the power of two by which
the biases of the exponents differ. This needs subnormal fp32 numbers, which the GPUs compute with at full speed.
"""

import triton
import triton.language as tl

DENSE = tl.constexpr(0)
E4M3 = tl.constexpr(1)
NVFP4 = tl.constexpr(2)
MXFP4 = tl.constexpr(3)


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
def e2m1_pairs(packed):
    """uint8 [n, k / 2], two codes a byte, as fp32 [n, k]: 2^-126 of the numbers."""
    wide = packed.to(tl.uint32)
    low = ((wide & 0x08) << 28) | ((wide & 0x07) << 22)
    high = ((wide & 0x80) << 24) | ((wide & 0x70) << 18)
    both = tl.join(low.to(tl.float32, bitcast=True), high.to(tl.float32, bitcast=True))
    return tl.reshape(both, [packed.shape[0], 2 * packed.shape[1]])


@triton.jit
def spread(numbers, scales, group: tl.constexpr):
    """numbers [n, k] times scales [n, k / group], each for `group` columns."""
    rows: tl.constexpr = numbers.shape[0]
    groups: tl.constexpr = scales.shape[1]
    scaled = tl.reshape(numbers, [rows, groups, group]) * tl.expand_dims(scales, 2)
    return tl.reshape(scaled, [rows, groups * group])


@triton.jit
def tile(
    values, scales, row_starts, scale_starts, rows_real, k0, k, form: tl.constexpr, width: tl.constexpr,
    scaled: tl.constexpr, native: tl.constexpr, compute: tl.constexpr,
):  # fmt: skip
    """Columns [k0, k0 + width) of some rows, [rows, width] in `compute`; zeros where there is none.

    values, scales: pointers to a matrix's words. row_starts, scale_starts: int64 [rows], where each row begins.
    scaled: whether MXFP4's powers are in the tile.
    """
    if form == DENSE or form == E4M3:  # noqa: SIM109 (Triton has no `in`)
        columns = k0 + tl.arange(0, width)
        real = rows_real[:, None] & (columns < k)[None, :]
        words = tl.load(values + row_starts[:, None] + columns[None, :], mask=real, other=0)
        return words.to(compute) if form == DENSE else e4m3(words, native).to(compute)
    else:
        columns = k0 // 2 + tl.arange(0, width // 2)
        real = rows_real[:, None] & (2 * columns < k)[None, :]
        numbers = e2m1_pairs(tl.load(values + row_starts[:, None] + columns[None, :], mask=real, other=0))
        group: tl.constexpr = 16 if form == NVFP4 else 32
        if form == MXFP4:
            numbers = numbers * 8.507059173023462e37  # 2^126
        if form == NVFP4 or scaled:
            blocks = k0 // group + tl.arange(0, width // group)
            real = rows_real[:, None] & (group * blocks < k)[None, :]
            words = tl.load(scales + scale_starts[:, None] + blocks[None, :], mask=real, other=0)
            # 2^118, of which the numbers' 2^-126 leaves 2^-8
            factors = e4m3(words, False) * 3.323069989462290e35 if form == NVFP4 else e8m0(words)
            numbers = spread(numbers, factors, group)
        return numbers.to(compute)


@triton.jit
def of_sums(scales, scale_starts, rows_real, k0, columns: tl.constexpr, form: tl.constexpr, scale_column):
    """What the sums over a block of columns that begins at k0 are multiplied by, fp32 [rows]. columns: of a block."""
    words = tl.load(scales + scale_starts + (k0 // columns) * scale_column, mask=rows_real, other=0)
    return e8m0(words) if form == MXFP4 else words.to(tl.float32)


@triton.jit
def of_rows(scales, scale_starts, factor, rows_real, form: tl.constexpr, columns: tl.constexpr, divides: tl.constexpr):
    """What the whole sums are multiplied by, fp32 [rows]. columns: that a scale of fp8 covers; 0: all of a row's."""
    rows = rows_real.to(tl.float32)
    if form == E4M3 and columns == 0:
        return tl.load(scales + scale_starts, mask=rows_real, other=0).to(tl.float32)
    if form == NVFP4:
        whole = tl.load(factor).to(tl.float32)
        return rows * (256.0 / whole if divides else 256.0 * whole)
    return rows


@triton.jit
def multiplied(weights, x, sums, wide: tl.constexpr):
    """sums + weights @ x. wide: fp32 products, not rounded to TF32."""
    if wide:
        return tl.dot(weights, x, sums, input_precision="ieee")
    return tl.dot(weights, x, sums)
