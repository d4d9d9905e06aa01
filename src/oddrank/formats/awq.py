"""AWQ: int4 in 32-bit words along N, scales and zero points per group; [K, N] throughout.

`qweight` [K, N/8] and `qzeros` [K/g, N/8] hold rows 0, 2, 4, 6, 1, 3, 5, 7 of every eight, the low bits first; `scales`
[K/g, N]. Words are moved whole, so the order only matters to whoever decodes them. A weight of zero is its zero point's
code. Source: AutoAWQ 0.2.9 (modules/linear/gemm, utils/packing_utils).
"""

from __future__ import annotations

import re
from typing import Any

from oddrank.errors import OddrankError
from oddrank.formats.base import About, Format, Stored, ZeroPoints
from oddrank.formats.integers import (
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

ABOUT = About("AWQ", "4 bits, `gemm`")


def made(group: int) -> Format:
    zero = word(4, middle(4))
    return Format(
        f"int4-awq-{group_name(group)}",
        (
            Stored(".qweight", ("I32",), (8, 1), "kn", row_fill=zero, column_fill=zero),
            group_scale(".scales", group, "kn"),
            Stored(".qzeros", ("I32",), (8, group), "kn", shared="k", row_fill=zero, column_fill=zero),
        ),
        zero_word=zero,
        zero_points=ZeroPoints(".qzeros", 4),
        declared=True,
    )


def named(name: str) -> Format | None:
    match = re.fullmatch(rf"int4-awq-{GROUP_NAME}", name)
    return made(group_of(match[1])) if match else None


def forms(quantization: dict[str, Any]) -> tuple[Format, ...]:
    if not quantization:
        return made(USUAL), made(0)
    if quantization.get("quant_method") != "awq":
        return ()
    version = str(quantization.get("version") or quantization.get("format") or "gemm").lower()
    if version not in ("gemm", "exllama"):  # exllama repacks what it loads
        raise OddrankError(
            f'quantization_config says AWQ of version "{version}", which is packed for one kernel; "gemm" is known. '
            "Save the model in that version."
        )
    return in_config(quantization, "AWQ")


def in_config(config: dict[str, Any], what: str) -> tuple[Format, ...]:
    """The forms of a config and of what its `extra_config` says of single layers."""
    found: dict[str, Format] = {}
    for said in overrides(config, "extra_config"):
        bits = said.get("bits", said.get("w_bit", 4))
        if isinstance(bits, int) and bits >= 16:
            continue  # layers left as they were
        if bits != 4:
            raise OddrankError(f"quantization_config says {what} of {bits!r} bits; oddrank moves it with 4 bits.")
        form = made(checked(4, said.get("group_size", said.get("q_group_size", USUAL)), what)[1])
        found[form.name] = form
    return tuple(found.values())
