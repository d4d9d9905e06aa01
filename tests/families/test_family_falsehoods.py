"""The proof trusts what a family says of a tensor. Where that is wrong with the right shapes, a plan is proven and the
logits differ: the experiment finds out. And draft layers, which transformers ignores, by structure."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from family_models import FAMILIES
from family_subject import DIFFERENT, SAME, Subjected
from hybrid.random_plans import equal_plan, ragged_plan

from oddrank.checkpoint import Checkpoint
from oddrank.checkpoint.config import ConfigView
from oddrank.families import family_of
from oddrank.geometry import Along, Concat, Dim, Groups, Model, Role
from oddrank.layout.plan import Plan
from oddrank.layout.proof import prove
from oddrank.planner import study
from oddrank.synth import describe_release, write_headers
from oddrank.transform.recipe import recipes


def at(place: int, make: Callable[[Dim], Dim]) -> Callable[[Role], Role]:
    """The dim at `place` of a role replaced."""

    def change(role: Role) -> Role:
        dims = tuple(make(d) if i == place % len(role.dims) else d for i, d in enumerate(role.dims))
        return msgspec.structs.replace(role, dims=dims)

    return change


def halves(dim: Dim) -> Dim:
    """Of every head first the one part, then of every head the other."""
    assert isinstance(dim, Along)
    return Concat((Along(dim.axis, dim.width // 2), Along(dim.axis, dim.width - dim.width // 2)))


def reversed_parts(dim: Dim) -> Dim:
    assert isinstance(dim, (Concat, Groups))
    return msgspec.structs.replace(dim, parts=dim.parts[::-1])


def in_sections(dim: Dim) -> Dim:
    assert isinstance(dim, Groups)
    return Concat(dim.parts)


FALSEHOODS: dict[str, tuple[str, str, Callable[[Role], Role]]] = {
    "qwen3_moe: q_proj in halves": ("qwen3_moe", "q_proj.weight", at(0, halves)),
    "mixtral: o_proj in halves": ("mixtral", "o_proj.weight", at(1, halves)),
    "phi3: v, k, q": ("phi3", "qkv_proj.weight", at(0, reversed_parts)),
    "phi3: gate and up in turn": ("phi3", "gate_up_proj.weight", at(0, lambda d: Along("mlp", 2))),
    "seed_oss: k_proj in halves": ("seed_oss", "k_proj.weight", at(0, halves)),
    "seed_oss: o_proj in halves": ("seed_oss", "o_proj.weight", at(1, halves)),
    "gpt_oss: gate, then up": (
        "gpt_oss", "gate_up_proj", at(1, lambda d: Concat((Along("moe"), Along("moe")))),
    ),
    "gpt_oss: bias of gate, then of up": (
        "gpt_oss", "gate_up_proj_bias", at(1, lambda d: Concat((Along("moe"), Along("moe")))),
    ),
    "gpt_oss: outputs before inputs": ("gpt_oss", "down_proj", lambda r: msgspec.structs.replace(r, transposed=False)),
    "glm4_moe: k_proj in halves": ("glm4_moe", "k_proj.weight", at(0, halves)),
    "qwen3_next: q|k|v|z": ("qwen3_next", "in_proj_qkvz.weight", at(0, in_sections)),
    "qwen3_next: a before b": ("qwen3_next", "in_proj_ba.weight", at(0, in_sections)),
    "gemma3: o_proj in halves": ("gemma3", "o_proj.weight", at(1, halves)),
    "deepseek_v3: rotary parts after plain ones": (
        "deepseek_v3", "q_b_proj.weight", at(0, lambda d: Concat((Along("q_heads", 6), Along("q_heads", 4)))),
    ),
    "deepseek_v3: values after keys": (
        "deepseek_v3", "kv_b_proj.weight", at(0, lambda d: Concat((Along("q_heads", 6), Along("q_heads", 5)))),
    ),
    "minimax_m2: a norm per head": ("minimax_m2", "", lambda r: r),
    "gemma4: q_proj in halves": ("gemma4", "q_proj.weight", at(0, halves)),
}  # fmt: skip


def false_model(model: Model, suffix: str, change: Callable[[Role], Role]) -> Model:
    if not suffix:
        return msgspec.structs.replace(model, crosstalk=())
    found = tuple(change(r) if r.name.endswith(suffix) else r for r in model.roles)
    stock = model.stock()
    for old, new in zip(model.roles, found, strict=True):
        assert [d.size(stock) for d in old.dims] == [d.size(stock) for d in new.dims]
    assert found != model.roles
    return msgspec.structs.replace(model, roles=found)


@pytest.mark.parametrize("falsehood", FALSEHOODS)
def test_a_family_that_says_the_wrong_thing(falsehood: str) -> None:
    family, suffix, change = FALSEHOODS[falsehood]
    config: dict[str, Any] = FAMILIES[family](np.random.default_rng(5))
    if family == "gpt_oss":
        config |= {"hidden_size": 22, "intermediate_size": 22}  # as published, a square: no shape tells
    if family == "deepseek_v3":
        config |= {"q_lora_rank": 10}
    m = Subjected(family, 11, config)
    plans: list[Plan] = []
    while len(plans) < 3:
        plan = equal_plan(m.subject, m.rng, 2)
        # nothing but a norm whose mean is over dummies
        crossed = {"no crosstalk"} if not suffix else set()
        if set(m.failed(plan)) == crossed and not all_in_order(plan):
            plans.append(plan)
    for plan in plans:
        assert not suffix or m.by_ranks(plan) < SAME
        false = msgspec.structs.replace(plan, model=false_model(plan.model, suffix, change))
        assert all(c.ok for c in prove(false, m.subject.census))
    far = [off(m, msgspec.structs.replace(p, model=false_model(p.model, suffix, change))) for p in plans]
    assert max(far) > DIFFERENT


def off(m: Subjected, plan: Plan) -> float:
    """How far a plan's logits are from the reference; infinite where its shapes do not even multiply."""
    try:
        return m.by_ranks(plan)
    except ValueError:
        return float("inf")


