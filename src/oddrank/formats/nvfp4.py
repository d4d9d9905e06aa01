"""NVFP4: two e2m1 values a byte (low nibble = even k), an e4m3 scale per 16 columns, an fp32 scale per tensor.

ModelOpt's `weight_scale_2` = amax / 2688 multiplies; compressed-tensors' `weight_global_scale` = 2688 / amax divides.
Neither is cut: it belongs to the tensor. Source: compressed-tensors 0.20, NVIDIA ModelOpt checkpoints.
"""

from typing import Any

from oddrank.formats.base import About, Format, Stored

ABOUT = About("NVFP4", "ModelOpt, compressed-tensors")

_BLOCKS = Stored(".weight_scale", ("F8_E4M3",), (1, 16), shared=True, row_fill="one", column_fill="one")


def _tensor(suffix: str, shape: Any, optional: bool = False) -> Stored:
    return Stored(
        suffix, ("F32", "BF16", "F16"), (0, 0), shape, shared=True, row_fill="one", column_fill="one", optional=optional
    )


def forms(quantization: dict[str, Any]) -> tuple[Format, ...]:
    return (
        Format(
            "nvfp4",
            (
                Stored(".weight", ("U8",), (1, 2)),
                _BLOCKS,
                _tensor(".weight_scale_2", "scalar"),
                _tensor(".input_scale", "scalar", optional=True),
            ),
        ),
        Format(
            "nvfp4-ct",
            (
                Stored(".weight_packed", ("U8",), (1, 2)),
                _BLOCKS,
                _tensor(".weight_global_scale", "one"),
                _tensor(".input_global_scale", "one", optional=True),
            ),
        ),
    )
