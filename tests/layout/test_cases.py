"""Geometries from public reports that people could not run, and what a plan says of each.

Head entries are (planned q, kv) -> (fullest rank's q, kv), as published. Every listed regrouping is among the
alternatives; the width rule is the smallest multiple of ranks x unit that covers the width.
"""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from layout.shapes import (
    Tensor,
    config,
    head_choices,
    per_rank,
    plan,
    subject,
    subject_of,
    toy_model,
    toy_table,
)

from oddrank.checkpoint.config import ConfigView
from oddrank.families import family_of
from oddrank.formats import Format, Stored, formats
from oddrank.geometry import Along, Axis, Concat, Crosstalk, Groups, Model, Pair, Role, Whole
from oddrank.layout.storage import units
from oddrank.planner import Planned, Subject
from oddrank.report import describe
from oddrank.transform.config import virtual_config

FP8 = Format(
    "fp8_128",
    stored=(
        Stored(".weight", ("F8_E4M3",)),
        Stored(".weight_scale_inv", ("BF16",), block=(128, 128), shared=True, row_fill=0x3F80, column_fill=0x3F80),
    ),
)
FP8_TABLE = {".weight": ("F8_E4M3", (1, 1)), ".weight_scale_inv": ("BF16", (128, 128))}
MXFP4 = Format(
    "mxfp4",
    stored=(
        Stored(".weight", ("U8",), block=(1, 2)),
        Stored(".weight_scale", ("U8",), block=(1, 32), shared=True, row_fill=0x7F),
    ),
)
MXFP4_TABLE = {".weight": ("U8", (1, 2)), ".weight_scale": ("U8", (1, 32))}
GPTQ = Format(
    "grouped",
    stored=(
        Stored(".qweight", ("I32",), block=(1, 8), row_fill=0x88888888, column_fill=0x88888888),
        Stored(".scales", ("F16",), block=(1, 128), shared=True, row_fill=0x3C00, column_fill=0x3C00),
    ),
    zero_word=0x88888888,
)
GPTQ_TABLE = {".qweight": ("I32", (1, 8)), ".scales": ("F16", (1, 128))}


def choices(p: Planned) -> dict[tuple[int, int], tuple[int, int]]:
    return dict(head_choices(p))


def vocab(p: Planned) -> int:
    return p.plan.layout("vocab").total()


def synthetic(monkeypatch: pytest.MonkeyPatch, fmt: Format, table: dict[str, Any], **shape: Any) -> Subject:
    monkeypatch.setitem(formats(), fmt.name, fmt)
    model = toy_model(**shape)
    s = subject_of(model, toy_table(model, table))
    assert not s.census.problems
    return s


def test_case_1_llama_33b_at_3() -> None:
    s = subject(config(q=52, kv=52, head_dim=128, mlp=17920, vocab=32000, layers=1))
    p = plan(s, 3, "vllm")
    assert choices(p) == {(54, 54): (18, 18)}
    assert per_rank(p, "mlp") == (6016,) * 3 and p.plan.layout("mlp").total() == 18048
    assert vocab(p) == 32064


def test_case_2_qwen15_32b_at_6() -> None:
    s = subject(config("qwen2", q=40, kv=8, head_dim=128, mlp=27392, vocab=152064, layers=1))
    p = plan(s, 6, "vllm")
    assert choices(p) == {(60, 12): (10, 2), (54, 18): (9, 3), (48, 24): (8, 4), (42, 42): (7, 7)}
    assert p.plan.layout("mlp").total() == 27648
    assert vocab(p) == 152064


def test_case_3_qwen2_7b_at_8() -> None:
    c = config("qwen2", q=28, kv=4, head_dim=128, mlp=18944, vocab=152064, layers=1)
    p = plan(subject(c), 8, "vllm")
    assert choices(p)[32, 8] == (4, 1)
    assert (56, 8) not in choices(p)  # plain padding, 7/1 a rank, needs no less of anything
    assert per_rank(p, "q_heads") == (4,) * 8 and per_rank(p, "kv_heads") == (1,) * 8
    # vLLM's qwen2 computes head_dim as hidden / heads: 3584 / 32 = 112
    v = virtual_config(p.plan, c)
    assert (v["num_attention_heads"], v["num_key_value_heads"], v["head_dim"]) == (32, 8, 128)
    assert v["model_type"] == "seed_oss" and v["architectures"] == ["SeedOssForCausalLM"]
    assert (v["attention_bias"], v["attention_out_bias"], v["mlp_bias"]) == (True, False, False)
    assert "head_dim" not in c  # the stock config was not touched


