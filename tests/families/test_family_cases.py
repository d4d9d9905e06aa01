"""Published models of the other families at full size, from headers alone: what the plans must say (numbers from
public reports)."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from layout.shapes import Tensor, head_choices, per_rank, subject

from oddrank.checkpoint import Checkpoint
from oddrank.layout.executors import Constraints
from oddrank.layout.proof import ProofError
from oddrank.layout.solver import Request
from oddrank.planner import Planned, Subject, plan_subject, stock_vllm, study
from oddrank.report import amount, describe, notes_of
from oddrank.synth import describe_release, write_headers
from oddrank.synth.configs import config
from oddrank.synth.write import parameters
from oddrank.transform.recipe import recipes
from oddrank.transform.slice import RankSlice

Study = Callable[..., Subject]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """Subjects of releases at full size, or of fewer layers and experts of the same size; the files are sparse."""
    known: dict[tuple[str, str, str, int | None], Subject] = {}

    def made(family: str, size: str, fmt: str, few: int | None = 5) -> Subject:
        key = (family, size, fmt, few)
        if key not in known:
            release = describe_release(family, fmt, size=size, layers=few, experts=few, vocab=None)
            out = tmp_path_factory.mktemp("full") / "-".join(map(str, key))
            known[key] = study(Checkpoint.open(write_headers(release, out)))
            assert not known[key].census.problems
        return known[key]

    return made


def planned(s: Subject, tp: int, executor: str = "vllm", layout: str = "auto", **wanted: int) -> Planned:
    constraints = Constraints.parse(wanted, s.model)
    return plan_subject(s, Request(tp=tp, executor=executor, layout=layout, constraints=constraints))


def total(p: Planned, axis: str) -> int:
    return p.plan.layout(axis).total()


@pytest.mark.parametrize(
    ("family", "size", "billions"),
    [
        ("qwen3_moe", "30B-A3B", 30.5), ("qwen3_moe", "235B-A22B", 235.1), ("mixtral", "8x7B", 46.7),
        ("mixtral", "8x22B", 140.6), ("phi3", "Phi-4", 14.7), ("phi3", "mini", 3.82), ("gpt_oss", "20b", 20.9),
        ("seed_oss", "36B", 36.15), ("gpt_oss", "120b", 116.8), ("glm4_moe", "4.7", 356.8),
        ("glm4_moe", "4.5-Air", 110.5), ("qwen3_next", "80B-A3B", 81.3), ("gemma3", "27B", 27.0),
        ("gemma3", "12B", 11.77), ("gemma3", "4B", 3.88), ("gemma3", "1B", 1.0), ("deepseek_v3", "671B", 684.5),
        ("deepseek_v3", "Kimi-K2", 1026.5), ("deepseek_v3", "V2-Lite", 15.7), ("minimax_m2", "M2", 228.7),
        ("gemma4", "31B", 30.7), ("gemma4", "26B-A4B", 25.2),
    ],
)  # fmt: skip
def test_the_sizes_are_the_published_ones(family: str, size: str, billions: float) -> None:
    """Parameters, with the draft layers (and their copies of embedding and head) of those that have some."""
    whole = describe_release(family, size=size, layers=None, experts=None, vocab=None)
    assert parameters(whole) == pytest.approx(billions * 1e9, rel=4e-3)


@pytest.mark.parametrize("fmt", ["bf16", "fp8-ct"])
def test_glm_47_at_six(full: Study, fmt: str) -> None:
    """Case 4."""
    p = planned(full("glm4_moe", "4.7", fmt), 6)
    found = dict(head_choices(p))
    wanted = {(144, 12): (24, 2), (108, 18): (18, 3), (96, 24): (16, 4)}
    assert {k: found[k] for k in wanted} == wanted
    assert total(p, "vocab") == 151680
    assert per_rank(p, "moe") == (256,) * 6  # and the shared expert's with them


def test_every_tensor_of_glm_47(full: Study) -> None:
    census = full("glm4_moe", "4.7", "fp8-ct", None).census
    # each of 89 sparse layers and the draft layer: 161 experts of three matrices with their scales
    assert census.total == 2 + 1 + 92 * (4 * 2 + 3 + 2 + 2) + 3 * 6 + 89 * (2 + 161 * 6) + (15 + 2 + 161 * 6 + 4)
    assert not census.unmatched and census.absent == ("MTP vocabulary",)


def test_qwen3_30b_fp8_at_four(full: Study) -> None:
    """Case 6: 768 are six blocks of 128, which four ranks hold as eight; vLLM divides the heads itself."""
    p = planned(full("qwen3_moe", "30B-A3B", "fp8-block"), 4)
    assert (per_rank(p, "q_heads"), per_rank(p, "kv_heads")) == ((8,) * 4, (1,) * 4)
    assert per_rank(p, "moe") == (256,) * 4 and total(p, "moe") == 1024
    finer = planned(full("qwen3_moe", "30B-A3B", "fp8-block"), 4, "runtime")
    assert per_rank(finer, "moe") == (192,) * 4 and dict(finer.plan.refined) == {"moe": 64}


@pytest.mark.parametrize("fmt", ["bf16", "fp8-block"])
def test_minimax_m2_at_three(full: Study, fmt: str) -> None:
    """Case 7: a norm across all heads. vLLM's averages over whatever slots there are, so dummies are refused; each KV
    head three times, two queries beside each copy, leaves the means as they were, and auto takes it. The runtime
    cuts 16 heads a rank and counts each once."""
    s = full("minimax_m2", "M2", fmt)
    with pytest.raises(ProofError, match=r"q_norm computes rms_norm across all 48 q_heads; vllm would include dummies"):
        planned(s, 3, layout="pad")
    with pytest.raises(ProofError, match=r"no crosstalk"):
        planned(s, 3, gqa=3)  # 54/18: six dummy queries
    for p in (planned(s, 3), planned(s, 3, layout="replicate"), planned(s, 3, gqa=2)):
        assert (per_rank(p, "q_heads"), per_rank(p, "kv_heads")) == ((16,) * 3, (8,) * 3)
        assert set(head_choices(p)) <= {((48, 24), (16, 8)), ((48, 48), (16, 16))}
        assert total(p, "moe") == 1536 and per_rank(p, "moe") == (512,) * 3
    p = planned(s, 3, "runtime", "ragged")
    assert per_rank(p, "q_heads") == (16,) * 3 and max(per_rank(p, "kv_heads")) <= 4
    assert sum(per_rank(p, "moe")) == 1536
    # where vLLM itself copies KV heads, each equally often, heads stay as they are
    many = planned(s, 16)
    assert per_rank(many, "q_heads") == (3,) * 16 and many.plan.layout("kv_heads").in_engine


def gpt_oss_mxfp4() -> Subject:
    """As published: blocks and scales in place of the experts' matrices, outputs before inputs, the rest bf16."""
    release = describe_release("gpt_oss", size="20b", layers=2, experts=4, vocab=None)
    table = {name: Tensor("BF16", t.logical.shape) for t in release.stored() for name in t.names()}
    for layer in range(2):
        at = f"model.layers.{layer}.mlp.experts"
        for name, rows in (("gate_up_proj", 2 * 2880), ("down_proj", 2880)):
            del table[f"{at}.{name}"]
            table[f"{at}.{name}_blocks"] = Tensor("U8", (4, rows, 90, 16))
            table[f"{at}.{name}_scales"] = Tensor("U8", (4, rows, 90))
    return subject(config(release), table)


