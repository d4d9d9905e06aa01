"""fp8: one e4m3 value an element, and scales per block, per output channel or for the whole tensor.

Every dialect multiplies: weight = value * scale. Names and shapes: Hugging Face `quant_method: fp8` writes
`weight_scale_inv`, compressed-tensors and ModelOpt `weight_scale`; a static activation scale (`input_scale`) belongs to
the tensor and is never cut. Source: transformers 5.24 (finegrained_fp8), compressed-tensors 0.20.
"""

import re
from typing import Any

from oddrank.formats.base import FLOATS, About, Format, Stored

ABOUT = About(
    "fp8 (e4m3)",
    "blocks (`weight_scale_inv`, and compressed-tensors'), per channel ([N, 1] and [N]), per tensor (scalar and [1])",
)

_VALUES = Stored(".weight", ("F8_E4M3",))
_SCALARS: tuple[Stored, ...] = (
    Stored(".input_scale", FLOATS, (0, 0), "scalar", shared=True, row_fill="one", column_fill="one", optional=True),
)
_ONES: tuple[Stored, ...] = (
    Stored(".input_scale", FLOATS, (0, 0), "one", shared=True, row_fill="one", column_fill="one", optional=True),
)


def _scale(suffix: str, block: tuple[int, int], shape: Any) -> Stored:
    return Stored(suffix, FLOATS, block, shape, shared=True, row_fill="one", column_fill="one")


def block_size(quantization: dict[str, Any]) -> tuple[int, int]:
    """`weight_block_size` of the config (also inside compressed-tensors' weights), [128, 128] by default."""
    size: Any = quantization.get("weight_block_size")
    groups = quantization.get("config_groups")
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        if size is None and isinstance(weights, dict):
            size = weights.get("block_structure")
    if isinstance(size, list) and len(size) == 2 and all(isinstance(n, int) and 0 < n < 10**6 for n in size):
        return size[0], size[1]
    return 128, 128


def _blocked(block: tuple[int, int]) -> tuple[Format, Format]:
    size = "" if block == (128, 128) else f"-{block[0]}x{block[1]}"
    return (
        Format(f"fp8-block{size}", (_VALUES, _scale(".weight_scale_inv", block, "nk"), *_SCALARS)),
        Format(f"fp8-block-ct{size}", (_VALUES, _scale(".weight_scale", block, "nk"), *_ONES)),
    )


def named(name: str) -> Format | None:
    """A block form with another block than 128 x 128."""
    match = re.fullmatch(r"fp8-block(-ct)?-([1-9]\d{0,5})x([1-9]\d{0,5})", name)
    if match is None:
        return None
    return _blocked((int(match[2]), int(match[3])))[1 if match[1] else 0]


def forms(quantization: dict[str, Any]) -> tuple[Format, ...]:
    plain, compressed = _blocked(block_size(quantization))
    return (
        plain,
        Format("fp8-channel", (_VALUES, _scale(".weight_scale", (1, 0), "nk"), *_ONES)),
        Format("fp8-channel-1d", (_VALUES, _scale(".weight_scale", (1, 0), "n"), *_SCALARS)),
        Format("fp8-tensor", (_VALUES, _scale(".weight_scale", (0, 0), "scalar"), *_SCALARS)),
        Format("fp8-tensor-ct", (_VALUES, _scale(".weight_scale", (0, 0), "one"), *_ONES)),
        # after the channel forms: a matrix of one block column has the shape of neither
        compressed,
    )
