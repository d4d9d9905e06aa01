"""Which experts a token goes to."""

import ctypes

import torch
from torch import Tensor

from oddrank.native.calls import call
from oddrank.native.compiled import Library
from oddrank.native.operations import INT, fields


class RouterArguments(ctypes.Structure):
    """router.cpp's."""

    _fields_ = fields("scores ids weights", "tokens experts chosen scores_row", ("threads", INT))


def route(library: Library, scores: Tensor, chosen: int, threads: int = 1) -> tuple[Tensor, Tensor]:
    """scores: fp32 [tokens, experts] -> weights fp32 [tokens, chosen], ids int64 [tokens, chosen]: the experts most
    probable by softmax, the most probable first, of equals the lower number, with their probabilities made to sum to
    one. A token's ids are all different, whatever its scores."""
    tokens, experts = scores.shape
    weights, ids = torch.empty(tokens, chosen), torch.empty(tokens, chosen, dtype=torch.int64)
    arguments = RouterArguments(
        scores.data_ptr(), ids.data_ptr(), weights.data_ptr(), tokens, experts, chosen, scores.stride(0), threads
    )
    call(library.operation("router"), arguments, scores, ids, weights)
    return weights, ids
