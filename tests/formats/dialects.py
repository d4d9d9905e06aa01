"""Every published way to store a quantized matrix: made by compressed-tensors where it writes that way, or by hand."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from compressed_tensors.compressors.mxfp4.base import MXFP4PackedCompressor
from compressed_tensors.compressors.mxfp8.base import MXFP8QuantizationCompressor
from compressed_tensors.compressors.naive_quantized.base import FloatQuantizationCompressor, IntQuantizationCompressor
from compressed_tensors.compressors.nvfp4.base import NVFP4PackedCompressor
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from formats.codec import E2M1, F64, Parts, Raw, decode

F32 = npt.NDArray[np.float32]
Quantize = Callable[[F32, float], dict[str, Raw]]
"""(matrix [N, K], largest magnitude of the whole tensor it belongs to) -> stored tensors."""

DTYPES = {
    torch.float8_e4m3fn: "F8_E4M3",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
}


class Dialect(NamedTuple):
    """format: what the package is to call it. block: elements along (N, K) one scale covers, 0 = all; `cut`: the
    smallest cuts along (N, K) that split nothing. quantization: what its config says. source: who made the words."""

    format: str
    block: tuple[int, int]
    cut: tuple[int, int]
    quantize: Quantize
    quantization: dict[str, Any]

    def decode(self, parts: Parts, block: tuple[int, int] | None = None) -> F64:
        return decode(parts, block or self.block)


def to_raw(tensor: torch.Tensor) -> Raw:
    carrier = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[tensor.element_size()]
    words = tensor.contiguous().view(carrier).numpy()
    return Raw(DTYPES[tensor.dtype], words.view(f"u{tensor.element_size()}").copy())


def f32(value: float | F32, shape: tuple[int, ...] | None = None) -> Raw:
    made = np.asarray(value, dtype=np.float32)
    return Raw("F32", (made if shape is None else made.reshape(shape)).copy().view(np.uint32))


def e4m3(x: F32) -> Raw:
    return to_raw(torch.from_numpy(np.ascontiguousarray(x)).to(torch.float8_e4m3fn))


def grid(x: F32, block: tuple[int, int]) -> F32:
    """[N / bn, bn, K / bk, bk], zeros where the last blocks are short."""
    (n, k), (bn, bk) = x.shape, block
    whole = np.zeros((-(-n // bn) * bn, -(-k // bk) * bk), dtype=np.float32)
    whole[:n, :k] = x
    return whole.reshape(-1, bn, whole.shape[1] // bk, bk)


# -- compressed-tensors ----------------------------------------------------------------------------------------------


def scheme(preset: str) -> QuantizationScheme:
    return preset_name_to_scheme(preset, ["Linear"])


def _bounds(low: F32, high: F32) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.from_numpy(np.ascontiguousarray(low)), torch.from_numpy(np.ascontiguousarray(high))


def _extremes(x: F32, axes: tuple[int, ...] | int) -> tuple[torch.Tensor, torch.Tensor]:
    return _bounds(x.min(axis=axes), x.max(axis=axes))


def ct_fp8(preset: str) -> Quantize:
    """FP8 (per tensor, static activations), FP8_DYNAMIC (per channel), FP8_BLOCK."""

    def quantize(x: F32, bound: float) -> dict[str, Raw]:
        made = scheme(preset)
        low, high = {
            "FP8": lambda: (torch.tensor([-bound]), torch.tensor([bound])),
            "FP8_DYNAMIC": lambda: tuple(t[:, None] for t in _extremes(x, 1)),
            "FP8_BLOCK": lambda: _extremes(grid(x, (128, 128)), (1, 3)),
        }[preset]()
        scale, _ = calculate_qparams(low, high, made.weights)
        state = FloatQuantizationCompressor.compress({"weight": torch.from_numpy(x), "weight_scale": scale}, made)
        stored = {f".{name}": to_raw(state[name]) for name in ("weight", "weight_scale")}
        return stored | ({".input_scale": f32(0.02, (1,))} if preset == "FP8" else {})

    return quantize


def ct_nvfp4(x: F32, bound: float) -> dict[str, Raw]:
    made = scheme("NVFP4")
    whole = generate_gparam(torch.tensor([-bound]), torch.tensor([bound]))
    low, high = _extremes(x.reshape(len(x), -1, 16), 2)
    scale, _ = calculate_qparams(low, high, made.weights, global_scale=whole)
    state = NVFP4PackedCompressor.compress(
        {"weight": torch.from_numpy(x), "weight_scale": scale.float(), "weight_global_scale": whole}, made
    )
    names = ("weight_packed", "weight_scale", "weight_global_scale")
    return {f".{n}": to_raw(state[n]) for n in names} | {".input_global_scale": f32(268.8, (1,))}


def ct_mxfp4(x: F32, bound: float) -> dict[str, Raw]:
    made = scheme("MXFP4")
    scale, _ = calculate_qparams(*_extremes(x.reshape(len(x), -1, 32), 2), made.weights)
    state = MXFP4PackedCompressor.compress({"weight": torch.from_numpy(x), "weight_scale": scale}, made)
    return {f".{n}": to_raw(state[n]) for n in ("weight_packed", "weight_scale")}


def ct_mxfp8(x: F32, bound: float) -> dict[str, Raw]:
    made = scheme("MXFP8")
    scale, _ = calculate_qparams(*_extremes(x.reshape(len(x), -1, 32), 2), made.weights)
    state = MXFP8QuantizationCompressor.compress({"weight": torch.from_numpy(x), "weight_scale": scale}, made)
    return {f".{n}": to_raw(state[n]) for n in ("weight", "weight_scale")}


def ct_int8(x: F32, bound: float) -> dict[str, Raw]:
    """W8A8: per channel."""
    made = scheme("W8A8")
    scale, _ = calculate_qparams(*(t[:, None] for t in _extremes(x, 1)), made.weights)
    state = IntQuantizationCompressor.compress({"weight": torch.from_numpy(x), "weight_scale": scale}, made)
    return {f".{n}": to_raw(state[n]) for n in ("weight", "weight_scale")}


# -- by hand ---------------------------------------------------------------------------------------------------------


def hf_block(dtype: torch.dtype) -> Quantize:
    """Hugging Face `quant_method: fp8`: weight * weight_scale_inv, blocks of 128 x 128."""

    def quantize(x: F32, bound: float) -> dict[str, Raw]:
        parted = grid(x, (128, 128))
        amax = np.maximum(np.abs(parted).max(axis=(1, 3)), np.float32(1e-12))
        scale = torch.from_numpy(amax / np.float32(448)).to(dtype)
        values = parted / scale.float().numpy()[:, None, :, None]
        n, k = x.shape
        values = values.reshape(parted.shape[0] * 128, -1)[:n, :k].clip(-448, 448)
        return {".weight": e4m3(values), ".weight_scale_inv": to_raw(scale)}

    return quantize


def modelopt_fp8(x: F32, bound: float) -> dict[str, Raw]:
    scale = np.float32(bound / 448)
    return {".weight": e4m3(x / scale), ".weight_scale": f32(scale), ".input_scale": f32(0.02)}


def int8_tensor(x: F32, bound: float) -> dict[str, Raw]:
    """One scale for the tensor, a static one and its zero point for activations."""
    scale = np.float32(bound / 127)
    values = Raw("I8", np.rint(x / scale).astype(np.int8).view(np.uint8))
    point = Raw("I8", np.array([3], dtype=np.uint8))
    scales = {".weight_scale": f32(scale, (1,)), ".input_scale": f32(0.05, (1,))}
    return {".weight": values, **scales, ".input_zero_point": point}


def channel_1d(x: F32, bound: float) -> dict[str, Raw]:
    scale = np.maximum(np.abs(x).max(axis=1), np.float32(1e-12)) / np.float32(448)
    return {".weight": e4m3(x / scale[:, None]), ".weight_scale": f32(scale)}


def nearest_e2m1(x: F32) -> npt.NDArray[np.uint8]:
    """The code of the nearest e2m1 number, by looking at all sixteen."""
    return np.abs(x[..., None] - E2M1).argmin(axis=-1).astype(np.uint8)


def packed(found: npt.NDArray[np.uint8]) -> Raw:
    return Raw("U8", found[:, 0::2] | (found[:, 1::2] << 4))


def modelopt_nvfp4(x: F32, bound: float) -> dict[str, Raw]:
    """weight = e2m1 * weight_scale * weight_scale_2, weight_scale_2 = amax / (6 * 448)."""
    whole = np.float32(bound / 2688)
    groups = x.reshape(len(x), -1, 16)
    scale = e4m3(np.maximum(np.abs(groups).max(axis=2) / (6 * whole), np.float32(2**-9)))
    step = torch.from_numpy(scale.words).view(torch.float8_e4m3fn).float().numpy() * whole
    values = packed(nearest_e2m1((groups / step[:, :, None]).reshape(x.shape)))
    return {".weight": values, ".weight_scale": scale, ".weight_scale_2": f32(whole), ".input_scale": f32(0.0037)}


def quark_mxfp4(x: F32, bound: float) -> dict[str, Raw]:
    """e2m1 * 2^(e - 127), e chosen so that the group's largest number is at most 6."""
    groups = x.reshape(len(x), -1, 32)
    amax = np.maximum(np.abs(groups).max(axis=2), np.float32(2**-60))
    power = np.ceil(np.log2(amax.astype(np.float64) / 6))
    values = groups / np.exp2(power)[:, :, None]
    scale = Raw("U8", (power + 127).astype(np.uint8))
    return {".weight": packed(nearest_e2m1(values.reshape(x.shape))), ".weight_scale": scale}