@pytest.mark.parametrize("fmt", ["bf16", "mxfp4"])
def test_gpt_oss_20b_at_three(full: Study, fmt: str) -> None:
    """Case 10: 2880 channels are 90 groups of 32, 960 a rank without padding; down_proj is a square, which only its
    storage turns."""
    s = full("gpt_oss", "20b", "bf16") if fmt == "bf16" else gpt_oss_mxfp4()
    assert not s.census.problems
    p = planned(s, 3)
    found = dict(head_choices(p))
    assert found[72, 9] == (24, 3) and found[66, 33] == (22, 11)
    assert per_rank(p, "moe") == (960,) * 3 and total(p, "moe") == 2880
    assert total(p, "vocab") == 201216
    part, at, count = RankSlice(p.plan, None, 1), "model.layers.1.mlp.experts", s.model.stock()["experts"]
    shapes = {
        "bf16": {"gate_up_proj": (count, 2880, 1920), "down_proj": (count, 960, 2880)},
        "mxfp4": {"gate_up_proj_blocks": (count, 1920, 90, 16), "down_proj_scales": (count, 2880, 30)},
    }[fmt]
    assert {name: part.shape(f"{at}.{name}") for name in shapes} == shapes
    assert part.shape(f"{at}.gate_up_proj_bias") == (count, 1920)
    assert part.shape(f"{at}.down_proj_bias") == (count, 2880)


