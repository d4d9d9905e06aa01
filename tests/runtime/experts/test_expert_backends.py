"""Every storage x every backend gives what numpy computes in float64 from the decoded matrices, at TP 1, 2 and 3."""

import numpy as np
import pytest
import torch
from runtime.experts.stacks import (
    CUTS,
    DENSE,
    FINE,
    KINDS,
    H,
    error,
    expected,
    experts,
    options,
    refined,
    routing,
    stack,
    stacked,
)  # fmt: skip
from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeExperts

BACKENDS = ("resident", "offload", "cpu", "hybrid")
BLOCKED = [kind for kind in KINDS if "fp8 block" in kind]
STACKABLE = [kind for kind in KINDS if kind in (DENSE, "fp8 channel, compressed-tensors") or "MXFP4" in kind]
"""Whose gate and up are one matrix without sharing a scale that they do not have in common."""


@pytest.fixture(autouse=True)
def _inference():
    with torch.inference_mode():
        yield


def summed(made, cuts, chosen, dtype, calls=1):
    """The ranks' terms, added: of the last of `calls` calls, so that a cache has been used."""
    x, weights, ids = routing().tensors(dtype)
    total = torch.zeros(x.shape, dtype=torch.float64)
    for cut in cuts:
        layer = experts(made, cut, chosen)
        for _ in range(calls):
            term = layer(x, weights, ids)
        assert term.dtype == dtype
        total += term
    return total


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_storage_on_every_backend(kind, backend):
    made, r = stack(kind), routing()
    wanted = expected(made, *r)
    for tp, cuts in CUTS.items():
        slots = {1: 2, 2: 6, 3: 4}[tp]  # fewer than a batch needs, all, and some
        chosen = options(backend, slots if backend in ("offload", "hybrid") else None)
        assert error(summed(made, cuts, chosen, torch.float64, calls=2), wanted) < 1e-13
    assert error(summed(made, CUTS[3], chosen, torch.float32), wanted) < 1e-5


@pytest.mark.parametrize("kind", BLOCKED)
@pytest.mark.parametrize("tp", FINE)
def test_scales_in_finer_blocks(kind, tp):
    made = stack(kind)
    wanted = expected(made, *routing())
    assert error(summed(refined(made), FINE[tp], options("cpu"), torch.float64), wanted) < 1e-13


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", STACKABLE)
def test_stacked_experts_are_the_same_experts(kind, backend):
    wanted = expected(stack(kind), *routing())
    chosen = options(backend, 3 if backend in ("offload", "hybrid") else None, load="parallel")
    for cuts in CUTS.values():
        assert error(summed(stacked(kind), cuts, chosen, torch.float64), wanted) < 1e-13


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_experts_of_transformers(backend):
    config = Qwen3_5MoeTextConfig(
        hidden_size=H, moe_intermediate_size=CUTS[1][0][1], num_experts=6, num_experts_per_tok=2, hidden_act="silu"
    )
    config._experts_implementation = "eager"
    hf = Qwen3_5MoeExperts(config).double()
    made = stack(DENSE)
    with torch.no_grad():
        hf.gate_up_proj.copy_(torch.from_numpy(np.stack([np.concatenate([m["gate"], m["up"]]) for m in made.matrices])))
        hf.down_proj.copy_(torch.from_numpy(np.stack([m["down"] for m in made.matrices])))
    x, weights, ids = routing().tensors(torch.float64)
    wanted = hf(x, ids, weights).numpy()
    chosen = options(backend, 3 if backend in ("offload", "hybrid") else None)
    assert error(summed(made, CUTS[3], chosen, torch.float64), wanted) < 1e-13


@pytest.mark.parametrize("backend", BACKENDS[1:])
@pytest.mark.parametrize("tokens", [1, 3, 80])
def test_each_backend_gives_the_bits_of_resident(backend, tokens):
    """On one thread they compute the same products in the same order, in decoding and in prefill."""
    made = stack("fp8 block, HF, bf16 scales")
    resident = experts(made, (128, 320), options())
    slots = 3 if backend in ("offload", "hybrid") else None
    other = experts(made, (128, 320), options(backend, slots))
    for seed in range(4):
        batch = routing(tokens, seed=seed).tensors(torch.float32)
        assert torch.equal(other(*batch), resident(*batch))


@pytest.mark.parametrize("backend", ["cpu", "hybrid"])
def test_threads_do_not_change_results(backend):
    made = stack("NVFP4, ModelOpt")
    layers = [
        experts(made, (0, 128), options(backend, 2 if backend == "hybrid" else None), threads=n) for n in (1, 2, 5)
    ]
    for seed in range(3):
        batch = routing(9, seed=seed).tensors(torch.float32)
        first, *others = [layer(*batch) for layer in layers]
        assert all(torch.equal(first, other) for other in others)


def test_half_precision_is_rounded_once_at_the_end():
    made, r = stack("MXFP4, Quark"), routing()
    x, weights, ids = r.tensors(torch.bfloat16)
    wanted = expected(made, x.double().numpy(), weights.double().numpy(), r.ids)
    found = experts(made, (0, 320), options("cpu"))(x, weights, ids)
    assert found.dtype == torch.bfloat16
    # one rounding of an exact number to 8 bits, and a little of fp32 arithmetic
    assert (np.abs(found.double().numpy() - wanted) <= np.abs(wanted) * 2**-8 + 1e-5 * np.abs(wanted).max()).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", [DENSE, "fp8 block, HF, bf16 scales", "NVFP4, ModelOpt"])
def test_a_rank_without_channels_and_a_batch_without_tokens_add_nothing(kind, backend):
    layer = experts(stack(kind), (128, 128), options(backend))
    layer.use(backend)
    x, weights, ids = routing().tensors(torch.float32)
    assert torch.equal(layer(x, weights, ids), torch.zeros_like(x))
    whole = experts(stack(kind), (0, 320), options(backend))
    assert whole(x[:0], weights[:0], ids[:0]).shape == (0, H)


def test_dense_experts_wider_than_the_weights_are_held_in_the_weights_type():
    made = stack(DENSE)
    wide = made._replace(
        tensors={
            name: raw._replace(dtype="F32", words=raw.words.astype(np.uint32) << 16)
            for name, raw in made.tensors.items()
        }
    )
    r = routing()
    half = experts(made, (0, 320), options(), weights=torch.float64)
    narrowed = experts(wide, (0, 320), options(), weights=torch.bfloat16)
    kept = experts(wide, (0, 320), options(), weights=torch.float32)
    assert half.held() == narrowed.held() == kept.held() // 2 == 2 * 3 * 6 * 320 * H
    for layer in (half, narrowed, kept):
        assert error(layer(*r.tensors(torch.float64)), expected(made, *r)) < 1e-13