def all_in_order(plan: Plan) -> bool:
    """Does a plan move nothing, so that no falsehood could show?"""
    return all(la.is_even_split(plan.model.axis(la.axis).count) for la in plan.layouts if not la.in_engine)


@pytest.mark.parametrize("maker", [equal_plan, ragged_plan])
@pytest.mark.parametrize(("family", "size"), [("glm4_moe", "4.5-Air"), ("deepseek_v3", "671B"), ("qwen3_next", None)])
def test_draft_layers_are_laid_out_as_the_model_s(
    family: str, size: str | None, maker: Callable[..., Plan], tmp_path: Any
) -> None:
    """A plan does to every tensor of a draft layer what it does to that of the last decoder layer of its kind; what
    stands around is whole, but for the vocabulary."""
    release = describe_release(family, size=size, layers=4, experts=2, vocab=64)
    s = study(Checkpoint.open(write_headers(release, tmp_path / "m")))
    main, draft = "model.layers.3.", "mtp.layers.0." if family == "qwen3_next" else "model.layers.4."
    for seed in range(3):
        plan = maker(s, np.random.default_rng(seed), 3)
        for slots in (plan.slots(1), *([plan.virtual()] if maker is equal_plan else [])):
            made = recipes(plan, slots)
            drafted = {n.removeprefix(draft): r for n, r in made.items() if n.startswith(draft)}
            whole = {n.removeprefix(main): r for n, r in made.items() if n.startswith(main)}
            for name in set(drafted) & set(whole):
                assert drafted[name] == whole[name], name
            around = set(drafted) - set(whole)
            assert not set(whole) - set(drafted)
            for name in around - {"embed_tokens.weight", "shared_head.head.weight"}:
                assert drafted[name].unchanged, name
            for name in around & {"embed_tokens.weight", "shared_head.head.weight"}:
                assert drafted[name] == made["model.embed_tokens.weight"]
        if family != "qwen3_next":
            assert len(around) == 6 if family == "deepseek_v3" or size == "4.5-Air" else 4


def test_draft_layers_completely_or_not_at_all(tmp_path: Any) -> None:
    release = describe_release("glm4_moe", size="4.5-Air", layers=2, experts=2, vocab=64)
    tensors = Checkpoint.open(write_headers(release, tmp_path / "m")).tensors
    from oddrank.layout.census import take_census
    from oddrank.synth.configs import config

    view = ConfigView(config(release))
    model = family_of(view).build(view, "model.")
    without = {n: t for n, t in tensors.items() if not n.startswith("model.layers.2.")}
    census = take_census(model, without)
    assert census.absent == ("MTP", "MTP vocabulary") and not census.problems
    later = {n: t for n, t in tensors.items() if not n.endswith(("2.embed_tokens.weight", "shared_head.head.weight"))}
    assert take_census(model, later).absent == ("MTP vocabulary",)
    for lost in ("eh_proj.weight", "self_attn.k_proj.bias", "mlp.experts.1.up_proj.weight"):
        part = {n: t for n, t in tensors.items() if n != f"model.layers.2.{lost}"}
        (problem,) = take_census(model, part).problems
        assert problem.startswith(f"model.layers.2.{lost} is missing")