def test_deepseek_v3_fp8_at_six(full: Study) -> None:
    """Case 11: 132 heads are 22 a rank; 2048 are 16 blocks, which six ranks hold as 18, the shared expert's too."""
    s = full("deepseek_v3", "671B", "fp8-block")
    p = planned(s, 6)
    assert per_rank(p, "q_heads") == (22,) * 6 and total(p, "q_heads") == 132
    assert (total(p, "mlp"), total(p, "moe"), total(p, "vocab")) == (18432, 2304, 129408)
    made, at = recipes(p.plan, p.plan.virtual()), "model.layers.4."
    assert made[f"{at}mlp.shared_experts.up_proj.weight"].shape == (2304, 7168)
    assert made[f"{at}mlp.shared_experts.down_proj.weight_scale_inv"].shape == (56, 18)
    assert made[f"{at}self_attn.q_b_proj.weight"].shape == (132 * 192, 1536)
    assert made[f"{at}self_attn.kv_b_proj.weight"].shape == (132 * 256, 512)
    assert made[f"{at}self_attn.o_proj.weight"].shape == (7168, 132 * 128)
    assert made[f"{at}self_attn.kv_a_proj_with_mqa.weight_scale_inv"].unchanged  # 4.5 blocks of rows
    # the cache is the same on every rank, whatever the heads: 512 + 64 numbers a layer
    report = describe(p.solution, p.census, p.checks)
    assert report["kv"]["per_rank_bytes_per_token"] == [5 * 576 * 2] * 6 and report["kv"]["layers"] == 5
    assert not stock_vllm(s, 6)["stock_vllm"] and stock_vllm(s, 8)["stock_vllm"]


def test_every_tensor_of_deepseek_v3(full: Study) -> None:
    census = full("deepseek_v3", "671B", "fp8-block", None).census
    attention = 5 * 2 + 2 + 2  # five matrices with scales, norms of both latents and of the layer
    sparse = 2 + 257 * 3 * 2
    draft = attention + sparse + 1 + 3 + 2
    assert census.total == 3 + 61 * attention + 3 * 3 * 2 + 58 * sparse + draft == 91_991
    assert not census.unmatched and not census.absent


def test_kimi_k2_at_six(full: Study) -> None:
    """Case 15: 192 rows a head are a block and a half of 128, so heads come in twos: 66 are 11 a rank, 16.5 blocks."""
    s = full("deepseek_v3", "Kimi-K2", "fp8-block")
    p = planned(s, 6)
    assert s.model.architecture == "DeepseekV3ForCausalLM" and per_rank(p, "q_heads") == (12,) * 6
    assert total(p, "moe") == 2304
    finer = planned(s, 6, "runtime")  # a head is three blocks of 64
    assert sorted(per_rank(finer, "q_heads")) == [10, 10, 11, 11, 11, 11]
    # plain numbers have no blocks
    assert per_rank(planned(full("deepseek_v3", "Kimi-K2", "bf16"), 6), "q_heads") == (11,) * 6


def test_deepseek_coder_v2_lite_at_two(full: Study) -> None:
    """Case 16: 10944 = 85.5 blocks of 128, the last of them short; 1408 are 11, and 16 heads divide."""
    s = full("deepseek_v3", "V2-Lite", "fp8-block")
    p = planned(s, 2)
    assert (total(p, "mlp"), total(p, "moe"), per_rank(p, "q_heads")) == (11008, 1536, (8, 8))
    assert p.plan.layout("mlp").real() == (5504, 5440)
    assert per_rank(planned(s, 2, "runtime"), "mlp") == (5504, 5440)


