"""Published hybrid models at full size, from headers alone: what the plans must say (numbers from public reports)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from layout.shapes import head_choices, per_rank

from oddrank.checkpoint import Checkpoint
from oddrank.errors import OddrankError
from oddrank.layout.executors import Constraints
from oddrank.layout.plan import Plan
from oddrank.layout.solver import Request
from oddrank.planner import Planned, Subject, plan_subject, study
from oddrank.report import describe
from oddrank.synth import describe_release, write_headers

MOE, DENSE, DRAFTER = "qwen3_5_moe", "qwen3_5", "dflash"
Study = Callable[..., Subject]


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Study:
    """Subjects of full-size releases, or of fewer layers and experts of the same size; the files are sparse."""
    known: dict[tuple[str, str, int | None], Subject] = {}

    def made(family: str, fmt: str, few: int | None = None) -> Subject:
        if (family, fmt, few) not in known:
            vision = family != DRAFTER
            release = describe_release(family, fmt, layers=few, experts=few, vocab=None, vision=vision)
            out = write_headers(release, tmp_path_factory.mktemp("full") / f"{family}-{fmt}")
            known[family, fmt, few] = study(Checkpoint.open(out))
        return known[family, fmt, few]

    return made


def planned(
    s: Subject, tp: int, executor: str = "vllm", run_tp: int | None = None, layout: str = "auto", **wanted: int
) -> Planned:
    constraints = Constraints.parse(wanted, s.model)
    return plan_subject(s, Request(tp=tp, executor=executor, layout=layout, constraints=constraints, run_tp=run_tp))


def totals(plan: Plan, *axes: str) -> tuple[int, ...]:
    """Planned totals; the vocabulary's padding in an engine's buffers included."""
    return tuple(plan.layout(a).total() for a in axes)


HEADS = ("q_heads", "kv_heads", "gdn_v_heads", "gdn_k_heads")


@pytest.mark.parametrize(
    ("family", "fmt", "tensors", "mtp", "vision"),
    [
        (MOE, "fp8-block", 64_196, 1_560, 333),
        (MOE, "nvfp4-mixed", 124_468, 19, 333),
    ],
)
def test_every_tensor_is_covered(full: Study, family: str, fmt: str, tensors: int, mtp: int, vision: int) -> None:
    s = full(family, fmt)
    census = s.census
    assert census.total == tensors
    assert not (census.problems or census.unmatched or census.ignored or census.aliased or census.absent)
    assert (_stored(s, "MTP"), _stored(s, "vision")) == (mtp, vision)


def _stored(s: Subject, group: str) -> int:
    """Stored tensors of an optional group of roles."""
    uses = [u for u in s.census.uses if s.model.roles[u.role].group == group]
    return sum(u.count * sum(d is not None for d in u.dtypes) for u in uses)


@pytest.mark.parametrize("fmt", ["bf16", "fp8-block", "nvfp4-mixed", "nvfp4-ct", "mxfp4"])
def test_35b_heads_at_three_ranks(full: Study, fmt: str) -> None:
    """Case 8, in every format: heads are whole blocks of any of them."""
    s = full(MOE, fmt, None if fmt == "fp8-block" else 8)
    p = planned(s, 3)
    assert head_choices(p) == {((24, 3), (8, 1)), ((18, 6), (6, 2))}
    assert head_choices(p, "gdn_v_heads") == {((36, 18), (12, 6)), ((33, 33), (11, 11))}
    assert totals(p.plan, "vocab") == (248448,)
    pad = planned(s, 3, layout="pad").plan
    assert totals(pad, *HEADS) == (24, 3, 36, 18)
    # of 8 query heads each, the last rank's are all dummies: 16 heads of 2 KV heads
    assert pad.layout("q_heads").real() == (8, 8, 0)


@pytest.mark.parametrize(("tp", "widths", "refined"), [(3, (768, 768), (576, 576)), (8, (1024, 1024), (512, 512))])
def test_35b_fp8_widths(full: Study, tp: int, widths: tuple[int, int], refined: tuple[int, int]) -> None:
    """Cases 8 and 9: 512 is four blocks of 128, at eight ranks fewer blocks than ranks; blocks of 64 pad less."""
    s = full(MOE, "fp8-block")
    assert totals(planned(s, tp).plan, "moe", "shared") == widths
    finer = planned(s, tp, block=64).plan
    assert totals(finer, "moe", "shared") == refined
    assert dict(finer.refined) == {"*": 64}


def test_35b_at_eight_ranks(full: Study) -> None:
    """Case 9: each KV head four times, two query heads beside each; GDN divides."""
    p = planned(full(MOE, "fp8-block"), 8)
    assert totals(p.plan, *HEADS, "vocab") == (16, 8, 32, 16, 248320)
    assert ((16, 8), (2, 1)) in head_choices(p) and ((32, 16), (4, 2)) in head_choices(p, "gdn_v_heads")


@pytest.mark.parametrize("fmt", ["mxfp4", "bf16", "nvfp4-ct"])
def test_27b_at_three_ranks(full: Study, fmt: str) -> None:
    """Case 13."""
    p = planned(full(DENSE, fmt), 3)
    assert head_choices(p) == {((36, 6), (12, 2)), ((27, 9), (9, 3)), ((24, 12), (8, 4))}
    assert head_choices(p, "gdn_v_heads") == {((54, 18), (18, 6)), ((48, 48), (16, 16))}
    assert totals(p.plan, "mlp", "vocab") == (17472, 248448)


KNOWN_GOOD = {"gqa": 6, "mlp_multiple": 64}


@pytest.mark.parametrize("fmt", ["mxfp4", "bf16"])
def test_27b_as_known_to_serve(full: Study, fmt: str) -> None:
    """36/6, GDN 18/54, MLP 17472, 82,816 vocabulary rows a rank; the same checkpoint at other sizes."""
    s = full(DENSE, fmt)
    at = {run: planned(s, 3, run_tp=run, **KNOWN_GOOD) for run in (1, 2, 3, 6)}
    for run, p in at.items():
        assert totals(p.plan, *HEADS, "mlp") == (36, 6, 54, 18, 17472)
        assert p.plan.tp == run and per_rank(p, "mlp") == (17472 // run,) * run
        assert all(c.ok for c in p.checks)
    assert per_rank(at[3], "vocab") == (82816,) * 3 and per_rank(at[3], "mlp") == (5824,) * 3
    # 248,320 rows are an even number of 64s: stock vLLM serves them at two ranks and at one
    assert totals(at[2].plan, "vocab") == totals(at[1].plan, "vocab") == (248320,)
    with pytest.raises(OddrankError, match=r"6 kv_heads, which 4 ranks do not divide"):
        planned(s, 3, run_tp=4, **KNOWN_GOOD)


@pytest.mark.parametrize("fmt", ["mxfp4", "bf16", "nvfp4-ct"])
def test_27b_heads_only(full: Study, fmt: str) -> None:
    """The stock MLP under padded heads: not at the three ranks it is planned for, but at one and two."""
    s = full(DENSE, fmt)
    for run in (1, 2):
        p = planned(s, 3, run_tp=run, gqa=6, mlp=17408)
        assert totals(p.plan, *HEADS, "mlp") == (36, 6, 54, 18, 17408)
        assert p.plan.layout("mlp").is_even_split(17408)
    with pytest.raises(OddrankError, match=r"mlp=17408 is no multiple of (96|48|3),.*the nearest that works"):
        planned(s, 3, gqa=6, mlp=17408)
    # 17,408 is 2 x 136 x 64 and no multiple of 2 x 96
    assert planned(s, 3, run_tp=2, gqa=6, mlp=17408, mlp_multiple=64).plan.tp == 2
    with pytest.raises(OddrankError, match=r"mlp=17408"):
        planned(s, 3, run_tp=2, gqa=6, mlp=17408, mlp_multiple=96)


def test_the_drafter_beside_its_target(full: Study) -> None:
    """Case 14: its KV bytes a token, layer and rank are the padded target's, 2 x 256 x 2 (keys and values) x 2 bytes
    = 4 x 128 x 2 x 2; alone, fewer."""
    s = full(DRAFTER, "fp8-block")
    assert head_choices(planned(s, 3)) >= {((36, 9), (12, 3))}
    target = planned(full(DENSE, "mxfp4"), 3, **KNOWN_GOOD)
    report = describe(target.solution, target.census, target.checks)
    (one,) = {b // report["kv"]["layers"] for b in report["kv"]["per_rank_bytes_per_token"]}
    assert one == 2048
    for run in (None, 1, 2, 3, 6):
        p = planned(s, 3, run_tp=run, kv_bytes=one, gqa=4)
        assert totals(p.plan, "q_heads", "kv_heads", "mlp") == (48, 12, 17664)
        assert p.plan.tp == (run or 3)


def test_the_drafter_at_four_ranks(full: Study) -> None:
    """17,664 is 34.5 blocks of 128 on each of four ranks: refused in blocks of 128, served in blocks of 64 and in
    bf16; 18,432 is whole blocks at three ranks and at four."""
    s, beside = full(DRAFTER, "fp8-block"), {"kv_bytes": 2048, "gqa": 4}
    with pytest.raises(OddrankError, match=r"4416 on each of 4 ranks.*units of 128.*mlp=18432 is whole units at both"):
        planned(s, 3, run_tp=4, **beside)
    works = [(s, {"mlp": 18432}), (s, {"mlp": 17664, "block": 64}), (full(DRAFTER, "bf16"), {"mlp": 17664})]
    for subject, more in works:
        p = planned(subject, 3, run_tp=4, **beside, **more)
        assert totals(p.plan, "q_heads", "kv_heads", "mlp") == (48, 12, more["mlp"])
        assert per_rank(p, "kv_heads") == (3, 3, 3, 3)


@pytest.mark.parametrize("fmt", ["bf16", "mxfp4", "nvfp4-ct"])
def test_27b_ragged(full: Study, fmt: str) -> None:
    """Case 17: 24 query heads of 4 KV heads at three ranks are 8 with 2 on every rank, against 12/2, 9/3 or 8/4."""
    p = planned(full(DENSE, fmt), 3, "runtime", layout="ragged")
    assert per_rank(p, "q_heads") == (8, 8, 8) and per_rank(p, "kv_heads") == (2, 2, 2)
    # 48 value heads of 16 key heads: 16 on each rank are five groups of three and a third of one
    assert per_rank(p, "gdn_v_heads") == (16, 16, 16) and per_rank(p, "gdn_k_heads") == (6, 6, 6)
    maps: dict[str, Any] = {m.follower: m.ranks for m in p.plan.pairings}
    assert maps["q_heads"] == ((0,) * 6 + (1,) * 2, (0,) * 4 + (1,) * 4, (0,) * 2 + (1,) * 6)
    assert p.plan.layout("mlp").real() == p.plan.layout("mlp").counts() and sum(per_rank(p, "mlp")) == 17408


def test_35b_ragged(full: Study) -> None:
    """16 query heads of 2 KV heads at three ranks: 6, 5 and 5 with at most both; experts cut inside, in units of 64."""
    p = planned(full(MOE, "fp8-block"), 3, "runtime", layout="ragged")
    assert sorted(per_rank(p, "q_heads")) == [5, 5, 6] and max(per_rank(p, "kv_heads")) == 2
    assert sorted(per_rank(p, "moe")) == [128, 192, 192] and sum(per_rank(p, "shared")) == 512
    assert all(p.plan.counts(r)["experts"] == 256 for r in range(3))


@pytest.mark.parametrize("fmt", ["bf16", "fp8-block", "nvfp4-mixed"])
def test_what_the_35b_holds_per_token_and_request(full: Study, fmt: str) -> None:
    """bf16 KV 20,480 bytes a token; fp32 GDN state 60 MiB a request, as published."""
    p = planned(full(MOE, fmt), 1)
    report = describe(p.solution, p.census, p.checks)
    assert report["kv"]["stock_bytes_per_token"] == 20_480
    assert report["state"]["stock_bytes_per_request"] == 60 << 20


def test_what_the_27b_holds_per_token_and_request(full: Study) -> None:
    """bf16 KV 65,536 bytes a token; GDN state 144 MiB a request, as published; padded at three ranks, an eighth
    more."""
    p = planned(full(DENSE, "mxfp4"), 3, **KNOWN_GOOD)
    report = describe(p.solution, p.census, p.checks)
    assert report["kv"]["stock_bytes_per_token"] == 65_536
    assert report["kv"]["per_rank_bytes_per_token"] == [65_536 * 2 // 4] * 3
    assert report["state"]["stock_bytes_per_request"] == 144 << 20
    assert report["state"]["per_rank_bytes_per_request"] == [(144 << 20) * 18 // 48] * 3
