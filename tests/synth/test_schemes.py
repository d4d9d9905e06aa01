"""Stored matrices decoded by torch or compressed-tensors come back as what was stored, within the format's step."""

import numpy as np
import pytest
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import preset_name_to_scheme

from oddrank.checkpoint import STORAGE
from oddrank.synth import schemes
from oddrank.synth.schemes import Scheme

TORCH = {"BF16": torch.bfloat16, "F8_E4M3": torch.float8_e4m3fn, "F32": torch.float32, "U8": torch.uint8}


def matrix(n: int, k: int) -> np.ndarray:
    """Blocks of very different magnitude, one of them all zero."""
    rng = np.random.default_rng(n + k)
    gains = 2.0 ** rng.uniform(-3, 3, (-(-n // 32), -(-k // 16)))
    x = rng.standard_normal((n, k)) * np.kron(gains, np.ones((32, 16)))[:n, :k]
    x[:128, :128] = 0
    return x.astype(np.float32)


def store(scheme: Scheme, x: np.ndarray) -> dict[str, torch.Tensor]:
    """The stored tensors by suffix, with the declared dtypes and shapes."""
    bound = float(np.abs(x).max())
    found = {}
    encoded = zip(scheme.parts(*x.shape), scheme.encode(x, bound), scheme.constants(*x.shape, bound), strict=True)
    for part, rows, whole in encoded:
        assert (rows is None) != (whole is None)
        words = whole if rows is None else rows
        assert words.dtype == STORAGE[part.dtype] and words.shape == part.shape
        signed = {2: np.int16, 4: np.int32}.get(words.dtype.itemsize, np.uint8)
        found[part.suffix] = torch.from_numpy(words.view(signed)).view(TORCH[part.dtype])
    return found


def expand(scale: torch.Tensor, block: int, n: int, k: int) -> torch.Tensor:
    return scale.float().repeat_interleave(block, 0).repeat_interleave(block, 1)[:n, :k]


@pytest.mark.parametrize("shape", [(256, 384), (300, 200), (48, 130)])
@pytest.mark.parametrize("scheme", [schemes.FP8_BLOCK, schemes.FP8_BLOCK_CT])
def test_fp8_blocks(scheme: Scheme, shape: tuple[int, int]) -> None:
    x = matrix(*shape)
    stored = store(scheme, x)
    scale = expand(stored[scheme.parts(*shape)[1].suffix], 128, *shape)
    decoded = (stored[".weight"].float() * scale).numpy()
    # half a step of three mantissa bits; below 2^-6 of the scale, half of 2^-9
    assert (np.abs(decoded - x) <= np.maximum(np.abs(x) * 2**-4, scale.numpy() * 2**-10) * 1.01).all()
    for i in range(-(-shape[0] // 128)):
        # the block's largest number is encoded as the largest word, give or take the scale's own rounding
        peak = stored[".weight"][128 * i : 128 * i + 128].float().abs().max()
        assert peak >= 416 or not x[128 * i : 128 * i + 128].any()


@pytest.mark.parametrize("scheme", [schemes.FP8_CHANNEL, schemes.FP8_CHANNEL_1D])
def test_fp8_channels(scheme: Scheme) -> None:
    x = matrix(300, 200)
    stored = store(scheme, x)
    assert list(stored[".weight_scale"].shape) == ([300, 1] if scheme is schemes.FP8_CHANNEL else [300])
    scale = stored[".weight_scale"].float().reshape(300, 1).numpy()
    decoded = stored[".weight"].float().numpy() * scale
    assert (np.abs(decoded - x) <= np.maximum(np.abs(x) * 2**-4, scale * 2**-10) * 1.01).all()


def test_fp8_per_tensor() -> None:
    x = matrix(300, 200)
    stored = store(schemes.FP8_TENSOR, x)
    scale = stored[".weight_scale"].item()
    assert scale == pytest.approx(np.abs(x).max() / 448, rel=1e-6) and stored[".input_scale"].item() > 0
    decoded = stored[".weight"].float().numpy() * scale
    assert (np.abs(decoded - x) <= np.maximum(np.abs(x) * 2**-4, scale * 2**-10) * 1.01).all()


def test_nvfp4_as_compressed_tensors_reads_and_writes_it() -> None:
    x = matrix(300, 256)
    stored = store(schemes.NVFP4_CT, x)
    scheme = preset_name_to_scheme("NVFP4", ["Linear"])
    names = ("weight_packed", "weight_scale", "weight_global_scale")
    state = {name: stored[f".{name}"] for name in names}
    decoded = NVFP4PackedCompressor.decompress({**state, "weight_scale": state["weight_scale"]}, scheme)["weight"]
    step = state["weight_scale"].float().repeat_interleave(16, 1) / state["weight_global_scale"]
    # within half of the widest gap (4 to 6), and a little for scales that rounded down
    assert (np.abs(decoded.float().numpy() - x) <= step.numpy() * 1.35).all()
    again = NVFP4PackedCompressor.compress(
        {
            "weight": torch.from_numpy(x),
            "weight_scale": state["weight_scale"].float(),
            "weight_global_scale": state["weight_global_scale"],
        },
        scheme,
    )["weight_packed"]
    # ties may fall either way where the divisions are ordered differently
    assert (again != state["weight_packed"]).float().mean() < 1e-4


def test_both_nvfp4_dialects_say_the_same() -> None:
    x = matrix(128, 160)
    one, other = store(schemes.NVFP4, x), store(schemes.NVFP4_CT, x)
    assert torch.equal(one[".weight"], other[".weight_packed"])
    assert torch.equal(one[".weight_scale"].view(torch.uint8), other[".weight_scale"].view(torch.uint8))
    assert one[".weight_scale_2"].item() * other[".weight_global_scale"].item() == pytest.approx(1, rel=1e-6)
    assert one[".weight_scale_2"].item() == pytest.approx(np.abs(x).max() / 2688, rel=1e-6)
    assert one[".input_scale"].item() * other[".input_global_scale"].item() == pytest.approx(1, rel=1e-6)


def test_mxfp4_as_compressed_tensors_reads_it() -> None:
    x = matrix(300, 256)
    stored = store(schemes.MXFP4, x)
    scheme = preset_name_to_scheme("MXFP4", ["Linear"])
    state = {"weight_packed": stored[".weight"], "weight_scale": stored[".weight_scale"]}
    decoded = MXFP4PackedCompressor.decompress(state, scheme)["weight"].float().numpy()
    step = np.repeat(2.0 ** (stored[".weight_scale"].numpy().astype(float) - 127), 32, axis=1)
    assert (np.abs(decoded - x) <= step * 1.01).all()


def test_a_zero_block_stays_zero_and_has_a_finite_scale() -> None:
    x = np.zeros((128, 128), dtype=np.float32)
    for scheme in (schemes.FP8_BLOCK, schemes.FP8_CHANNEL_1D, schemes.MXFP4):
        encoded = scheme.encode(x, 1.0)
        assert not encoded[0].any() and encoded[1].all()
    words, scale, *_ = schemes.NVFP4.encode(x, 1.0)
    assert not words.any() and scale.all()