def test_phi_4_ragged(full: Study) -> None:
    """Case 17: 40 query heads of 10 KV heads at four ranks are 10 with 3 on every rank."""
    p = planned(full("phi3", "Phi-4", "bf16"), 4, "runtime", "ragged")
    assert per_rank(p, "q_heads") == (10,) * 4 and per_rank(p, "kv_heads") == (3,) * 4
    assert all(c.ok for c in planned(full("phi3", "Phi-4", "bf16"), 3).checks)


@pytest.mark.parametrize("executor", ["vllm", "runtime"])
def test_experts_are_cut_inside(full: Study, executor: str) -> None:
    """Case 18: all 256 on each of three ranks, in order, and the router whole."""
    p = planned(full("minimax_m2", "M2", "bf16", 256), 3, executor)
    assert all(p.plan.layout("experts").slots(r).tolist() == list(range(256)) for r in range(3))
    for rank in range(3):
        part = RankSlice(p.plan, None, rank)
        assert part.shape("model.layers.0.block_sparse_moe.gate.weight") == (256, 3072)
        assert part.shape("model.layers.0.block_sparse_moe.experts.255.w2.weight") == (3072, 512)


@pytest.mark.parametrize("fmt", ["bf16", "fp8-block"])
def test_qwen3_next_at_three(full: Study, fmt: str) -> None:
    """As case 8: the 35B-A3B's heads, interleaved."""
    p = planned(full("qwen3_next", "80B-A3B", fmt), 3)
    assert dict(head_choices(p)) == {(24, 3): (8, 1), (18, 6): (6, 2)}
    assert dict(head_choices(p, "gdn_v_heads")) == {(36, 18): (12, 6), (33, 33): (11, 11)}
    assert all(c.ok for c in planned(full("qwen3_next", "80B-A3B", fmt), 3, "runtime").checks)


def test_blocks_that_cost_a_rank_of_qwen3_next_much(full: Study) -> None:
    """512 channels are 4 blocks of 128, which three ranks hold as 6, or 8 of 64, held as 9. The note's figures are
    those of the plans with and without."""
    s = full("qwen3_next", "80B-A3B", "fp8-block", 48)
    plain, finer = planned(s, 3), planned(s, 3, block=64)
    now, then = (amount(max(describe(p.solution, p.census, p.checks)["bytes"]["per_rank"])) for p in (plain, finer))
    (note,) = [n for n in notes_of(plain) if "block" in n]
    assert f"block=64, which rewrites them losslessly, the fullest rank has {then} of weights instead of {now}" in note
    for other in (finer, planned(s, 2), planned(s, 3, "runtime"), planned(full("qwen3_next", "80B-A3B", "bf16"), 3)):
        assert not [n for n in notes_of(other) if "--constraint block" in n]


def test_gemma3_at_three(full: Study) -> None:
    p = planned(full("gemma3", "27B", "bf16"), 3)
    assert dict(head_choices(p))[36, 18] == (12, 6) and total(p, "vocab") == 262272


def test_gemma4_at_three(full: Study) -> None:
    """32 query heads of 16 KV heads in one geometry, of 4 in the other: one number serves both."""
    s = full("gemma4", "31B", "bf16", 60)
    p = planned(s, 3)
    assert total(p, "q_heads") == total(p, "full_q_heads")
    pad = planned(s, 3, layout="pad")
    # the trained ratios, 2 and 8
    assert [total(pad, a) for a in ("q_heads", "kv_heads", "full_q_heads", "full_kv_heads")] == [48, 24, 48, 6]
    asked = planned(s, 3, q_heads=36)
    assert total(asked, "full_q_heads") == 36
    ragged = planned(s, 3, "runtime", "ragged")
    assert sorted(per_rank(ragged, "q_heads")) == [10, 11, 11]
    report = describe(p.solution, p.census, p.checks)
    # 50 layers of 16 heads x 256 and 10 of 4 heads x 512 (keys and values kept apart), bf16
    assert report["kv"]["stock_bytes_per_token"] == 2 * 2 * (50 * 16 * 256 + 10 * 4 * 512)
