"""Dense: one value an element, in bf16, fp16, fp32 or fp64. Zero is the all-zero word in each of them."""

from typing import Any

from oddrank.formats.base import FLOATS, About, Format, Stored

ABOUT = About("bf16, fp16, fp32, fp64")


def forms(quantization: dict[str, Any]) -> tuple[Format, ...]:
    return (Format("dense", stored=(Stored(".weight", FLOATS),), for_vectors=True),)
