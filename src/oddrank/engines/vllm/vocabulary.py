"""Vocabulary rows in vLLM's own buffers: padded to a multiple that the ranks divide.

vLLM pads the vocabulary to a multiple of 64 and then wants it divided by the ranks. The multiple becomes the least
common one of the caller's and 64 x TP, so LoRA's 256 still divides. The tensors and `vocab_size` stay stock, and vLLM
cuts the padding off the logits itself.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

from vllm.distributed import get_tensor_model_parallel_world_size
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
    pad_vocab_size,
)

ROWS = 64


def padding_for(rows: int, total: int, padding: int, ranks: int) -> int:
    """The multiple to pad to: `padding` itself where stock vLLM's arithmetic divides, else one that does.

    rows: the trained vocabulary. total: with rows that adapters add. padding: the caller's multiple.
    """
    padded = pad_vocab_size(pad_vocab_size(rows, padding) + total - rows, padding)
    if padded % ranks == 0 and pad_vocab_size(rows, padding) % ranks == 0:
        return padding
    return math.lcm(padding, ROWS * ranks)


def _padded(signature: inspect.Signature, layer: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    bound = signature.bind(layer, *args, **kwargs)
    bound.apply_defaults()
    given = bound.arguments
    if given.get("disable_tp"):
        return bound
    group = given.get("parallel_group")
    ranks = get_tensor_model_parallel_world_size() if group is None else group.world_size
    total = given["num_embeddings"]
    given["padding_size"] = padding_for(given["org_num_embeddings"] or total, total, given["padding_size"], ranks)
    return bound


class PaddedVocabEmbedding(VocabParallelEmbedding):  # type: ignore[misc]
    """VocabParallelEmbedding at any TP size."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound = _padded(_EMBEDDING, self, args, kwargs)
        super().__init__(*bound.args[1:], **bound.kwargs)


class PaddedLMHead(ParallelLMHead):  # type: ignore[misc]
    """ParallelLMHead at any TP size."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound = _padded(_HEAD, self, args, kwargs)
        super().__init__(*bound.args[1:], **bound.kwargs)


_EMBEDDING = inspect.signature(VocabParallelEmbedding.__init__)
_HEAD = inspect.signature(ParallelLMHead.__init__)
