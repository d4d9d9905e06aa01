"""Bytes and multiply-adds against published sizes and sums made another way."""

from __future__ import annotations

import math

import pytest
from layout.shapes import VARIANTS, config, per_rank, plan, subject, tensor_table

from oddrank.layout.cost import macs, weight_bytes
from oddrank.report import describe
from oddrank.transform.slice import RankSlice


def smollm2() -> dict[str, object]:
    return config(q=9, kv=3, head_dim=64, mlp=1536, vocab=49152, layers=30, tied=True)


def report(c: dict[str, object], tp: int, executor: str = "runtime", layout: str = "auto") -> dict[str, object]:
    p = plan(subject(c), tp, executor, layout)
    return describe(p.solution, p.census, p.checks)


def test_smollm2_135m_is_134_515_008_parameters() -> None:
    s = subject(smollm2())
    assert weight_bytes(s.model, s.census.uses, s.model.stock()) == 2 * 134_515_008
    d = report(smollm2(), 1)
    told = {key: d["bytes"][key] for key in ("stock", "per_rank", "overhead")}  # type: ignore[index]
    assert told == {"stock": 269_030_016, "per_rank": [269_030_016], "overhead": 0.0}
    assert d["kv"]["stock_bytes_per_token"] == 30 * 3 * 64 * 2 * 2  # type: ignore[index]
    # every linear layer once, the tied head too: all parameters but the norms; nothing for attention at no context
    assert macs(s.model, s.model.stock(), 0) == 134_515_008 - 61 * 576
    assert macs(s.model, s.model.stock(), 100) - macs(s.model, s.model.stock(), 0) == 100 * 30 * 9 * 64 * 2


def test_qwen38_27b_kv_cache_is_65_536_bytes_a_token() -> None:
    """16 full-attention layers, 4 KV heads x 256, bf16."""
    c = config(q=24, kv=4, head_dim=256, mlp=64, layers=16)
    assert report(c, 1)["kv"]["stock_bytes_per_token"] == 65_536  # type: ignore[index]


@pytest.mark.parametrize("executor", ["runtime", "vllm"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_reported_bytes_are_what_the_slices_hold(variant: str, executor: str) -> None:
    c = config(variant, q=9, kv=3, mlp=100, vocab=200)
    for tp in (1, 2, 3, 4, 5):
        p = plan(subject(c), tp, executor)
        d = describe(p.solution, p.census, p.checks)
        assert d["bytes"]["per_rank"] == [RankSlice(p.plan, None, r).nbytes() for r in range(tp)]
        assert d["bytes"]["stock"] == sum(2 * math.prod(t.shape) for t in tensor_table(c).values())
        assert d["kv"]["per_rank_bytes_per_token"] == [2 * n * 2 * 8 * 2 for n in per_rank(p, "kv_heads")]
        most = max(d["bytes"]["per_rank"])
        assert d["bytes"]["overhead"] == pytest.approx(most * tp / d["bytes"]["stock"] - 1)


def test_changed_tensors() -> None:
    """9/3 at 2 ranks in vLLM: q, k, v and o change in every layer; at 3 nothing does; a runtime rewrites nothing."""
    c = config(q=9, kv=3, mlp=96, vocab=384)
    assert report(c, 2, "vllm")["tensors"] == {"total": len(tensor_table(c)), "changed": 8, "unmatched": 0}
    assert report(c, 3, "vllm")["tensors"]["changed"] == 0  # type: ignore[index]
    assert report(c, 2)["tensors"]["changed"] == 0  # type: ignore[index]


def test_the_longer_the_context_the_less_kv_is_copied() -> None:
    """24/4 at 3 ranks: without context the fewest weights win, with a long one the smallest KV cache."""
    c = config(q=24, kv=4, head_dim=256, hidden=5120 // 5 * 3, mlp=17408, vocab=248320, layers=1)
    s = subject(c)
    short, long = plan(s, 3, "vllm", context=0), plan(s, 3, "vllm", context=1_000_000)
    assert per_rank(short, "kv_heads")[0] > per_rank(long, "kv_heads")[0] == 2
    assert per_rank(short, "q_heads")[0] < per_rank(long, "q_heads")[0] == 12
