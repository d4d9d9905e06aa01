"""What runs on CUDA GPUs only: Triton kernels for stored matrices and experts, attention and the gated delta rule by
libraries where they are installed, and decoding captured in CUDA graphs.

The runtime imports this package when a rank's device is a GPU, and asks it what it can compute faster than torch does:
`linear_for` and `experts_for`. Both answer None, and say so once, where Triton is missing; torch's decoders, which are
also the reference of every kernel, compute then. See docs/gpu.md.
"""

import logging
from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING

from torch import Tensor

from oddrank.runtime.formats import Decoder

if TYPE_CHECKING:
    from oddrank.gpu.experts import GpuExperts
    from oddrank.gpu.linear import GpuLinear

log = logging.getLogger(__name__)

Stored = Mapping[str, Tensor]


@cache
def triton_works() -> bool:
    """Whether Triton is here; told once where it is not."""
    try:
        import triton  # noqa: F401
    except ImportError as error:
        log.warning("Triton is missing, torch decodes stored weights on the GPU instead, more slowly (%s)", error)
        return False
    return True


def linear_for(decoder: Decoder, stored: Stored) -> "GpuLinear | None":
    """The kernels' product with a stored matrix [n, k] on a GPU; None where they do not take it."""
    if not triton_works():
        return None
    from oddrank.gpu.check import works
    from oddrank.gpu.linear import GpuLinear
    from oddrank.gpu.matrix import described

    matrix = described(decoder, stored)
    return GpuLinear(matrix) if matrix is not None and works(decoder, matrix.values.device) else None


def experts_for(
    gate_up: tuple[Decoder, Stored], down: tuple[Decoder, Stored], activation: Callable[[Tensor], Tensor]
) -> "GpuExperts | None":
    """The kernels' experts of a layer whose banks [experts, sections, ...] are on a GPU; None where they do not take
    them, or where the activation is not silu."""
    if not triton_works():
        return None
    from oddrank.gpu.check import works
    from oddrank.gpu.experts import gpu_experts

    found = gpu_experts(gate_up, down, activation)
    device = gate_up[1][gate_up[0].values].device
    return found if found is not None and all(works(d, device) for d, _ in (gate_up, down)) else None
