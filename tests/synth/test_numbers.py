"""The encoders against torch's own dtypes and compressed-tensors."""

import numpy as np
import torch
from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
from compressed_tensors.quantization.utils.fp4_utils import cast_to_fp4
from compressed_tensors.quantization.utils.mxfp_utils import generate_mx_scales

from oddrank.synth import numbers


def spread(count: int, seed: int) -> np.ndarray:
    """float32 numbers of every magnitude that matters here, both signs, with exact ties among them."""
    rng = np.random.default_rng(seed)
    x = (rng.standard_normal(count) * 2.0 ** rng.uniform(-14, 9, count)).astype(np.float32)
    ties = numbers.from_bf16(numbers.to_bf16(x[: count // 2]))
    return np.concatenate([x, ties, [0.0, -0.0]]).astype(np.float32)


def test_bf16_rounds_as_torch_does() -> None:
    x = spread(100_000, 1)
    expected = torch.from_numpy(x).to(torch.bfloat16)
    assert np.array_equal(numbers.to_bf16(x), expected.view(torch.uint16).numpy())
    assert np.array_equal(numbers.from_bf16(numbers.to_bf16(x)), expected.float().numpy())


def test_every_e4m3_word_means_what_torch_says() -> None:
    words = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(words).view(torch.float8_e4m3fn).float().numpy()
    assert np.array_equal(numbers.from_e4m3(words), expected, equal_nan=True)


def test_e4m3_rounds_as_torch_does() -> None:
    # all numbers of e4m3, the midpoints between them (ties), and neighbours of both
    exact = numbers.E4M3_VALUES[:127].astype(np.float64)
    points = np.concatenate([exact, (exact[1:] + exact[:-1]) / 2]).astype(np.float32)
    x = np.concatenate([points, np.nextafter(points, np.float32(1e9)), np.nextafter(points, np.float32(-1e9))])
    x = np.concatenate([x, -x, spread(100_000, 2)])
    x = x[np.abs(x) <= 448]
    expected = torch.from_numpy(x).to(torch.float8_e4m3fn).view(torch.uint8).numpy()
    assert np.array_equal(numbers.to_e4m3(x), expected)


def test_e4m3_saturates_and_never_makes_a_nan() -> None:
    x = np.array([449, 1e6, np.inf, -464, -1e30], dtype=np.float32)
    assert numbers.to_e4m3(x).tolist() == [0x7E, 0x7E, 0x7E, 0xFE, 0xFE]


def test_e2m1_rounds_as_compressed_tensors_does() -> None:
    points = np.arange(-8, 8, 0.125, dtype=np.float32)
    x = np.concatenate([points, np.nextafter(points, np.float32(9)), np.nextafter(points, np.float32(-9))])
    x = np.concatenate([x, spread(10_000, 3)])
    expected = cast_to_fp4(torch.from_numpy(x.copy())).numpy()
    assert np.array_equal(numbers.E2M1_VALUES[numbers.to_e2m1(x)], expected)


def test_e2m1_packs_the_even_column_low() -> None:
    codes = np.random.default_rng(4).integers(0, 16, (5, 64), dtype=np.uint8)
    values = torch.from_numpy(numbers.E2M1_VALUES[codes])
    packed = numbers.pack_e2m1(codes)
    assert np.array_equal(packed, pack_fp4_to_uint8(values).numpy())
    unpacked = unpack_fp4_from_uint8(torch.from_numpy(packed), 5, 64, dtype=torch.float32)
    assert np.array_equal(numbers.from_packed_e2m1(packed), unpacked.numpy())
    assert packed[0, 0] == codes[0, 0] + 16 * codes[0, 1]


def test_e8m0_of_a_group_as_compressed_tensors_makes_it() -> None:
    amax = np.abs(spread(20_000, 5)[:-2])
    amax = np.concatenate([amax, np.float32([1, 1.75, 1.7499999, 3.5, 4, 6, 7])])
    expected = generate_mx_scales(torch.from_numpy(amax)).numpy()
    assert np.array_equal(numbers.e8m0_for_e2m1(amax), expected)
    # by hand: 6 = 1.5 * 2^2 keeps 2^0; 7 = 1.75 * 2^2 rounds up to 2^3, so 2^1
    assert numbers.e8m0_for_e2m1(np.float32([6, 7, 0])).tolist() == [127, 128, 1]


def test_every_e8m0_word_means_what_torch_says() -> None:
    words = np.arange(256, dtype=np.uint8)
    expected = torch.from_numpy(words).view(torch.float8_e8m0fnu).float().numpy()
    assert np.array_equal(numbers.from_e8m0(words), expected, equal_nan=True)
