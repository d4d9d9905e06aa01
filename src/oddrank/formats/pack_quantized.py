"""int4 and int8 in 32-bit words as compressed-tensors packs them (`pack-quantized`): k in order, the low bits first.

`weight_packed` [N, K/8] (or K/4), codes offset by 8 (or 128); `weight_scale` [N, K/g] or [N, 1]; `weight_shape` [2],
the matrix's sizes. Asymmetric ones add `weight_zero_point` [N/8, K/g], packed along N with the same offset, so that a
weight of zero is its zero point's code. Activation order (`actorder`: "group") adds `weight_g_idx` [K], -1 throughout
where it says nothing. Source: compressed-tensors 0.20 (compressors/pack_quantized, quantization/lifecycle/forward).
"""

from __future__ import annotations

import re
from typing import Any

from oddrank.errors import OddrankError
from oddrank.formats.base import About, Format, Stored, ZeroPoints
from oddrank.formats.integers import (
    BITS,
    GROUP_NAME,
    USUAL,
    checked,
    group_name,
    group_of,
    group_scale,
    middle,
    word,
)

ABOUT = About(
    "int4, int8 (W4A16, W8A16)",
    "compressed-tensors' `pack-quantized`: scales per group or channel, symmetric and with zero points",
)


def made(bits: int, group: int, asymmetric: bool = False, scattered: bool = False) -> Format:
    per, zero = 32 // bits, word(bits, middle(bits))
    parts = [
        Stored(".weight_packed", ("I32",), (1, per), row_fill=zero, column_fill=zero),
        group_scale(".weight_scale", group, "nk"),
        Stored(".weight_shape", ("I64", "I32"), (0, 0), "scalar", inner=2, rewritten="sizes"),
        Stored(".weight_g_idx", ("I32",), (0, 1), "k", rewritten="groups", optional=not scattered),
    ]
    if asymmetric:
        points = Stored(".weight_zero_point", ("I32",), (per, group), shared="k", row_fill=zero, column_fill=zero)
        parts.insert(2, points)
    kind = "-asym" * asymmetric + "-scattered" * scattered
    return Format(
        f"int{bits}-pack{kind}-{group_name(group)}",
        tuple(parts),
        zero_word=zero,
        zero_points=ZeroPoints(".weight_zero_point", bits) if asymmetric else None,
        declared=True,
        scattered=scattered,
    )


def named(name: str) -> Format | None:
    match = re.fullmatch(rf"int(4|8)-pack(-asym)?(-scattered)?-{GROUP_NAME}", name)
    return made(int(match[1]), group_of(match[4]), bool(match[2]), bool(match[3])) if match else None


def forms(quantization: dict[str, Any]) -> tuple[Format, ...]:
    """Those of the config's groups. Where it says of none that it is symmetric, one without zero points is not taken
    for one."""
    if not quantization:
        return tuple(made(b, g, asymmetric) for b in BITS for g in (USUAL, 0) for asymmetric in (True, False))
    symmetric: dict[tuple[int, int, bool], bool] = {}
    if quantization.get("quant_method") == "compressed-tensors":
        for weights in _packed(quantization):
            bits, group = checked(weights.get("num_bits"), _group(weights), "compressed-tensors pack-quantized weights")
            key = bits, group, weights.get("actorder") in ("group", "dynamic", True)
            symmetric[key] = symmetric.get(key, False) or weights.get("symmetric", True) is not False
    found = []
    for (bits, group, ordered), may_be_symmetric in symmetric.items():
        for scattered in (True, False) if ordered else (False,):
            found += [made(bits, group, True, scattered)]
            found += [made(bits, group, False, scattered)] if may_be_symmetric else []
    return tuple(found)


def _packed(config: dict[str, Any]) -> list[dict[str, Any]]:
    """The weights of the groups that are stored packed."""
    groups = config.get("config_groups")
    found = []
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if not isinstance(weights, dict) or weights.get("type") != "int":
            continue
        said = group.get("format") or config.get("format")
        weights_only = group.get("input_activations") is None
        if said == "pack-quantized" or (said in (None, "mixed-precision") and weights_only):
            found.append(weights)
    return found


def _group(weights: dict[str, Any]) -> object:
    strategy = weights.get("strategy")
    if strategy not in ("group", "channel", None):
        raise OddrankError(
            f'quantization_config says compressed-tensors pack-quantized weights with the strategy "{strategy}"; those '
            "with a scale per group or per channel are known."
        )
    return None if strategy == "channel" else weights.get("group_size")
