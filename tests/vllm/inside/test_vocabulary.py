"""The vocabulary in vLLM's own buffers: any TP size divides it, nothing moves where stock vLLM's rule already does."""

import math
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import Places
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed.utils import divide
from vllm.model_executor.layers import vocab_parallel_embedding as stock_layers
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
    pad_vocab_size,
)

from oddrank.engines.vllm import vocabulary

ROWS = [1, 2, 31, 63, 64, 65, 128, 191, 192, 193, 255, 256, 257, 1000, 32000, 49152, 50257, 128256, 151936, 248320]
RANKS = range(1, 17)


def divides(rows: int, added: int, padding: int, ranks: int) -> bool:
    """What VocabParallelEmbedding.__init__ computes: does each of its divisions by the ranks come out whole?"""
    trained = pad_vocab_size(rows, padding)
    try:
        divide(pad_vocab_size(trained + added, padding), ranks)
        divide(trained, ranks)
    except AssertionError:
        return False
    return True


@pytest.mark.parametrize("padding", [1, 8, 64, 128, 256])
@pytest.mark.parametrize("added", [0, 1, 16, 300])
def test_every_size_divides_and_keeps_the_callers_multiple(padding: int, added: int) -> None:
    kept = 0
    for rows in ROWS:
        for ranks in RANKS:
            chosen = vocabulary.padding_for(rows, rows + added, padding, ranks)
            assert divides(rows, added, chosen, ranks), (rows, ranks, chosen)
            assert chosen % padding == 0, (rows, ranks, chosen)
            if divides(rows, added, padding, ranks):
                kept += 1
                assert chosen == padding, (rows, ranks, chosen)
            else:
                assert chosen == math.lcm(padding, 64 * ranks), (rows, ranks, chosen)
    assert 0 < kept < len(ROWS) * len(RANKS)


@pytest.fixture
def in_a_serve() -> Iterator[None]:
    with set_current_vllm_config(VllmConfig()):
        yield


def built(monkeypatch: pytest.MonkeyPatch, layer: type, rank: int, ranks: int, rows: int, **given: Any) -> Any:
    for module in (stock_layers, vocabulary):
        monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: ranks)
    monkeypatch.setattr(stock_layers, "get_tensor_model_parallel_rank", lambda: rank)
    return layer(rows, 8, params_dtype=torch.float32, **given)


@pytest.mark.parametrize("layer", [VocabParallelEmbedding, ParallelLMHead])
@pytest.mark.parametrize(("rows", "ranks"), [(1000, 3), (151936, 6), (49152, 5), (65, 7)])
def test_every_row_lies_on_one_rank(
    planned: Places, in_a_serve: None, monkeypatch: pytest.MonkeyPatch, layer: type, rows: int, ranks: int
) -> None:
    weight = torch.arange(rows * 8, dtype=torch.float32).reshape(rows, 8)
    at = 0
    for rank in range(ranks):
        part = built(monkeypatch, layer, rank, ranks, rows)
        part.weight_loader(part.weight, weight)
        held = part.shard_indices
        assert held.org_vocab_start_index == at
        at = held.org_vocab_end_index
        assert torch.equal(part.weight[: at - held.org_vocab_start_index], weight[held.org_vocab_start_index : at])
        assert not part.weight[at - held.org_vocab_start_index :].any()
        assert part.num_embeddings == rows and part.org_vocab_size == rows
    assert at == rows


@pytest.mark.parametrize("layer", [VocabParallelEmbedding, ParallelLMHead])
def test_the_same_layer_is_refused_by_stock_vllm(
    stock: Places, in_a_serve: None, monkeypatch: pytest.MonkeyPatch, layer: type
) -> None:
    with pytest.raises(AssertionError, match="not divisible"):
        built(monkeypatch, layer, 0, 3, 1000)


def test_an_explicit_group_decides(planned: Places, in_a_serve: None, monkeypatch: pytest.MonkeyPatch) -> None:
    group = SimpleNamespace(rank_in_group=1, world_size=3)
    layer = built(monkeypatch, VocabParallelEmbedding, 0, 1, 1000, parallel_group=group)
    assert layer.tp_size == 3 and layer.num_embeddings_padded == 1152  # 1000 up to 192 x 6
    alone = built(monkeypatch, VocabParallelEmbedding, 1, 3, 1000, disable_tp=True)
    assert alone.tp_size == 1 and alone.num_embeddings_padded == 1024


def test_adapters_rows_still_divide(planned: Places, in_a_serve: None, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = built(monkeypatch, ParallelLMHead, 2, 3, 1010, org_num_embeddings=1000, padding_size=256)
    assert (layer.org_vocab_size, layer.org_vocab_size_padded) == (1000, 1536)
    assert layer.num_embeddings_padded == 2304 and layer.padding_size == 768