def test_case_4_glm_47_at_6() -> None:
    s = subject(config("qwen3", q=96, kv=8, head_dim=128, mlp=1536, vocab=151552, layers=1))
    p = plan(s, 6, "vllm")
    found = choices(p)
    assert {k: found[k] for k in ((144, 12), (108, 18), (96, 24))} == {
        (144, 12): (24, 2),
        (108, 18): (18, 3),
        (96, 24): (16, 4),
    }
    assert vocab(p) == 151680


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_case_5_qwen2_vl_72b_gptq(tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """29568 channels are 231 groups of 128: no even cut at 2, 4 or 8, and 232 groups do."""
    s = synthetic(
        monkeypatch, GPTQ, GPTQ_TABLE, followers=64, leaders=8, head_dim=128, hidden=256, widths={"mlp": 29568}
    )
    p = plan(s, tp, "vllm")
    assert p.plan.layout("mlp").total() == 29696
    assert per_rank(p, "q_heads") == (64 // tp,) * tp


def test_case_6_qwen3_30b_a3b_fp8_at_4(monkeypatch: pytest.MonkeyPatch) -> None:
    s = synthetic(monkeypatch, FP8, FP8_TABLE, followers=32, leaders=4, head_dim=128, hidden=256, widths={"moe": 768})
    p = plan(s, 4, "vllm")
    assert (per_rank(p, "q_heads"), per_rank(p, "kv_heads")) == ((8,) * 4, (1,) * 4)
    assert per_rank(p, "moe") == (256,) * 4 and p.plan.layout("moe").total() == 1024


def test_case_7_minimax_m2_at_3(monkeypatch: pytest.MonkeyPatch) -> None:
    """A norm across all heads: dummies are refused for vLLM, equal copies are not; the runtime reduces it."""
    norms = tuple(
        Crosstalk(a, "rms_norm", f"layers.*.self_attn.{n}") for a, n in (("q_heads", "q_norm"), ("kv_heads", "k_norm"))
    )
    shape: dict[str, Any] = {"followers": 48, "leaders": 8, "head_dim": 128, "hidden": 256, "widths": {"moe": 1536}}
    s = synthetic(monkeypatch, FP8, FP8_TABLE, **shape, crosstalk=norms)
    with pytest.raises(Exception, match=r"no crosstalk: layers.\*.self_attn.q_norm computes rms_norm across all 48"):
        plan(s, 3, "vllm", "pad")
    p = plan(s, 3, "vllm", constraints={"gqa": 2})
    assert (per_rank(p, "q_heads"), per_rank(p, "kv_heads")) == ((16,) * 3, (8,) * 3)
    p = plan(s, 3)
    ragged = next(c.candidate for group in p.solution.choices for c in group if c.candidate.kind == "ragged")
    assert [la.counts() for la in ragged.layouts] == [(16, 16, 16), (3, 4, 3)]  # 16 heads from 16 on touch four
    assert (48, 8) in choices(p)  # or whole KV groups, 18/3, 18/3 and 12/2: less KV cache on the fullest rank
    assert per_rank(p, "moe") == (512,) * 3
    assert all(c.ok for c in p.checks)


def gdn_model(k: int, v: int, q: int, kv: int, widths: dict[str, int], hidden: int = 256) -> Model:
    """Attention heads and a gated delta net's key and value heads, packed as published: in_proj_qkv = q|k|v,
    in_proj_z, a and b per value head, a convolution over q|k|v, out_proj."""
    base = toy_model(followers=q, leaders=kv, head_dim=256, hidden=hidden, widths=widths)
    index = (("layer", (0,)),)
    at = "layers.{layer}.linear_attn"
    wide, keys, values = Whole(hidden), Along("gdn_k_heads", 128), Along("gdn_v_heads", 128)
    mixed = Concat((keys, keys, values))
    per_head = Along("gdn_v_heads")
    return msgspec.structs.replace(
        base,
        axes=(*base.axes, Axis("gdn_v_heads", v, "heads"), Axis("gdn_k_heads", k, "heads", summed=False)),
        pairs=(*base.pairs, Pair("gdn_v_heads", "gdn_k_heads")),
        roles=(
            *base.roles,
            Role(f"{at}.in_proj_qkv.weight", (mixed, wide), "column", index, matrix=True),
            Role(f"{at}.in_proj_z.weight", (values, wide), "column", index, matrix=True),
            Role(f"{at}.in_proj_a.weight", (per_head, wide), "column", index),
            Role(f"{at}.conv1d.weight", (mixed, Whole(1), Whole(4)), "column", index),
            Role(f"{at}.A_log", (per_head,), "column", index),
            Role(f"{at}.out_proj.weight", (wide, values), "row", index, matrix=True),
        ),
    )


def gdn_subject(model: Model, table: dict[str, Any]) -> Subject:
    """Matrices in the given format, everything else dense."""
    tensors = toy_table(model, table)
    s = subject_of(model, tensors)
    assert not s.census.problems, s.census.problems
    return s


def test_case_8_qwen36_35b_a3b_fp8_at_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(formats(), "fp8_128", FP8)
    s = gdn_subject(gdn_model(16, 32, 16, 2, {"moe": 512, "shared": 512}), FP8_TABLE)
    p = plan(s, 3, "vllm")
    assert choices(p)[24, 3] == (8, 1) and choices(p)[18, 6] == (6, 2)
    gdn = dict(head_choices(p, "gdn_v_heads"))
    assert gdn == {(36, 18): (12, 6), (33, 33): (11, 11)}
    assert p.plan.layout("moe").total() == p.plan.layout("shared").total() == 768
    assert all(c.ok for c in p.checks)


def test_case_9_qwen36_35b_a3b_fp8_at_8(monkeypatch: pytest.MonkeyPatch) -> None:
    """The engine copies 2 KV heads on 8 ranks itself; GDN divides; widths of four blocks do not."""
    monkeypatch.setitem(formats(), "fp8_128", FP8)
    s = gdn_subject(gdn_model(16, 32, 16, 2, {"moe": 512, "shared": 512}), FP8_TABLE)
    p = plan(s, 8, "vllm")
    assert (per_rank(p, "q_heads"), per_rank(p, "kv_heads")) == ((2,) * 8, (1,) * 8)
    assert (per_rank(p, "gdn_v_heads"), per_rank(p, "gdn_k_heads")) == ((4,) * 8, (2,) * 8)
    assert p.plan.layout("moe").total() == p.plan.layout("shared").total() == 1024


def test_case_10_gpt_oss_20b_at_3(monkeypatch: pytest.MonkeyPatch) -> None:
    s = synthetic(
        monkeypatch, MXFP4, MXFP4_TABLE, followers=64, leaders=8, head_dim=64, hidden=128, widths={"moe": 2880}
    )
    p = plan(s, 3, "vllm")
    assert choices(p)[72, 9] == (24, 3) and choices(p)[66, 33] == (22, 11)
    assert per_rank(p, "moe") == (960,) * 3 and p.plan.layout("moe").total() == 2880  # 90 groups of 32


@pytest.mark.parametrize(("moe", "planned"), [(2048, 2304)])
def test_case_11_deepseek_v3_fp8_at_6(moe: int, planned: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """128 MLA heads are a single axis: 128 rows each, whole blocks."""
    s = synthetic(
        monkeypatch,
        FP8,
        FP8_TABLE,
        followers=128,
        leaders=128,
        head_dim=128,
        hidden=128,
        widths={"mlp": 18432, "moe": moe, "shared": moe},
    )
    p = plan(s, 6, "vllm")
    assert per_rank(p, "q_heads") == (22,) * 6 and p.plan.layout("q_heads").total() == 132
    assert [p.plan.layout(a).total() for a in ("mlp", "moe", "shared")] == [18432, planned, planned]


def test_case_12_smollm2_at_2() -> None:
    s = subject(config(q=9, kv=3, head_dim=64, mlp=1536, vocab=49152, layers=1, tied=True))
    p = plan(s, 2, "vllm")
    assert choices(p) == {(12, 4): (6, 2), (10, 10): (5, 5)}
    assert per_rank(p, "mlp") == (768, 768) and vocab(p) == 49152
    runtime = plan(s, 2)
    assert runtime.plan.kind == "ragged"
    assert choices(runtime) == {(9, 4): (5, 2), (9, 3): (6, 2)}  # ragged, and whole KV groups 2 and 1
    groups = next(c.candidate for group in runtime.solution.choices for c in group if c.candidate.kind == "groups")
    assert [la.counts() for la in groups.layouts] == [(6, 3), (2, 1)]


def test_case_13_qwen38_27b_mxfp4_at_3(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(formats(), "mxfp4", MXFP4)
    s = gdn_subject(gdn_model(16, 48, 24, 4, {"mlp": 17408}), MXFP4_TABLE)
    p = plan(s, 3, "vllm")
    found = choices(p)
    assert {k: found[k] for k in ((36, 6), (27, 9), (24, 12))} == {(36, 6): (12, 2), (27, 9): (9, 3), (24, 12): (8, 4)}
    gdn = dict(head_choices(p, "gdn_v_heads"))
    assert gdn[54, 18] == (18, 6) and gdn[48, 48] == (16, 16)
    assert p.plan.layout("mlp").total() == 17472
    # the geometry known to serve: plain padding of both pairs
    served = plan(s, 3, "vllm", "pad")
    assert [per_rank(served, a)[0] for a in ("q_heads", "kv_heads", "gdn_v_heads", "gdn_k_heads")] == [12, 2, 18, 6]
    dense = plan(subject(config(q=24, kv=4, head_dim=256, mlp=17408, vocab=248320, layers=1)), 3, "vllm")
    assert vocab(dense) == 248448


def test_case_14_dflash2_drafter_fp8_at_3(monkeypatch: pytest.MonkeyPatch) -> None:
    shape: dict[str, Any] = {"followers": 32, "leaders": 8, "head_dim": 128, "hidden": 128, "widths": {"mlp": 17408}}
    s = synthetic(monkeypatch, FP8, FP8_TABLE, **shape)
    target = 2 * 256 * 2 * 2  # 36/6 at 3: two KV heads x 256, keys and values in bf16
    p = plan(s, 3, "vllm", constraints={"kv_bytes": target, "gqa": 4})
    assert (p.plan.layout("q_heads").total(), p.plan.layout("kv_heads").total()) == (48, 12)
    assert (per_rank(p, "q_heads"), per_rank(p, "kv_heads")) == ((16,) * 3, (4,) * 3)
    assert p.plan.layout("mlp").total() == 17664
    alone = plan(s, 3, "vllm", "pad")
    assert (alone.plan.layout("q_heads").total(), alone.plan.layout("kv_heads").total()) == (36, 9)


def test_case_15_kimi_k2_fp8_at_6(monkeypatch: pytest.MonkeyPatch) -> None:
    """192 rows a head are one and a half blocks: 66 heads are 11 a rank, 16.5 blocks; 72 are 12."""
    s = synthetic(monkeypatch, FP8, FP8_TABLE, followers=64, leaders=64, head_dim=192, hidden=128, widths={"moe": 2048})
    assert units(s.model, s.census.uses)["q_heads"] == 2
    p = plan(s, 6, "vllm")
    assert per_rank(p, "q_heads") == (12,) * 6
    assert p.plan.layout("moe").total() == 2304
    # the runtime refines the scales: a head is three whole blocks of 64
    runtime = plan(s, 6)
    assert sorted(per_rank(runtime, "q_heads")) == [10, 10, 11, 11, 11, 11]
    assert dict(runtime.plan.refined)["q_heads"] == 64
    assert all(c.ok for c in runtime.checks)


def test_case_16_deepseek_coder_v2_lite_at_2(monkeypatch: pytest.MonkeyPatch) -> None:
    """10944 = 85.5 blocks of 128: the last source block is short."""
    s = synthetic(
        monkeypatch, FP8, FP8_TABLE, followers=16, leaders=16, head_dim=128, hidden=128, widths={"mlp": 10944}
    )
    p = plan(s, 2, "vllm")
    assert p.plan.layout("mlp").total() == 11008
    assert p.plan.layout("mlp").real() == (5504, 5440)
    runtime = plan(s, 2)
    assert per_rank(runtime, "mlp") == (5504, 5440)  # no dummies: the last block stays short
    assert all(c.ok for c in (*p.checks, *runtime.checks))


@pytest.mark.parametrize(
    ("q", "kv", "tp", "q_rank", "kv_rank"),
    [
        (24, 4, 3, {8}, {2}),
        (9, 3, 2, {5, 4}, {2}),
        (40, 10, 4, {10}, {3}),
        (28, 4, 8, {3, 4}, {1, 2}),
    ],
)
def test_case_17_ragged(q: int, kv: int, tp: int, q_rank: set[int], kv_rank: set[int]) -> None:
    p = plan(subject(config(q=q, kv=kv, head_dim=64, mlp=1024, vocab=1000, layers=1)), tp)
    assert set(per_rank(p, "q_heads")) == q_rank
    assert set(per_rank(p, "kv_heads")) <= kv_rank
    assert p.plan.layout("q_heads").total() == q
    assert p.plan.kind == "ragged"


@pytest.mark.parametrize("executor", ["vllm", "runtime"])
def test_case_18_experts_are_cut_inside_and_the_router_is_whole(executor: str) -> None:
    model = toy_model(followers=24, leaders=4, widths={"moe": 1536}, experts=256)
    s = subject_of(model, toy_table(model))
    p = plan(s, 3, executor)
    assert per_rank(p, "experts") == (256,) * 3
    assert [p.plan.layout("experts").slots(r).tolist() for r in range(3)] == [list(range(256))] * 3
    assert per_rank(p, "moe") == (512,) * 3


def test_interleaved_gdn_projection_is_cut_by_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Qwen3-Next's in_proj_qkvz, [q, k, r v, r z] per key head: equal ranks only."""
    model = gdn_model(16, 32, 16, 2, {"moe": 512})
    k, v = Along("gdn_k_heads", 128), Along("gdn_v_heads", 128)
    packed = Role(
        "layers.0.linear_attn.in_proj_qkvz.weight",
        (Groups("gdn_k_heads", (k, k, v, v)), Whole(256)),
        "column",
        matrix=True,
    )
    model = msgspec.structs.replace(model, roles=(*model.roles, packed))
    s = subject_of(model, toy_table(model))
    assert all(c.ok for c in plan(s, 3, "vllm").checks)


def test_idle_ranks_are_reported() -> None:
    """24/4 padded at 3 ranks: the last holds no real head (trap 10b), and the plan says so."""
    s = subject(config(q=24, kv=4, head_dim=256, mlp=17408, vocab=248320, layers=1))
    p = plan(s, 3, "vllm", "pad")
    assert p.plan.layout("q_heads").real() == (12, 12, 0)
    assert describe(p.solution, p.census, p.checks)["idle_ranks"] == [2]
    p = plan(s, 3, "vllm", "replicate")
    assert describe(p.solution, p.census, p.checks)["idle_ranks"] == []


def test_a_checkpoint_s_own_prefix() -> None:
    """Tensors without the usual `model.` in front."""
    c = config(q=9, kv=3, layers=1)
    model = family_of(ConfigView(c)).build(ConfigView(c), "")
    table = {"embed_tokens.weight": Tensor("BF16", (96, 72))}
    assert any(r.name == "embed_tokens.weight" for r in model.roles)
    assert "embed_tokens.weight" not in {p.split()[0] for p in subject_of(model, table).census.problems}
