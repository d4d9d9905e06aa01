"""Dense: one value an element, in bf16, fp16, fp32 or fp64. Zero is the all-zero word in each of them."""

from oddrank.formats.base import Format, Stored

FORMAT = Format(
    "dense", stored=(Stored(".weight", ("BF16", "F16", "F32", "F64")),), for_vectors=True
)
