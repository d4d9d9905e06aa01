"""The gated delta rule on a GPU by flash-linear-attention where it is installed: the same as layers/gated_delta.py.

Its chunks take half-precision inputs alone; the state stays fp32 as ours. Queries come scaled already.
"""

import logging
from functools import cache
from typing import Any

import torch
from torch import Tensor

from oddrank.runtime.step import Step

_HALF = (torch.bfloat16, torch.float16)
_WIDEST = 256
"""Channels of a key that the library's kernels take at most."""

log = logging.getLogger(__name__)


@cache
def library() -> Any:
    """Its module of the gated delta rule, or None."""
    try:
        import fla.ops.gated_delta_rule as found
    except ImportError:
        log.info("flash-linear-attention is not installed; torch computes gated delta nets on the GPU")
        return None
    return found


def read(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, step: Step, memory: Tensor, dtype: torch.dtype
) -> Tensor | None:
    """The step's tokens, laid end to end: what they read of the memory [slots, heads, key width, value width], which
    goes on in place. None where the library is missing or does not take this.

    q, k [tokens, heads, key width], v [tokens, heads, value width], g, beta [tokens, heads]; all in fp32. dtype: of the
    activations. Returns [tokens, heads, value width] in fp32.
    """
    found = library()
    if found is None or dtype not in _HALF or memory.dtype != torch.float32 or q.shape[-1] > _WIDEST:
        return None
    if step.decode:
        n = len(q)
        out, state = found.fused_recurrent_gated_delta_rule(
            *(t.unsqueeze(1) for t in (q, k, v)), g=g.unsqueeze(1), beta=beta.unsqueeze(1), scale=1.0,
            initial_state=memory[:n], output_final_state=True,
        )  # fmt: skip
        memory[:n] = state
        return torch.as_tensor(out).squeeze(1).float()
    slots = torch.tensor([s.slot for s in step.segments], device=memory.device)
    ends = torch.tensor([0, *(s.stop for s in step.segments)], device=memory.device)
    out, state = found.chunk_gated_delta_rule(
        *(t.to(dtype).unsqueeze(0) for t in (q, k, v)), g=g.unsqueeze(0), beta=beta.unsqueeze(0), scale=1.0,
        initial_state=memory.index_select(0, slots), output_final_state=True, cu_seqlens=ends,
    )  # fmt: skip
    memory.index_copy_(0, slots, state)
    return torch.as_tensor(out).squeeze(0).float()
