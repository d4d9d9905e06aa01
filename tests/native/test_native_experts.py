"""The compiled kernel of routed experts against numpy in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from native.words import Case, sample

from oddrank.native import Library, NativeExperts, native_experts

EXPERTS, HIDDEN, WIDTH = 9, 160, 96
FORMATS = [
    Case("dense", dtype=torch.bfloat16),
    Case("fp8-block", (128, 128)),
    Case("fp8-channel"),
    Case("nvfp4"),
    Case("mxfp4"),
    Case("int4-rows", (1, 32)),
    Case("int4-rows", (1, 128)),
    Case("int8-rows", (1, 64)),
    Case("int8-channel"),
    Case("mxfp8"),
]
Numbers = np.ndarray


def layer(case: Case, stacked: bool) -> tuple[NativeExperts, list[tuple[Numbers, ...]]]:
    """The kernel, and every expert's gate, up and down."""
    shapes = [(2 * WIDTH, HIDDEN)] if stacked else [(WIDTH, HIDDEN)] * 2
    upper = [[sample(case, *shape, seed=10 * e + i) for i, shape in enumerate(shapes)] for e in range(EXPERTS)]
    lower = [[sample(case, HIDDEN, WIDTH, seed=10 * e + 7)] for e in range(EXPERTS)]
    banks = []
    for bank in (upper, lower):
        suffixes = bank[0][0].stored
        banks.append({s: torch.stack([torch.stack([one.stored[s] for one in row]) for row in bank]) for s in suffixes})
    kernel = native_experts((upper[0][0].decoder, banks[0]), (lower[0][0].decoder, banks[1]), F.silu)
    assert kernel is not None
    matrices = []
    for up, down in zip(upper, lower, strict=True):
        both = np.concatenate([one.numbers for one in up])
        matrices.append((both[:WIDTH], both[WIDTH:], down[0].numbers))
    return kernel, matrices


def batch(tokens: int, k: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = np.random.default_rng(seed)
    ids = np.stack([draw.choice(EXPERTS, k, replace=False) for _ in range(tokens)])
    x, weights = draw.normal(0, 0.01, (tokens, HIDDEN)), draw.uniform(0, 1, (tokens, k))
    return torch.from_numpy(x).float(), torch.from_numpy(weights).float(), torch.from_numpy(ids)


def exact(matrices: list[tuple[Numbers, ...]], x: Numbers, weights: Numbers, ids: Numbers) -> tuple[Numbers, Numbers]:
    """The sum, and of each number the sum of magnitudes that went into it."""
    out, size = np.zeros_like(x), np.zeros_like(x)
    for t in range(len(x)):
        for w, e in zip(weights[t], ids[t], strict=True):
            gate, up, down = matrices[e]
            inner = silu(gate @ x[t]) * (up @ x[t])
            scale = np.abs(gate) @ np.abs(x[t]) * (np.abs(up) @ np.abs(x[t]))
            out[t] += w * (down @ inner)
            size[t] += w * (np.abs(down) @ (np.abs(inner) + scale))
    return out, size


def silu(v: Numbers) -> Numbers:
    return v / (1 + np.exp(-v))


@pytest.mark.parametrize("stacked", [True, False])
@pytest.mark.parametrize("case", FORMATS, ids=str)
def test_sums(case: Case, stacked: bool, level: str) -> None:
    kernel, matrices = layer(case, stacked)
    for tokens, k in ((1, 3), (5, 4), (40, 9)):
        x, weights, ids = batch(tokens, k, seed=tokens)
        want, size = exact(matrices, x.double().numpy(), weights.double().numpy(), ids.numpy())
        got = kernel(x, weights, ids, 1)
        assert (np.abs(got.double().numpy() - want) <= size * 64 * 2.0**-24).all()
        for threads in (2, 3):
            assert torch.equal(kernel(x, weights, ids, threads), got)


def test_an_activation_that_it_does_not_know(kernels: Library) -> None:
    made = sample(Case("nvfp4"), 32, 32)
    bank = {suffix: part[None, None] for suffix, part in made.stored.items()}
    assert native_experts((made.decoder, bank), (made.decoder, bank), F.relu) is None


def test_nobody_chose_anything(kernels: Library) -> None:
    kernel, _ = layer(Case("mxfp4"), True)
    x, weights, ids = batch(4, 2)
    assert kernel(x[:0], weights[:0], ids[:0], 2).shape == (0, HIDDEN)
    assert not kernel(x, weights[:, :0], ids[:, :0], 2).any()
