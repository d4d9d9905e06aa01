"""MXFP4: two e2m1 values a byte (low nibble = even k), an e8m0 exponent per 32 columns (OCP MX 1.0).

Dummy columns of real rows get the exponent 2^-127, not 1: kernels fold a row's exponents against its largest, and a
dummy's 2^0 there would flush the row's real weights to zero. Dummy rows get 2^0. 0xFF is NaN and never written.
"""

from typing import Any

from oddrank.formats.base import Format, Stored

_EXPONENTS = Stored(".weight_scale", ("U8", "F8_E8M0"), (1, 32), shared=True, row_fill=0x7F, column_fill=0x00)


def forms(quantization: dict[str, Any]) -> tuple[Format, ...]:
    return (
        Format("mxfp4", (Stored(".weight", ("U8",), (1, 2)), _EXPONENTS)),
        Format("mxfp4-ct", (Stored(".weight_packed", ("U8",), (1, 2)), _EXPONENTS)),
    )
