"""Routing of tokens to experts."""

import torch
from torch import Tensor

from oddrank.native.operations import compiled
from oddrank.native.router import route

_SHARED = 64
"""Tokens from which routing is shared out among threads."""


def most_probable(scores: Tensor, chosen: int) -> tuple[Tensor, Tensor]:
    """scores [tokens, experts] -> weights [tokens, chosen] in fp32 or wider, ids int64 [tokens, chosen]: the `chosen`
    most probable experts by softmax over all, and their probabilities, made to sum to one."""
    library = compiled(scores)
    if library is not None and scores.stride(-1) == 1:
        return route(library, scores, chosen, torch.get_num_threads() if len(scores) >= _SHARED else 1)
    chances = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32))
    weights, ids = chances.topk(chosen, -1)
    return weights / weights.sum(-1, keepdim=True), ids
