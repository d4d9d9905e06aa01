"""MXFP8: one e4m3 value an element, an e8m0 exponent per 32 columns (OCP MX 1.0); exponents are filled as MXFP4's are.

Source: compressed-tensors 0.20 (`mxfp8-quantized`), NVIDIA ModelOpt (`MXFP8`): both write `weight` and `weight_scale`.
"""

from typing import Any

from oddrank.formats.base import About, Format, Stored
from oddrank.formats.mxfp4 import exponents

ABOUT = About("MXFP8", "compressed-tensors, ModelOpt")


def forms(quantization: dict[str, Any]) -> tuple[Format, ...]:
    return (Format("mxfp8", (Stored(".weight", ("F8_E4M3",)), exponents(".weight_scale"))),)
