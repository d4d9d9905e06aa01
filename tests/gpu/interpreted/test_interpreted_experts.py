"""Routed experts by the kernels, run by Triton's interpreter, against a loop in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from native.words import Case, sample

from oddrank.gpu import experts_for
from oddrank.gpu.experts import GpuExperts, blocks_of, blocks_of_one

EXPERTS, HIDDEN, WIDTH = 5, 96, 64
FORMS = [
    Case("dense", dtype=torch.bfloat16),
    Case("fp8-block", (128, 128)),
    Case("fp8-block-ct", (64, 32)),
    Case("fp8-channel"),
    Case("fp8-channel-1d"),
    Case("fp8-tensor"),
    Case("fp8-tensor-ct"),
    Case("nvfp4"),
    Case("nvfp4-ct"),
    Case("mxfp4"),
    Case("int4-rows", (1, 32)),
    Case("int4-rows", (1, 128)),
    Case("int8-rows", (1, 32)),
    Case("int8-rows-symmetric", (1, 64)),
    Case("int8-channel"),
    Case("mxfp8"),
]
Numbers = np.ndarray


def layer(case: Case, stacked: bool) -> tuple[GpuExperts, list[tuple[Numbers, ...]]]:
    """The kernels' experts, and every expert's gate, up and down. Each has scales of its own, for the whole too."""
    shapes = [(2 * WIDTH, HIDDEN)] if stacked else [(WIDTH, HIDDEN)] * 2
    upper = [[sample(case, *shape, seed=10 * e + i) for i, shape in enumerate(shapes)] for e in range(EXPERTS)]
    lower = [[sample(case, HIDDEN, WIDTH, seed=10 * e + 7)] for e in range(EXPERTS)]
    banks, matrices = [], []
    for bank in (upper, lower):
        factors = [[2.0 ** (e - 2 * s) for s in range(len(bank[0]))] for e in range(EXPERTS)]
        for e, row in enumerate(bank):
            for s, one in enumerate(row):
                for suffix, part in one.stored.items():
                    if part.numel() == 1 and part.is_floating_point() and part.dtype != torch.float8_e4m3fn:
                        by = 1 / factors[e][s] if "global" in suffix else factors[e][s]
                        one.stored[suffix] = part * by
                        row[s] = one._replace(numbers=one.numbers * factors[e][s])
        suffixes = bank[0][0].stored
        banks.append({s: torch.stack([torch.stack([one.stored[s] for one in row]) for row in bank]) for s in suffixes})
    made = experts_for((upper[0][0].decoder, banks[0]), (lower[0][0].decoder, banks[1]), F.silu)
    assert made is not None
    for up, down in zip(upper, lower, strict=True):
        both = np.concatenate([one.numbers for one in up])
        matrices.append((both[:WIDTH], both[WIDTH:], down[0].numbers))
    return made, matrices


def batch(tokens: int, k: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    draw = np.random.default_rng([tokens, k])
    ids = np.stack([draw.choice(EXPERTS, k, replace=False) for _ in range(tokens)])
    x, weights = draw.normal(0, 0.01, (tokens, HIDDEN)), draw.uniform(0, 1, (tokens, k))
    return torch.from_numpy(x).to(dtype), torch.from_numpy(weights).float(), torch.from_numpy(ids)


def silu(v: Numbers) -> Numbers:
    return v / (1 + np.exp(-v))


def exact(matrices: list[tuple[Numbers, ...]], x: Numbers, weights: Numbers, ids: Numbers) -> tuple[Numbers, Numbers]:
    """The sum, and of each number the sum of magnitudes that went into it."""
    out, size = np.zeros_like(x), np.zeros_like(x)
    for t in range(len(x)):
        for w, e in zip(weights[t], ids[t], strict=True):
            gate, up, down = matrices[e]
            between = silu(gate @ x[t]) * (up @ x[t])
            scale = np.abs(gate) @ np.abs(x[t]) * (np.abs(up) @ np.abs(x[t]))
            out[t] += w * (down @ between)
            size[t] += w * (np.abs(down) @ (np.abs(between) + scale))
    return out, size


@pytest.mark.parametrize("stacked", [True, False], ids=["stacked", "two"])
@pytest.mark.parametrize("case", FORMS, ids=str)
def test_sums(case: Case, stacked: bool) -> None:
    """One token, few, and so many that they are sorted; bf16 rounds what lies between and the result."""
    made, matrices = layer(case, stacked)
    for tokens, k, dtype in ((1, 2, torch.float32), (2, 1, torch.bfloat16), (7 if stacked else 3, 3, torch.float32)):
        x, weights, ids = batch(tokens, k, dtype)
        assert made.takes(dtype)
        want, size = exact(matrices, x.double().numpy(), weights.double().numpy(), ids.numpy())
        got = made(x, weights, ids)
        rounding = 2.0**-6 if dtype == torch.bfloat16 else 64 * 2.0**-24
        assert got.dtype == dtype
        assert (np.abs(got.double().numpy() - want) <= size * rounding).all()
        assert np.abs(want).max() > 0


def test_more_tokens_than_a_block_has_room_for() -> None:
    """Blocks of 64 as in prefill; one expert has several, another none."""
    made, matrices = layer(Case("nvfp4"), True)
    x, weights, _ = batch(150, 1, torch.float32)
    ids = torch.tensor([0] * 90 + [3] * 60)[torch.randperm(150, generator=torch.Generator().manual_seed(0)), None]
    want, size = exact(matrices, x.double().numpy(), weights.double().numpy(), ids.numpy())
    assert (np.abs(made(x, weights, ids).double().numpy() - want) <= size * 64 * 2.0**-24).all()


@pytest.mark.parametrize(("tokens", "k", "size"), [(1, 4, 16), (40, 3, 16), (7, 1, 2), (200, 2, 64), (3, 5, 1)])
def test_blocks(tokens: int, k: int, size: int) -> None:
    """Every choice is in one block, of its own expert; blocks are no larger than they may be."""
    _, _, ids = batch(tokens, k, torch.float32)
    flat = ids.flatten()
    for blocks in (blocks_of(ids, EXPERTS, size), blocks_of_one(ids, 16)):
        seen = []
        for expert, start, stop in zip(*(t.tolist() for t in blocks[1:4]), strict=True):
            assert 0 <= stop - start <= blocks.size
            mine = blocks.order[start:stop].tolist()
            assert all(int(flat[choice]) == expert for choice in mine)
            seen += mine
        assert sorted(seen) == list(range(tokens * k))


def test_the_same_bits_in_any_company() -> None:
    """A token's sum does not depend on who else is in the batch, as long as blocks are of the same size."""
    made, _ = layer(Case("mxfp4"), False)
    x, weights, ids = batch(5, 2, torch.float32)
    together = made(x, weights, ids)
    turned = made(x.flip(0), weights.flip(0), ids.flip(0)).flip(0)
    assert torch.equal(together, turned)
    assert torch.equal(made(x[4:5], weights[4:5], ids[4:5]), together[4:5])


def test_nobody_chose_anything_and_other_activations() -> None:
    made, _ = layer(Case("mxfp4"), True)
    x, weights, ids = batch(4, 2, torch.float32)
    assert made(x[:0], weights[:0], ids[:0]).shape == (0, HIDDEN)
    assert not made(x, weights[:, :0], ids[:, :0]).any()
    one = sample(Case("nvfp4"), 32, 32)
    bank = {suffix: part[None, None] for suffix, part in one.stored.items()}
    assert experts_for((one.decoder, bank), (one.decoder, bank), F.relu) is None


def test_dense_weights_are_never_rounded() -> None:
    made, _ = layer(Case("dense", dtype=torch.bfloat16), True)
    assert made.takes(torch.bfloat16) and made.takes(torch.float32)
    assert not made.takes(torch.float16) and not made.takes(torch.float64)
