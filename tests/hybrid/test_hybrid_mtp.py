"""MTP layers, which transformers ignores: by structure. An MTP layer shares the main layers' geometry, so a plan must
do to its tensors what it does to those of a main full-attention layer."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from hybrid.random_plans import equal_plan, ragged_plan
from hybrid.subjected import virtual
from hybrid.tiny import (
    FAMILIES,
    FULL,
    LINEAR,
    SHAPES,
    Config,
    config,
    prefix_of,
    random_weights,
    tensor_shapes,
    tiny_subject,
)
from proof.tiny import F64, Memory, Weights

from oddrank.checkpoint import Checkpoint
from oddrank.layout.plan import Plan
from oddrank.planner import make_plan
from oddrank.synth import describe_release, write_headers
from oddrank.transform.recipe import recipes
from oddrank.transform.slice import RankSlice

MAIN = 1  # the full-attention layer that the MTP layer is a copy of
FORMS = [(True, True), (True, False), (False, True), (False, False)]
"""(main layers' experts stacked, the MTP layer's). Published files have all but the last but one."""


def twin(family: str, stacked: bool, mtp_stacked: bool, *, wrapped: bool, seed: int) -> tuple[Config, Weights]:
    """A model whose MTP layer holds the same numbers as main layer MAIN."""
    c = config(family, SHAPES[seed % len(SHAPES)], layers=(LINEAR, FULL), bias=True, wrapped=wrapped)
    weights = random_weights(tensor_shapes(c, stacked=stacked, mtp_stacked=mtp_stacked), np.random.default_rng(seed))
    main = f"{prefix_of(c)}layers.{MAIN}."
    by_expert = _by_expert({n: w for n, w in weights.items() if n.startswith(main)}, main)
    for name in [n for n in weights if n.startswith("mtp.layers.0.")]:
        weights[name] = _read(by_expert, main + name.removeprefix("mtp.layers.0."))
    return c, weights


def _by_expert(weights: Weights, at: str) -> Weights:
    """The layer's experts one by one, however they are stored."""
    made = dict(weights)
    stacked = made.pop(f"{at}mlp.experts.gate_up_proj", None)
    if stacked is not None:
        down = made.pop(f"{at}mlp.experts.down_proj")
        for e in range(len(stacked)):
            gate, up = np.split(stacked[e], 2)
            parts = {"gate": gate, "up": up, "down": down[e]}
            made |= {f"{at}mlp.experts.{e}.{p}_proj.weight": w for p, w in parts.items()}
    return made


def _read(by_expert: Weights, name: str) -> F64:
    """One tensor of a layer told expert by expert; experts stacked where the name is that of a stack."""
    if name in by_expert:
        return by_expert[name].copy()
    at, _, leaf = name.rpartition(".")
    experts = range(sum(n.startswith(at) and n.endswith("up_proj.weight") for n in by_expert))
    assert experts

    def bank(part: str) -> F64:
        return np.stack([by_expert[f"{at}.{e}.{part}_proj.weight"] for e in experts])

    return bank("down") if leaf == "down_proj" else np.concatenate([bank("gate"), bank("up")], axis=1)


def same_layer(c: Config, weights: Weights, result: Weights) -> None:
    """The MTP layer of a result equals its main layer; what stands around it is as it was."""
    main, mtp = f"{prefix_of(c)}layers.{MAIN}.", "mtp.layers.0."
    of = {at: {n: w for n, w in result.items() if n.startswith(at)} for at in (main, mtp)}
    a, b = (_by_expert(of[at], at) for at in (main, mtp))
    assert {n.removeprefix(main) for n in a} == {n.removeprefix(mtp) for n in b}
    for name, w in a.items():
        np.testing.assert_array_equal(w, b[mtp + name.removeprefix(main)], err_msg=name)
    around = [n for n in weights if n.startswith("mtp.") and not n.startswith(mtp)]
    assert len(around) == 4 and "mtp.fc.weight" in around
    for name in around:
        np.testing.assert_array_equal(result[name], weights[name], err_msg=name)


@pytest.mark.parametrize("maker", [equal_plan, ragged_plan])
@pytest.mark.parametrize("forms", FORMS)
@pytest.mark.parametrize("family", FAMILIES)
def test_same_slots_as_a_main_layer(family: str, forms: tuple[bool, bool], maker: Callable[..., Plan]) -> None:
    for seed in range(4):
        c, weights = twin(family, *forms, wrapped=seed % 2 == 1, seed=seed)
        s = tiny_subject(c, weights)
        assert not s.census.problems and not s.census.unmatched
        plan = maker(s, np.random.default_rng(seed), 1 + seed % 3)
        for rank in range(plan.tp):
            piece = RankSlice(plan, Memory(weights), rank)  # type: ignore[arg-type]
            local: Weights = {}
            for name in piece.names():
                out = np.empty(piece.shape(name), dtype=np.uint64)
                piece.read_into(name, out)
                local[name] = out.view(np.float64)
            assert set(local) == set(weights)
            same_layer(c, weights, local)
        if maker is equal_plan:
            same_layer(c, weights, virtual(plan, c, weights)[1])


@pytest.mark.parametrize("family", FAMILIES)
def test_completely_or_not_at_all(family: str) -> None:
    c = config(family, SHAPES[0], layers=(LINEAR, FULL))
    weights = random_weights(tensor_shapes(c), np.random.default_rng(0))
    assert tiny_subject(c, weights).census.absent == ("vision",) * ("vision_config" in c)
    without = {n: w for n, w in weights.items() if not n.startswith("mtp.")}
    assert "MTP" in tiny_subject(c, without).census.absent and not tiny_subject(c, without).census.problems
    for lost in ("mtp.fc.weight", "mtp.layers.0.self_attn.k_proj.weight", "mtp.norm.weight"):
        part = {n: w for n, w in weights.items() if n != lost}
        (problem,) = tiny_subject(c, part).census.problems
        assert problem.startswith(f"{lost} is missing")


def test_in_a_format_of_its_own(tmp_path: Path) -> None:
    """MXFP4's MTP layer is fp8 with one scale a row: padded columns leave the scales alone, padded rows do not."""
    out = write_headers(describe_release("qwen3_5", "mxfp4", size="tiny"), tmp_path / "m")
    plan = make_plan(out, 5, executor="vllm", layout="pad").plan
    stock = {n: t.shape for n, t in Checkpoint.open(out).tensors.items()}
    shapes = {n: r.shape for n, r in recipes(plan, plan.virtual()).items()}
    o, q = "mtp.layers.0.self_attn.o_proj.", "mtp.layers.0.self_attn.q_proj."
    heads = plan.layout("q_heads").total()
    assert heads > 6 and stock[o + "weight"] == (256, 6 * 128) and shapes[o + "weight"] == (256, heads * 128)
    assert stock[o + "weight_scale"] == shapes[o + "weight_scale"] == (256,)
    assert stock[q + "weight_scale"] == (6 * 256,) and shapes[q + "weight_scale"] == (heads * 256,)
    assert shapes["mtp.fc.weight"] == stock["mtp.fc.weight"] == (256, 512)