BLOCK_CT = {
    "quant_method": "compressed-tensors",
    "config_groups": {"group_0": {"weights": {"strategy": "block", "block_structure": [128, 128]}}},
}

DIALECTS: dict[str, Dialect] = {
    "fp8 block, HF, fp32 scales": Dialect(
        "fp8-block", (128, 128), (128, 128), hf_block(torch.float32), {"quant_method": "fp8"}
    ),
    "fp8 block, HF, bf16 scales": Dialect(
        "fp8-block", (128, 128), (128, 128), hf_block(torch.bfloat16), {"weight_block_size": [128, 128]}
    ),
    "fp8 block, compressed-tensors": Dialect("fp8-block-ct", (128, 128), (128, 128), ct_fp8("FP8_BLOCK"), BLOCK_CT),
    "fp8 channel, compressed-tensors": Dialect("fp8-channel", (1, 0), (1, 1), ct_fp8("FP8_DYNAMIC"), {}),
    "fp8 channel, 1-D": Dialect("fp8-channel-1d", (1, 0), (1, 1), channel_1d, {}),
    "fp8 tensor, compressed-tensors": Dialect("fp8-tensor-ct", (0, 0), (1, 1), ct_fp8("FP8"), {}),
    "fp8 tensor, ModelOpt": Dialect("fp8-tensor", (0, 0), (1, 1), modelopt_fp8, {}),
    "NVFP4, ModelOpt": Dialect("nvfp4", (1, 16), (1, 16), modelopt_nvfp4, {}),
    "NVFP4, compressed-tensors": Dialect("nvfp4-ct", (1, 16), (1, 16), ct_nvfp4, {}),
    "MXFP4, Quark": Dialect("mxfp4", (1, 32), (1, 32), quark_mxfp4, {}),
    "MXFP4, compressed-tensors": Dialect("mxfp4-ct", (1, 32), (1, 32), ct_mxfp4, {}),
    "MXFP8, compressed-tensors": Dialect("mxfp8", (1, 32), (1, 32), ct_mxfp8, {}),
    "int8 channel, compressed-tensors": Dialect("int8-channel", (1, 0), (1, 1), ct_int8, {}),
    "int8 tensor, compressed-tensors": Dialect("int8-tensor", (0, 0), (1, 1), int8_tensor, {}),
}


def matrix(n: int, k: int, seed: int = 0) -> F32:
    """Blocks of 64 x 16 of very different magnitude, so that a scale in the wrong place shows."""
    rng = np.random.default_rng([n, k, seed])
    gains = 2.0 ** rng.uniform(-3, 3, (-(-n // 64), -(-k // 16)))
    return (rng.standard_normal((n, k)) * np.kron(gains, np.ones((64, 16)))[:n, :k]).astype(np.float32)


@cache
def sample(name: str, shape: tuple[int, int]) -> Parts:
    """`matrix` of this shape in a dialect; read-only."""
    found = stored(DIALECTS[name], matrix(*shape))
    for raw in found.values():
        raw.words.flags.writeable = False
    return MappingProxyType(found)


def stored(dialect: Dialect, x: F32, bound: float | None = None) -> dict[str, Raw]:
    """`bound`: the largest magnitude of the tensor that `x` is a part of."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # matrices this small take far longer on several threads of a busy machine
    try:
        return dialect.quantize(np.ascontiguousarray(x), float(np.abs(x).max()) if bound is None else bound)
    finally:
        torch.set_num_threads(threads)
