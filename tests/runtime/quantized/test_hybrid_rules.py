"""The one rule on models with experts and states, and the plans that such a model refuses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hybrid.random_plans import ragged_plan
from hybrid.tiny import tiny_subject
from runtime.quantized.hybrids import FAMILIES, FULL, LINEAR, Hybrid, distance, hybrid, reference, solved, weighted

from oddrank.errors import OddrankError
from oddrank.layout.layouts import Layout
from oddrank.layout.plan import Plan
from oddrank.runtime.models import Llama
from oddrank.runtime.models.llama import Block, FeedForward, full_logits
from oddrank.runtime.models.qwen3_5 import GatedAttention, GatedDeltaNet
from oddrank.runtime.models.qwen3_5_moe import SparseMoE
from oddrank.runtime.parallel import Partial


class _NotReduced(Block):
    def __call__(self, h, rotary, step, cache):  # type: ignore[no-untyped-def]
        h += self.self_attn(h.normed(self.input_layernorm), rotary, step, cache).reduce()
        h += self.mlp(h.normed(self.post_attention_layernorm))
        return h


class _ReducedTwice(Block):
    def __call__(self, h, rotary, step, cache):  # type: ignore[no-untyped-def]
        term = self.mlp(h.normed(self.post_attention_layernorm))
        h += term.reduce()
        h += term.reduce()
        return h


class _BiasInside(Block):
    def __call__(self, h, rotary, step, cache):  # type: ignore[no-untyped-def]
        term = self.self_attn(h.normed(self.input_layernorm), rotary, step, cache)
        h += (term + torch.ones(term.shape[-1], dtype=term.dtype)).reduce()
        return h


class _ExpertsReducedInside(SparseMoE):
    """And outside once more: exactly twice the right value at two ranks (traps: 27)."""

    def __call__(self, x):  # type: ignore[no-untyped-def]
        weights, ids = self.router(x)
        return Partial(self.experts(x, weights, ids), self.group).reduce() + self.shared_expert(x)


class _TwoReduces(SparseMoE):
    """Routed and shared experts each reduced: right, and one collective too many."""

    def __call__(self, x):  # type: ignore[no-untyped-def]
        weights, ids = self.router(x)
        return Partial(self.experts(x, weights, ids), self.group).reduce() + self.shared_expert(x).reduce()


class _SharedForgotten(SparseMoE):
    """The shared expert as a plain tensor beside the sum."""

    def __call__(self, x):  # type: ignore[no-untyped-def]
        weights, ids = self.router(x)
        return Partial(self.experts(x, weights, ids), self.group) + self.shared_expert.gate(x)


def _blocks(kind: type[Block]) -> Callable[[Llama], None]:
    def change(model: Llama) -> None:
        for layer in model.layers:
            layer.__class__ = kind

    return change


def _experts(kind: type[FeedForward]) -> Callable[[Llama], None]:
    def change(model: Llama) -> None:
        for layer in model.layers:
            layer.mlp.__class__ = kind

    return change


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize(
    "change",
    [
        _blocks(_NotReduced), _blocks(_ReducedTwice), _blocks(_BiasInside), _experts(_ExpertsReducedInside),
        _experts(_TwoReduces), _experts(_SharedForgotten),
    ],
    ids=["none", "twice", "bias inside", "inside and outside", "two reduces", "a tensor in the sum"],
)  # fmt: skip
def test_a_model_that_breaks_the_rule_does_not_run(change: Callable[[Llama], None], tp: int) -> None:
    m = hybrid("qwen3_5_moe")

    def work(model: Llama) -> None:
        change(model)
        full_logits(model, [1, 2, 3])

    with pytest.raises((TypeError, AttributeError), match=r"Partial|reduce"):
        m.on_ranks(solved(m, tp), work)


def changed(m: Hybrid, change: Callable[[Llama], None], tp: int = 3, plan: Callable[..., Plan] = solved) -> float:
    """How far a change to every rank's model moves the logits from transformers'."""
    tokens = m.tokens(9)

    def work(model: Llama) -> torch.Tensor:
        change(model)
        return full_logits(model, tokens)

    return distance(m.on_ranks(plan(m, tp), work)[0], reference(m, tokens))


def test_what_these_models_depend_on() -> None:
    """Each a fault that keeps every shape; the logits show it."""
    moe, dense = hybrid("qwen3_5_moe", bias=True), hybrid("qwen3_5")

    def of(kind: type, do: Callable[[Any], None]) -> Callable[[Llama], None]:
        def change(model: Llama) -> None:
            for module in model.modules():
                if isinstance(module, kind):
                    do(module)

        return change

    def bias_everywhere(attention: GatedAttention) -> None:  # traps: 28
        attention.o_proj.bias_owner = True

    def other_keys(net: GatedDeltaNet) -> None:
        net.rule.partner = net.rule.partner.flip(0)

    def gates_swapped(attention: GatedAttention) -> None:
        inner = attention.attention
        inner.q_norm, inner.k_norm = inner.k_norm, inner.q_norm

    def not_renormalised(moe: SparseMoE) -> None:
        route = moe.router
        moe.router = lambda x: (route(x)[0] * 0.9, route(x)[1])  # type: ignore[assignment,misc]

    assert changed(moe, lambda model: None) < 1e-9 and changed(dense, lambda model: None) < 1e-9
    assert changed(moe, of(GatedAttention, bias_everywhere)) > 1e-3
    assert changed(dense, of(GatedDeltaNet, other_keys), plan=weighted) > 1e-3
    assert changed(dense, of(GatedAttention, gates_swapped)) > 1e-3
    assert changed(moe, of(SparseMoE, not_renormalised)) > 1e-4


def _rotating(m: Hybrid, part: float | None) -> Hybrid:
    """The same weights under a config that rotates this part of each head, or does not say."""
    rope = {k: v for k, v in m.config["rope_parameters"].items() if k != "partial_rotary_factor"}
    said = rope if part is None else rope | {"partial_rotary_factor": part}
    config = m.config | {"rope_parameters": said}
    return Hybrid(config, m.weights, tiny_subject(config, m.weights))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_quarter_of_a_head_is_rotated_where_the_config_does_not_say(family: str) -> None:
    m = _rotating(hybrid(family), None)
    tokens = m.tokens(9)
    for logits in m.on_ranks(solved(m, 2), lambda model: full_logits(model, tokens)):
        assert distance(logits, reference(m, tokens)) < 1e-9


@pytest.mark.parametrize(("part", "channels"), [(0.0, 0), (0.4, 3)])
def test_channels_that_make_no_pairs_are_refused(part: float, channels: int) -> None:
    m = _rotating(hybrid("qwen3_5"), part)
    with pytest.raises(OddrankError, match=f"rotates {part} of each head's 8 channels, which is {channels}"):
        m.on_ranks(solved(m, 1), lambda model: None)


@pytest.mark.parametrize(
    "experts", [[0, 1, 2, 3, 4, -1], [0, 1, 2, 3], [1, 0, 2, 3, 4]], ids=["a dummy", "one missing", "moved"]
)
def test_the_router_chooses_among_the_models_experts_and_no_others(experts: list[int]) -> None:
    """A dummy expert would be chosen (traps: 30): such a plan is refused."""
    m = hybrid("qwen3_5_moe")
    plan = solved(m, 2)
    other = Layout.of("experts", [experts] * 2, in_engine=True)
    layouts = tuple(other if la.axis == "experts" else la for la in plan.layouts)
    with pytest.raises(OddrankError, match=r"mlp.gate: .*chooses among the model's 5"):
        m.on_ranks(msgspec.structs.replace(plan, layouts=layouts), lambda model: None)


def test_ranks_without_a_unit_of_an_axis() -> None:
    """Random cuts into seven: of every axis some rank has nothing at all, and adds nothing."""
    m = hybrid("qwen3_5_moe", layers=(LINEAR, FULL))
    tokens, without = m.tokens(9), set[str]()
    want = reference(m, tokens)
    for seed in range(40):
        plan = ragged_plan(m.subject, np.random.default_rng(seed), 7)
        empty = {la.axis for la in plan.layouts if 0 in la.counts()}
        if empty <= without:
            continue
        without |= empty
        for logits in m.on_ranks(plan, lambda model: full_logits(model, tokens)):
            assert distance(logits, want) < 1e-9
    assert without >= {"q_heads", "kv_heads", "gdn_v_heads", "gdn_k_heads", "moe", "shared", "vocab"}


def test_experts_of_equal_weight_are_the_first_on_every_rank() -> None:
    """The router is computed on every rank; the same bits go in, so the same experts come out."""
    m = hybrid("qwen3_5_moe")
    weights = {n: np.zeros_like(w) if n.endswith("mlp.gate.weight") else w for n, w in m.weights.items()}
    tied = m._replace(weights=weights)

    def work(model: Llama) -> torch.Tensor:
        ids = model.layers[0].mlp.router(torch.ones(3, model.config.hidden, dtype=torch.float64))[1]  # type: ignore[attr-defined]
        return torch.cat([ids.flatten().double(), full_logits(model, [1, 2, 3]).flatten()])

    ranks = tied.on_ranks(solved(tied, 3), work)
    assert all(torch.equal(r, ranks[0]) for r in ranks)
