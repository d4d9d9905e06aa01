"""Every release is planned and proven at sizes that do not divide it: the families account for every tensor."""

from pathlib import Path

import pytest

from oddrank.planner import make_plan
from oddrank.synth import PUBLISHED, describe_release, write_headers

EVERY = [(family, fmt) for family, formats in PUBLISHED.items() for fmt in formats]


def hybrid(family: str) -> bool:
    return family.startswith("qwen3_5")


def headers(tmp_path: Path, family: str, fmt: str, **options: object) -> Path:
    cut = {"layers": 4, "experts": 4, "vocab": None} | options
    return write_headers(describe_release(family, fmt, **cut), tmp_path / f"{family}-{fmt}")  # type: ignore[arg-type]


def test_the_27b_target_at_three_ranks(tmp_path: Path) -> None:
    """The geometry that is known to serve: 36/6, GDN 18/54, MLP 17472, vocabulary 248448."""
    for fmt in ("bf16", "mxfp4"):
        out = headers(tmp_path, "qwen3_5", fmt, layers=None)
        plan = make_plan(out, 3, executor="vllm", constraints={"gqa": 6, "mlp_multiple": 64}).plan
        assert {a.name: plan.layout(a.name).total() for a in plan.model.axes} == {
            "q_heads": 36, "kv_heads": 6, "gdn_k_heads": 18, "gdn_v_heads": 54, "mlp": 17472, "vocab": 248448,
        }  # fmt: skip


def test_the_drafter_at_three_ranks(tmp_path: Path) -> None:
    """MLP 17664 in whole blocks; alone 36/9, and 48/12 where its KV bytes must be the padded target's."""
    out = headers(tmp_path, "dflash", "fp8-block", layers=None)
    alone = make_plan(out, 3, executor="vllm").plan
    assert [alone.layout(a).total() for a in ("q_heads", "kv_heads", "mlp")] == [36, 9, 17664]
    # a padded target has 2 KV heads x 256 x keys and values x 2 bytes on each rank
    beside = make_plan(out, 3, executor="vllm", constraints={"gqa": 4, "kv_bytes": 2 * 256 * 2 * 2}).plan
    assert [beside.layout(a).total() for a in ("q_heads", "kv_heads", "mlp")] == [48, 12, 17664]


@pytest.mark.parametrize(
    ("family", "fmt", "vision"), [(*e, v) for e in EVERY for v in (False, True) if hybrid(e[0]) or not v]
)
def test_every_tensor_has_a_role(family: str, fmt: str, vision: bool, tmp_path: Path) -> None:
    out = headers(tmp_path, family, fmt, vision=vision)
    for executor in ("vllm", "runtime"):
        planned = make_plan(out, 3, executor=executor)
        census = planned.census
        assert not census.problems and not census.unmatched and not census.ignored and not census.aliased
        # MTP is there, the tower if asked for; a drafter shares its target's vocabulary, a draft layer its model's
        shared = {"dflash": {"own vocabulary"}, "glm4_moe": {"MTP vocabulary"}}
        assert set(census.absent) == shared.get(family, set())
        assert sum(use.count for use in census.uses) > 0


@pytest.mark.parametrize(
    ("family", "size", "fmt", "totals"),
    [
        # 29568 channels are 231 groups of 128, which 2, 4 and 8 ranks do not divide; 232 they do
        ("qwen2", "72B", "gptq", {2: 29696, 3: 29568, 4: 29696, 5: 30080, 6: 29952, 7: 29568, 8: 29696}),
        ("qwen2", "72B", "gptq-int8", {2: 29696, 4: 29696, 8: 29696}),
        ("qwen2", "72B", "awq", {3: 29568, 8: 29696}),
        ("llama", "70B", "int4-ct", {3: 28800, 5: 28800, 6: 29184, 7: 28672, 8: 28672}),
        ("llama", "70B", "int4-ct-asym", {3: 28800, 8: 28672}),
        # one scale a channel leaves the cut to the kernels' tiles of 64
        ("llama", "70B", "int8-ct", {3: 28800, 5: 28800, 7: 28672}),
        ("llama", "70B", "int8", {3: 28800, 6: 28800}),
        ("qwen3", "32B", "auto-round", {3: 25728, 5: 25600, 6: 26112, 7: 25984}),
        ("qwen3", "32B", "auto-round-awq", {3: 25728, 7: 25984}),
        ("qwen3", "32B", "mxfp8", {3: 25728, 7: 25984}),
        ("mistral", "7B", "awq", {3: 14592, 5: 14720, 7: 14336}),
    ],
)
def test_published_sizes_in_whole_groups(
    family: str, size: str, fmt: str, totals: dict[int, int], tmp_path: Path
) -> None:
    """Whole headers of the published models: planned widths, every rank in whole scale groups and tiles of 64."""
    out = write_headers(
        describe_release(family, fmt, size=size, layers=None, experts=None, vocab=None), tmp_path / "model"
    )
    for tp, total in totals.items():
        planned = make_plan(out, tp, executor="vllm")
        assert planned.plan.layout("mlp").total() == total, tp
        assert len(planned.checks) == 7 and not planned.census.problems
        ragged = make_plan(out, tp).plan.layout("mlp")
        assert ragged.total() == sum(ragged.real()) == planned.plan.model.axis("mlp").count


def test_gpt_oss_20b_in_mxfp4_at_three_ranks(tmp_path: Path) -> None:
    """64/8 heads as 72/9, or 66/33; 2880 channels are 90 groups of 32, 30 a rank, as they are; vocabulary 201216."""
    release = describe_release("gpt_oss", "mxfp4-experts", size="20b", layers=None, experts=None, vocab=None)
    planned = make_plan(write_headers(release, tmp_path / "m"), 3, executor="vllm")
    plan = planned.plan
    assert [plan.layout(a).total() for a in ("q_heads", "kv_heads", "moe", "vocab")] == [72, 9, 2880, 201216]
    assert plan.layout("moe").counts() == (960,) * 3 and len(planned.checks) == 7
    choices = {c.candidate.totals() for group in planned.solution.choices for c in group if c.candidate.pairings}
    assert choices == {(72, 9), (66, 33)}
    assert sum(use.count for use in plan.uses if use.format == "mxfp4-blocks") == 2 * 24


def test_full_size_35b_is_planned_whole(tmp_path: Path) -> None:
    # 30,970 matrices (771 in each of 40 layers' experts, 3 in 30 mixers, 4 in 10), three tensors each, and 715 others
    for fmt, count in (("fp8-block", 64_196), ("nvfp4-mixed", 124_468), ("awq", 3 * 30_970 + 715)):
        out = headers(tmp_path, "qwen3_5_moe", fmt, layers=None, experts=None, vision=True)
        census = make_plan(out, 3, executor="vllm").census
        assert census.total == count and not census.problems
