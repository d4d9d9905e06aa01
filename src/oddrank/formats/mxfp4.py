"""MXFP4: two e2m1 values a byte (low nibble = even k), an e8m0 exponent per 32 columns (OCP MX 1.0).

Dummy columns of real rows get the exponent 2^-127, not 1: kernels fold a row's exponents against its largest, and a
dummy's 2^0 there would flush the row's real weights to zero. Dummy rows get 2^0. 0xFF is NaN and never written.

gpt-oss stores its stacked experts in two tensors each, `gate_up_proj_blocks` [E, N, K/32, 16] and `gate_up_proj_scales`
[E, N, K/32]: the 16 bytes of a group lie in a dimension of their own (transformers 5.24, integrations/mxfp4).
"""

from typing import Any

from oddrank.formats.base import About, Format, Stored

ABOUT = About(
    "MXFP4", "`weight`/`weight_scale` as Quark writes it, compressed-tensors' `weight_packed`, gpt-oss's `_blocks`"
)


def exponents(suffix: str) -> Stored:
    """e8m0 exponents per 32 columns, often stored as plain bytes."""
    return Stored(suffix, ("U8", "F8_E8M0"), (1, 32), shared=True, row_fill=0x7F, column_fill=0x00)


def forms(quantization: dict[str, Any]) -> tuple[Format, ...]:
    return (
        Format("mxfp4", (Stored(".weight", ("U8",), (1, 2)), exponents(".weight_scale"))),
        Format("mxfp4-ct", (Stored(".weight_packed", ("U8",), (1, 2)), exponents(".weight_scale"))),
        Format("mxfp4-blocks", (Stored(".weight_blocks", ("U8",), (1, 32), inner=16), exponents(".weight_scales"))),
    )
