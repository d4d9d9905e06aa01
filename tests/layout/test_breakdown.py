"""Where a plan's bytes go, against sums by hand and against the slices that ranks really get."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli.test_cli import write_model
from layout.shapes import config, plan, subject

from oddrank import Checkpoint, rank_slice
from oddrank.layout.breakdown import bytes_by_part, dummy_bytes, held, parts
from oddrank.layout.plan import Plan
from oddrank.planner import make_plan, study
from oddrank.synth import describe_release, write_headers

HEAD, ROW, NORM = 4 * 36 * 4, 36 * 4, 36 * 4
"""Bytes of write_model's: a head of one projection, a channel of one projection or a vocabulary row, a norm."""


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("breakdown") / "tiny")


def by_name(plan: Plan) -> dict[str, tuple[int, tuple[int, ...]]]:
    return {part.name: (part.stock, part.per_rank) for part in bytes_by_part(plan)}


def test_parts_of_a_ragged_plan(tiny: Path) -> None:
    made = make_plan(tiny, 2).plan  # 5 query heads with 2 KV heads, 4 with 2; two layers; tied
    found = by_name(made)
    assert found["attention"] == (2 * 24 * HEAD, (2 * (2 * 5 + 2 * 2) * HEAD, 2 * (2 * 4 + 2 * 2) * HEAD))
    assert found["norms"] == (5 * NORM, (5 * NORM, 5 * NORM))
    assert found["mlp"][0] == 2 * 3 * 24 * ROW and sum(found["mlp"][1]) == found["mlp"][0]
    assert found["vocab"][0] == 40 * ROW and sum(found["vocab"][1]) == found["vocab"][0]
    assert set(found) == {"attention", "norms", "mlp", "vocab"}
    why = held(made)
    assert why.stock == sum(stock for stock, _ in found.values())
    assert (why.finer, why.whole, why.copies, why.dummies) == (0, 5 * NORM, 2 * 2 * HEAD, 0)


def test_dummies_of_a_padded_plan(tiny: Path) -> None:
    made = make_plan(tiny, 2, executor="vllm", layout="pad").plan  # 12 / 4 heads, 64 vocabulary rows
    why = held(made)
    heads, rows = 2 * (2 * 3 + 2 * 1) * HEAD, 24 * ROW
    assert (why.finer, why.whole, why.copies, why.dummies) == (0, 5 * NORM, 0, heads + rows)
    assert dummy_bytes(made) == (0, heads + rows)  # the last rank has them all


def test_copies_that_the_engine_makes() -> None:
    made = plan(subject(config(q=8, kv=2, head_dim=8, mlp=64, vocab=128)), 4, "vllm").plan
    assert made.layout("kv_heads").in_engine
    # k and v of 2 KV heads held twice: 2 layers, 8 x 64 in bf16
    assert held(made).copies == 2 * 2 * 2 * 8 * 64 * 2 and held(made).dummies == 0


def test_the_sum_is_what_all_ranks_get(tiny: Path) -> None:
    checkpoint = Checkpoint.open(tiny)
    for tp in (2, 4):
        made = make_plan(tiny, tp).plan
        loaded = [rank_slice(made, rank, checkpoint).nbytes() for rank in range(tp)]
        assert [sum(part.per_rank[rank] for part in bytes_by_part(made)) for rank in range(tp)] == loaded
        assert held(made).total == sum(loaded)


def test_finer_scales_of_experts(tmp_path: Path) -> None:
    at = write_headers(describe_release("qwen3_5_moe", "fp8-block", layers=4, experts=4, vocab=1024), tmp_path / "moe")
    made = make_plan(at, 2, constraints={"block": 64}).plan
    found = held(made)
    scales = sum(
        tensor.end - tensor.start for name, tensor in Checkpoint.open(at).tensors.items() if "scale_inv" in name
    )
    assert found.finer == 3 * scales  # four scales in place of one
    assert found.total == sum(sum(part.per_rank) for part in bytes_by_part(made)) and found.dummies == 0


PARTS = {
    "embed_tokens": "vocab", "lm_head": "vocab", "self_attn.q_proj": "attention", "self_attn.k_norm": "attention",
    "linear_attn.in_proj_qkv": "linear attention", "linear_attn.A_log": "linear attention",
    "linear_attn.norm": "linear attention", "mlp.gate": "experts", "mlp.experts.gate_up_proj": "experts",
    "mlp.experts.{expert}.down_proj": "experts", "mlp.shared_expert.up_proj": "shared",
    "input_layernorm": "norms", "language_model.norm": "norms", "mtp.fc": "MTP",
    "visual.blocks.{block}.attn.qkv": "vision", "visual.merger.norm": "vision",
}  # fmt: skip


def test_what_a_tensor_is_part_of(tmp_path: Path) -> None:
    release = describe_release("qwen3_5_moe", "bf16", layers=4, experts=4, vocab=1024, vision=True)
    model = study(Checkpoint.open(write_headers(release, tmp_path / "moe"))).model
    found = dict(zip((role.name.removesuffix(".weight") for role in model.roles), parts(model), strict=True))
    for end, part in PARTS.items():
        names = [name for name in found if name == end or name.endswith(f".{end}") if not name.startswith("mtp.layers")]
        assert names and {found[name] for name in names} == {part}, end
