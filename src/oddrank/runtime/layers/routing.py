"""Routing of tokens to experts."""

import torch
from torch import Tensor

from oddrank.native.operations import compiled
from oddrank.native.router import route

_SHARED = 64
"""Tokens from which routing is shared out among threads."""


def most_probable(scores: Tensor, chosen: int, *, normed: bool = True) -> tuple[Tensor, Tensor]:
    """scores [tokens, experts] -> weights [tokens, chosen] in fp32 or wider, ids int64 [tokens, chosen]: the `chosen`
    most probable experts by softmax over all, and their probabilities, which where `normed` are made to sum to one."""
    library = compiled(scores) if normed else None
    if library is not None and scores.stride(-1) == 1:
        return route(library, scores, chosen, torch.get_num_threads() if len(scores) >= _SHARED else 1)
    chances = torch.softmax(scores, -1, dtype=torch.promote_types(scores.dtype, torch.float32))
    weights, ids = chances.topk(chosen, -1)
    return weights / weights.sum(-1, keepdim=True) if normed else weights, ids


def best_of_groups(
    scores: Tensor, chosen: int, *, correction: Tensor, groups: int, kept: int, normed: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """scores [tokens, experts] in fp32 or wider -> weights [tokens, chosen], ids int64 [tokens, chosen], by DeepSeek-V3
    (2024, arXiv 2412.19437, section 2.1.2).

    Experts are chosen by sigmoid(score) + correction [experts], inside the `kept` of `groups` whose two best add up to
    most; weights are sigmoid(score), where `normed` made to sum to one, times `scale`.
    """
    chances = torch.sigmoid(scores)
    worth = chances + correction
    if kept < groups:
        grouped = worth.view(len(worth), groups, -1)
        best = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1).topk(kept, -1).indices
        out = torch.ones(grouped.shape[:-1], dtype=torch.bool, device=worth.device).scatter_(1, best, False)
        worth = grouped.masked_fill(out[..., None], float("-inf")).flatten(1)
    ids = worth.topk(chosen, -1).indices
    weights = chances.gather(-1, ids)
    return (weights / (weights.sum(-1, keepdim=True) + 1e-20) if normed else weights) * scale, ids
