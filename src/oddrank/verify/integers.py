"""Integers in 32-bit words as plain numbers, for the oracle: (code - zero point) * scale, from the tools' definitions.

GPTQ packs codes along K and zero points along N, kept less one unless the config says gptq_v2; AWQ packs both along N,
with the rows of every eight in the order 0, 2, 4, 6, 1, 3, 5, 7; compressed-tensors offsets both by half the codes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

COMPANIONS = ("qzeros", "scales", "g_idx", "weight_scale", "weight_shape", "weight_zero_point", "weight_g_idx")
_AWQ = (0, 4, 1, 5, 2, 6, 3, 7)  # the nibble of each row of eight

Get = Callable[[str], "Tensor | None"]
"""A stored tensor of the layer by its last name, None where it has none."""


def unpacked(words: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """Codes of 32-bit words along a dimension, the low bits first."""
    import torch

    shifts = torch.arange(0, 32, bits)
    codes = (words.movedim(dim, -1)[..., None] >> shifts) & ((1 << bits) - 1)
    if order is not None:
        codes = codes[..., list(order)]
    return codes.flatten(-2).movedim(-1, dim).long()


def decoded(get: Get, quantization: Mapping[str, Any]) -> Tensor | None:
    """A layer's matrix [N, K] in float64; None for a layer that is not stored so."""
    if get("qweight") is not None:
        return _by_columns(get, quantization)
    packed, shape = get("weight_packed"), get("weight_shape")
    if packed is None or shape is None:
        return None
    n, k = shape.tolist()
    bits = 4 if packed.shape[1] * 8 < k + 8 else 8
    scale, point = get("weight_scale"), get("weight_zero_point")
    assert scale is not None
    codes = unpacked(packed, bits, 1)[:, :k]
    groups = _groups(k, scale.shape[1], get("weight_g_idx"))
    half = 1 << (bits - 1)
    weights = codes - (half if point is None else unpacked(point, bits, 0)[:n][:, groups])
    return weights * scale.double()[:, groups]


def _by_columns(get: Get, quantization: Mapping[str, Any]) -> Tensor:
    """GPTQ and AWQ: everything lies as [K, N]."""
    words, points, scale = get("qweight"), get("qzeros"), get("scales")
    assert words is not None and points is not None and scale is not None
    said = f"{quantization.get('quant_method')} {quantization.get('packing_format')}"
    n = scale.shape[1]
    if "awq" in said:
        codes, zeros = unpacked(words, 4, 1, _AWQ), unpacked(points, 4, 1, _AWQ)
    else:
        bits = 32 * points.shape[1] // n
        as_it_is = quantization.get("checkpoint_format") == "gptq_v2" or said.endswith((" auto_round", "gptqmodel"))
        codes, zeros = unpacked(words, bits, 0), unpacked(points, bits, 1) + (0 if as_it_is else 1)
    groups = _groups(len(codes), len(scale), get("g_idx"))
    return ((codes - zeros[groups]) * scale.double()[groups]).T


def _groups(k: int, count: int, stored: Tensor | None) -> Tensor:
    """The scale group of every column."""
    import torch

    if stored is not None and not bool((stored < 0).any()):
        return stored.long()
    return torch.arange(k) // max(1, -(-k // count))
