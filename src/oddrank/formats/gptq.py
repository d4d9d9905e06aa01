"""GPTQ: int4 and int8 in 32-bit words along K, scales and zero points per group; [K, N] throughout.

`qweight` [K/8, N] (8 bits: K/4), k in order, the low bits first; `scales` [K/g, N]; `qzeros` [K/g, N/8], packed along
N. The format "gptq" keeps a zero point less one (symmetric int4: 7), "gptq_v2" as it is. `g_idx` [K] is each column's
group: k // g, unless the columns were quantized in activation order (desc_act without static_groups), which scatters
a group over all of K. AutoGPTQ writes a `bias` beside every layer, zeros where the model has none; readers leave
those out. Source: AutoGPTQ 0.7 (nn_modules/qlinear), GPTQModel (`convert_gptq_v1_to_v2_format`).
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
    overrides,
    word,
)

ABOUT = About("GPTQ", "4 and 8 bits, `gptq` and `gptq_v2`; in activation order only where no column is cut")


def made(bits: int, group: int, v2: bool = False, scattered: bool = False) -> Format:
    per, plus = 32 // bits, 0 if v2 else 1
    zero, point = word(bits, middle(bits)), word(bits, middle(bits) - plus)
    return Format(
        f"int{bits}-gptq{'-v2' * v2}{'-scattered' * scattered}-{group_name(group)}",
        (
            Stored(".qweight", ("I32",), (1, per), "kn", row_fill=zero, column_fill=zero),
            group_scale(".scales", group, "kn"),
            Stored(".qzeros", ("I32",), (per, group), "kn", shared="k", row_fill=point, column_fill=point),
            Stored(".g_idx", ("I32",), (0, 1), "k", rewritten="groups", optional=not scattered),
        ),
        zero_word=zero,
        zero_points=ZeroPoints(".qzeros", bits, plus),
        declared=True,
        scattered=scattered,
        passed=(".bias",),
    )


def named(name: str) -> Format | None:
    match = re.fullmatch(rf"int(4|8)-gptq(-v2)?(-scattered)?-{GROUP_NAME}", name)
    return made(int(match[1]), group_of(match[4]), bool(match[2]), bool(match[3])) if match else None


def forms(quantization: dict[str, Any]) -> tuple[Format, ...]:
    if not quantization:
        return tuple(made(bits, group) for bits in BITS for group in (USUAL, 0))
    if quantization.get("quant_method") != "gptq":
        return ()
    packing = quantization.get("checkpoint_format") or quantization.get("format") or "gptq"
    if packing not in ("gptq", "gptq_v2") or quantization.get("is_marlin_format"):
        packing = "marlin" if quantization.get("is_marlin_format") else packing
        raise OddrankError(
            f'quantization_config says GPTQ in the checkpoint_format "{packing}", which is packed for one kernel; '
            '"gptq" and "gptq_v2" are known. Save the model in one of those.'
        )
    return in_config(quantization, "dynamic", "GPTQ", v2=packing == "gptq_v2")


def in_config(config: dict[str, Any], changes: str, what: str, *, v2: bool) -> tuple[Format, ...]:
    """The forms of a config and of what its dict `changes` says of single layers."""
    found: dict[str, Format] = {}
    for said in overrides(config, changes):
        if isinstance(said.get("bits"), int) and said["bits"] >= 16:
            continue  # layers left as they were
        bits, group = checked(said.get("bits"), said.get("group_size", USUAL), what)
        ordered = bool(said.get("desc_act")) and not said.get("static_groups") and group > 0
        for scattered in (True, False) if ordered else (False,):
            form = made(bits, group, v2, scattered)
            found[form.name] = form
    return tuple(found.values())
