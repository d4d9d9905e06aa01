"""Integers in 32-bit words, as their tools write them: by compressed-tensors itself, or by the published definitions.

GPTQ and AWQ: weight = (q - z) * s. GPTQ packs q along K, k in order, and keeps z - 1 (format gptq_v2: z), packed along
N (AutoGPTQ, qlinear_cuda_old.py: `qweight[row] |= intweight[j] << bits * (j - i)`, `zeros -= 1`). AWQ packs both along
N, rows 0, 2, 4, 6, 1, 3, 5, 7 of every eight (AutoAWQ, `order_map`). The decoders are the inverse formulas, in float64.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from formats.codec import F64, Parts, Raw, numbers
from formats.dialects import F32, to_raw

Codes = npt.NDArray[np.int64]
ORDER = [0, 2, 4, 6, 1, 3, 5, 7]
"""AWQ: the row of every eight that each nibble of a word holds, the lowest first."""
UNORDER = [0, 4, 1, 5, 2, 6, 3, 7]
"""The nibble that holds each row: AutoAWQ's AWQ_REVERSE_ORDER."""


class Packed(NamedTuple):
    """format: what the package is to call it. group: columns of a scale group, 0 = all. cut: the smallest cuts along
    (N, K) that split nothing. config: quantization_config. quantize: matrix [N, K] -> stored tensors. decode: back."""

    format: str
    group: int
    cut: tuple[int, int]
    config: dict[str, Any]
    quantize: Callable[[F32], dict[str, Raw]]
    decode: Callable[[Parts], F64]


# -- codes -----------------------------------------------------------------------------------------------------------


def quantized(x: F32, bits: int, group: int, symmetric: bool, order: Codes | None = None) -> tuple[Codes, Codes, F32]:
    """(q [N, K], z [N, G], s [N, G] in fp16) of a matrix. order: the group of each column, else k // group."""
    k, most = x.shape[1], 2**bits - 1
    at = np.arange(k) // (group or k) if order is None else order
    low = np.stack([x[:, at == g].min(axis=1, initial=0) for g in range(at.max() + 1)], axis=1)
    high = np.stack([x[:, at == g].max(axis=1, initial=0) for g in range(at.max() + 1)], axis=1)
    if symmetric:
        high = np.maximum(high, -low)
        low = -high
    s = np.maximum((high - low) / most, 1e-4).astype(np.float16).astype(np.float32)
    # zero points of 1 to 14: the first version cannot keep a zero point of 0
    z = np.full(s.shape, 2 ** (bits - 1)) if symmetric else np.clip(np.rint(-low / s), 1, most - 1)
    q = np.clip(np.rint(x / s[:, at]) + z[:, at], 0, most)
    return q.astype(np.int64), z.astype(np.int64), s


def packed(codes: Codes, bits: int, axis: int, order: list[int] | None = None) -> Raw:
    """Codes along an axis in words, the low bits first."""
    per = 32 // bits
    moved = np.moveaxis(codes, axis, -1)
    grid = moved.reshape(*moved.shape[:-1], -1, per)
    if order is not None:
        grid = grid[..., order]
    words = (grid.astype(np.uint64) << (np.arange(per, dtype=np.uint64) * np.uint64(bits))).sum(axis=-1)
    return Raw("I32", np.ascontiguousarray(np.moveaxis(words, -1, axis)).astype(np.uint32))


def unpacked(raw: Raw, bits: int, axis: int, order: list[int] | None = None) -> Codes:
    assert raw.dtype == "I32"
    per = 32 // bits
    moved = np.moveaxis(raw.words, axis, -1)
    codes = moved[..., None] >> (np.arange(per, dtype=np.uint32) * np.uint32(bits)) & np.uint32(2**bits - 1)
    if order is not None:
        codes = codes[..., order]
    return np.moveaxis(codes.reshape(*moved.shape[:-1], -1), -1, axis).astype(np.int64)


def f16(x: F32) -> Raw:
    return to_raw(torch.from_numpy(np.ascontiguousarray(x)).half())


# -- GPTQ, AWQ -------------------------------------------------------------------------------------------------------


