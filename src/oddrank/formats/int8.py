"""int8 with int8 activations (W8A8): one signed byte an element, a scale per output channel or for the whole tensor.

weight = value * scale, so the zero byte is zero. Source: compressed-tensors 0.20 (`int-quantized`), which stores
channel scales as [N, 1] and the tensor's as [1], beside a static activation scale and its zero point, if any.
"""

from typing import Any

from oddrank.formats.base import FLOATS, About, Format, Stored

ABOUT = About("int8 (W8A8)", "compressed-tensors, scales per channel or per tensor")


def forms(quantization: dict[str, Any]) -> tuple[Format, ...]:
    values = Stored(".weight", ("I8",))

    def scale(block: tuple[int, int], shape: Any) -> Stored:
        return Stored(".weight_scale", FLOATS, block, shape, shared=True, row_fill="one", column_fill="one")

    of_activations = (
        Stored(".input_scale", FLOATS, (0, 0), "one", shared=True, row_fill="one", column_fill="one", optional=True),
        Stored(".input_zero_point", ("I8", "I32"), (0, 0), "one", shared=True, optional=True),
    )
    return (
        Format("int8-channel", (values, scale((1, 0), "nk"), *of_activations)),
        Format("int8-tensor", (values, scale((0, 0), "one"), *of_activations)),
    )
