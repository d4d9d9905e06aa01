"""A quantized checkpoint as plain numbers, for the oracle: apart from the rest of oddrank, so that it can disagree.

Written from the formats' definitions: e4m3 is torch's own; e2m1 lies two a byte, the low nibble first, and e8m0 is
2^(code - 127) (OCP Microscaling 1.0); scales multiply, except compressed-tensors' `weight_global_scale`, which divides.
Integers in 32-bit words are in integers.py. gpt-oss keeps stacked experts as `_blocks` and `_scales`, and transformers
their numbers as [E, K, N].
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from oddrank.errors import OddrankError
from oddrank.verify import integers

if TYPE_CHECKING:
    from torch import Tensor, dtype

_SCALES = ("weight_scale", "weight_scale_inv")
_OVER_ALL = ("weight_scale_2", "weight_global_scale")
_OTHERS = ("input_scale", "input_global_scale", "input_zero_point")  # of activations, which the oracle leaves alone
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def quantization_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The part of config.json that says how weights are quantized; None where they are not."""
    found = config.get("quantization_config") or config.get("text_config", {}).get("quantization_config")
    return found if isinstance(found, Mapping) else None


def block_of(quantization: Mapping[str, Any]) -> tuple[int, int]:
    """The block of fp8 block scales; 128 x 128 where none is named."""
    groups = (quantization.get("config_groups") or {}).values()
    for said in (quantization, *(group.get("weights") or {} for group in groups)):
        size = said.get("weight_block_size") or said.get("block_structure")
        if size:
            return int(size[0]), int(size[1])
    return 128, 128


def plain_state(model: str | os.PathLike[str], quantization: Mapping[str, Any], to: dtype) -> dict[str, Tensor]:
    """Every tensor by its dense name, in `to`. OddrankError for a matrix that is stored in no way known here."""
    from safetensors import safe_open

    where: dict[str, Any] = {}
    for path in sorted(Path(model).glob("*.safetensors")):
        file: Any = safe_open(str(path), framework="pt")
        where.update(dict.fromkeys(file.keys(), file))
    block = block_of(quantization)
    state: dict[str, Tensor] = {}
    for name, file in where.items():
        base, _, leaf = name.rpartition(".")
        if leaf in (*_SCALES, *_OVER_ALL, *_OTHERS, *integers.COMPANIONS) or leaf.endswith("_proj_scales"):
            continue
        if leaf in ("qweight", "weight_packed"):
            packed = integers.decoded(partial(_tensor, where, base), quantization)
            if packed is not None:
                state[f"{base}.weight"] = packed.to(to)
                continue
        if leaf.endswith("_proj_blocks"):
            dense = name.removesuffix("_blocks")
            scales = where[f"{dense}_scales"].get_tensor(f"{dense}_scales")
            whole = _decoded(name, file.get_tensor(name).flatten(-2).flatten(0, 1), scales.flatten(0, 1), block)
            state[dense] = whole.reshape(*scales.shape[:2], -1).transpose(1, 2).contiguous().to(to)
            continue
        scale = next((s for s in _SCALES if f"{base}.{s}" in where), None)
        if scale is None or leaf not in ("weight", "weight_packed"):
            state[name] = file.get_tensor(name).to(to)
            continue
        over_all = next((s for s in _OVER_ALL if f"{base}.{s}" in where), None)
        parts = {s: where[f"{base}.{s}"].get_tensor(f"{base}.{s}") for s in (scale, over_all) if s is not None}
        state[f"{base}.weight"] = _decoded(name, file.get_tensor(name), parts[scale], block).to(to)
        if over_all is not None:
            factor = parts[over_all].to(to).reshape(())
            state[f"{base}.weight"] *= 1 / factor if over_all == "weight_global_scale" else factor
    return state


def _tensor(where: Mapping[str, Any], base: str, leaf: str) -> Tensor | None:
    name = f"{base}.{leaf}"
    return where[name].get_tensor(name) if name in where else None


def _decoded(name: str, values: Tensor, scale: Tensor, block: tuple[int, int]) -> Tensor:
    """Values times their scales, in float64."""
    import torch

    four = values.dtype == torch.uint8
    if four:
        table = torch.tensor([*_E2M1, *(-x for x in _E2M1)], dtype=torch.float64)
        codes = torch.stack([values & 15, values >> 4], -1).flatten(-2)
        numbers = table[codes.long()]
    elif values.dtype in (torch.float8_e4m3fn, torch.int8):
        numbers = values.double()
    else:
        raise OddrankError(
            f"{name} is {values.dtype} with a scale, which the oracle cannot decode, so nothing can be verified."
        )
    n, k = numbers.shape[-2:]
    powers = scale.dtype in (torch.uint8, torch.float8_e8m0fnu)
    held = torch.exp2(scale.view(torch.uint8).double() - 127) if powers else scale.double()
    if held.numel() == 1:
        return numbers * held.reshape(())
    if held.dim() == 1:
        return numbers * held[:, None]
    rows, columns = (1, k // held.shape[1]) if four or powers or held.shape == (n, 1) else block
    return numbers * held.repeat_interleave(rows, 0)[:n].repeat_interleave(columns, 1)[:, :k]