def gptq(
    bits: int = 4, group: int = 128, *, v2: bool = False, symmetric: bool = False, index: bool = True,
    scatter: int | None = None, config: Mapping[str, Any] | None = None, suffix: str = "",
) -> Packed:  # fmt: skip
    """scatter: a seed for groups in activation order."""

    def quantize(x: F32) -> dict[str, Raw]:
        k = x.shape[1]
        order = np.arange(k) // (group or k)
        if scatter is not None:
            order = np.random.default_rng(scatter).permutation(order)
        q, z, s = quantized(x, bits, group, symmetric, order)
        made = {
            ".qweight": packed(q.T, bits, 0),
            ".qzeros": packed(z.T - (0 if v2 else 1), bits, 1),
            ".scales": f16(s.T),
        }
        return made | ({".g_idx": Raw("I32", order.astype(np.uint32))} if index else {})

    def decode(parts: Parts) -> F64:
        q = unpacked(parts[".qweight"], bits, 0)
        z = unpacked(parts[".qzeros"], bits, 1) + (0 if v2 else 1)
        at = np.arange(len(q)) // (group or len(q))
        if index:
            at = parts[".g_idx"].words.astype(np.int64)
            assert parts[".g_idx"].dtype == "I32" and at.shape == (len(q),)
        return ((q - z[at]) * numbers(parts[".scales"])[at]).T

    said = {"quant_method": "gptq", "bits": bits, "group_size": group or -1, "desc_act": scatter is not None,
            "sym": symmetric, **({"checkpoint_format": "gptq_v2"} if v2 else {})}  # fmt: skip
    name = f"int{bits}-gptq{'-v2' * v2}{suffix}-{f'g{group}' if group else 'channel'}"
    return Packed(name, group, (8, group or 32 // bits), dict(config or said), quantize, decode)


def awq(group: int = 128, config: Mapping[str, Any] | None = None) -> Packed:
    def quantize(x: F32) -> dict[str, Raw]:
        q, z, s = quantized(x, 4, group, False)
        return {".qweight": packed(q.T, 4, 1, ORDER), ".qzeros": packed(z.T, 4, 1, ORDER), ".scales": f16(s.T)}

    def decode(parts: Parts) -> F64:
        q, z = (unpacked(parts[s], 4, 1, UNORDER) for s in (".qweight", ".qzeros"))
        at = np.arange(len(q)) // (group or len(q))
        return ((q - z[at]) * numbers(parts[".scales"])[at]).T

    said = {"quant_method": "awq", "bits": 4, "group_size": group or -1, "version": "gemm", "zero_point": True}
    name = f"int4-awq-{f'g{group}' if group else 'channel'}"
    return Packed(name, group, (8, group or 1), dict(config or said), quantize, decode)


def auto_round(packing: str, **more: Any) -> dict[str, Any]:
    return {"quant_method": "auto-round", "packing_format": packing, "bits": 4, "group_size": 128, "data_type": "int",
            "sym": False, **more}  # fmt: skip


# -- compressed-tensors ----------------------------------------------------------------------------------------------


def ct_scheme(bits: int, group: int, symmetric: bool) -> QuantizationScheme:
    strategy: dict[str, Any] = {"strategy": "group", "group_size": group} if group else {"strategy": "channel"}
    args = QuantizationArgs(num_bits=bits, type="int", symmetric=symmetric, dynamic=False, **strategy)
    return QuantizationScheme(targets=["Linear"], weights=args)


def ct(bits: int = 4, group: int = 128, symmetric: bool = True, index: str | None = None) -> Packed:
    """index: with a weight_g_idx, "unset" (-1 throughout) or "ordered"."""
    scheme = ct_scheme(bits, group, symmetric)

    def quantize(x: F32) -> dict[str, Raw]:
        n, k = x.shape
        grid = torch.from_numpy(x.reshape(n, -1, group or k))
        scale, point = calculate_qparams(grid.amin(2), grid.amax(2), scheme.weights)
        state = {"weight": torch.from_numpy(x), "weight_scale": scale.half(), "weight_zero_point": point.to(torch.int8)}
        found = PackedQuantizationCompressor.compress(state, scheme)
        made = {f".{name}": to_raw(tensor) for name, tensor in found.items()}
        if index is not None:
            order = np.arange(k) // (group or k) if index == "ordered" else np.full(k, -1)
            made[".weight_g_idx"] = Raw("I32", order.astype(np.int32).view(np.uint32))
        return made

    def decode(parts: Parts) -> F64:
        n, k = (int(i) for i in parts[".weight_shape"].words)
        q = unpacked(parts[".weight_packed"], bits, 1)
        assert q.shape == (n, k)
        middle = 2 ** (bits - 1)
        z = np.full((n, 1), middle) if symmetric else unpacked(parts[".weight_zero_point"], bits, 0)
        scale = numbers(parts[".weight_scale"])
        at = np.arange(k) // (group or k)
        assert scale.shape == (n, at.max(initial=0) + 1)
        if index == "ordered":
            assert np.array_equal(parts[".weight_g_idx"].words, at)
        if index == "unset":
            assert parts[".weight_g_idx"].words.shape == (k,) and (parts[".weight_g_idx"].words == 0xFFFFFFFF).all()
        return (q - (z if symmetric else z[:, at])) * scale[:, at]

    weights = {"num_bits": bits, "type": "int", "symmetric": symmetric, "strategy": "group" if group else "channel",
               "group_size": group or None, "actorder": None}  # fmt: skip
    groups = {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": None}}
    said = {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups, "ignore": []}
    name = f"int{bits}-pack{'' if symmetric else '-asym'}-{f'g{group}' if group else 'channel'}"
    per = 32 // bits
    return Packed(name, group, (1 if symmetric else per, group or per), said, quantize, decode)


PACKINGS: dict[str, Packed] = {
    "GPTQ": gptq(),
    "GPTQ, 32 columns": gptq(group=32),
    "GPTQ, symmetric": gptq(symmetric=True),
    "GPTQ, whole rows": gptq(group=0),
    "GPTQ, 8 bits": gptq(8),
    "GPTQ, 8 bits, whole rows": gptq(8, 0),
    "GPTQ, version 2": gptq(v2=True),
    "GPTQ, version 2, whole rows": gptq(group=0, v2=True),
    "GPTQ, version 2, 8 bits": gptq(8, 64, v2=True),
    "AWQ": awq(),
    "AWQ, 64 columns": awq(64),
    "AWQ, whole rows": awq(0),
    "AutoRound as GPTQ": gptq(index=False, config=auto_round("auto_round:auto_gptq")),
    "AutoRound as it is": gptq(v2=True, index=False, config=auto_round("auto_round")),
    "AutoRound for GPTQModel": gptq(v2=True, config=auto_round("auto_round:gptqmodel")),
    "AutoRound as AWQ": awq(config=auto_round("auto_round:auto_awq")),
    "compressed-tensors int4": ct(),
    "compressed-tensors int4, 32 columns": ct(group=32),
    "compressed-tensors int4, channels": ct(group=0),
    "compressed-tensors int4, asymmetric": ct(symmetric=False),
    "compressed-tensors int4, asymmetric, channels": ct(group=0, symmetric=False),
    "compressed-tensors int8": ct(8),
    "compressed-tensors int8, channels": ct(8, 0),
    "compressed-tensors int8, asymmetric": ct(8, 64, symmetric=False),
    "compressed-tensors int8, asymmetric, channels": ct(8, 0, symmetric=False),
    "compressed-tensors int4, groups unset": ct(index="unset"),
    "compressed-tensors int4, groups in order": ct(index="ordered"),
}


def skewed(n: int, k: int, seed: int = 0) -> F32:
    """Blocks of 64 x 16 of very different magnitude and off zero, so that zero points differ from row to row."""
    rng = np.random.default_rng([n, k, seed])
    shape = (-(-n // 64), -(-k // 16))
    gains = np.kron(2.0 ** rng.uniform(-3, 3, shape), np.ones((64, 16)))[:n, :k]
    return (gains * (rng.standard_normal((n, k)) + rng.uniform(-1.5, 1.5, (n, 1)))).astype(np.float32)


def stored(packing: Packed, x: F32) -> dict[str, Raw]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return packing.quantize(np.ascontiguousarray(x))
    finally:
        torch.set_num_threads(threads)


@cache
def sample(name: str, shape: tuple[int, int]) -> Parts:
    """`skewed` of this shape in a packing; read-only."""
    found = stored(PACKINGS[name], skewed(*shape))
    for raw in found.values():
        raw.words.flags.writeable = False
    return MappingProxyType(found)
