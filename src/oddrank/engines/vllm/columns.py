"""Column-parallel layers whose output is gathered: replicated where the ranks do not divide it.

vLLM cuts the layer that joins an MTP head's two inputs along the residual width and gathers the result. The residual
width is never padded (its norm divides by it), so at other sizes every rank computes the whole of it; the sum is the
same, and nothing is left to gather.
"""

from __future__ import annotations

import inspect
from typing import Any

from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.linear import ColumnParallelLinear


class WholeColumnLinear(ColumnParallelLinear):  # type: ignore[misc]
    """ColumnParallelLinear at any TP size where its output is gathered."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound = _SIGNATURE.bind(self, *args, **kwargs)
        bound.apply_defaults()
        given = bound.arguments
        ranks = given["tp_size"] or get_tensor_model_parallel_world_size()
        if given["gather_output"] and given["output_size"] % ranks:
            given["disable_tp"] = True
        super().__init__(*bound.args[1:], **bound.kwargs)


_SIGNATURE = inspect.signature(ColumnParallelLinear.__init__)
