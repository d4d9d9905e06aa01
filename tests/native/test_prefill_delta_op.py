"""Prompts through the gated delta rule, each level, against the paper's equation token by token in float64."""

from __future__ import annotations

import pytest
import torch
from native.delta_nets import Net, written_out
from torch import Tensor

from oddrank.native import Library

CASES = [
    (1, [0], (8, 8), 4),
    (2, [0, 0, 1, 1], (16, 32), 4),
    (3, [2, 0, 0, 2, 1], (5, 7), 2),
    (2, [1, 0, 1], (33, 20), 3),
    (1, [0, 0], (128, 128), 4),
]
LENGTHS = (1, 5, 64, 65, 3, 150)
"""Less than a chunk, whole chunks, one token more; whole rows of a level's products and not."""
SLOTS = (2, 0, 3, 1, 6, 5)


def spans_of(lengths: tuple[int, ...], slots: tuple[int, ...]) -> Tensor:
    starts = [sum(lengths[:i]) for i in range(len(lengths))]
    return torch.tensor([(slot, start, count, 0) for slot, start, count in zip(slots, starts, lengths, strict=True)])


def token_by_token(net: Net, projected: tuple[Tensor, ...], spans: Tensor) -> tuple[Tensor, Tensor]:
    """(output, memory after), float64."""
    outs, memory = [], net.memory.double()
    for slot, start, count, _ in spans.tolist():
        one = net._replace(inputs=net.inputs[slot, None].double(), memory=memory[slot, None].clone())
        for t in range(start, start + count):
            out, inputs, state = written_out(one, tuple(x[t, None] for x in projected))
            one = one._replace(inputs=inputs, memory=state)
            outs.append(out)
        memory[slot] = one.memory[0]
    return torch.cat(outs), memory


@pytest.mark.parametrize(("k_heads", "partner", "widths", "kernel"), CASES, ids=str)
def test_prompts(
    k_heads: int, partner: list[int], widths: tuple[int, int], kernel: int, level: str, kernels: Library
) -> None:
    lengths = LENGTHS if widths[0] < 128 else (70, 1)
    torch.manual_seed(widths[0])
    net = Net.random(k_heads, partner, widths, kernel, 8)
    spans = spans_of(lengths, SLOTS[: len(lengths)])
    projected = net.project(sum(lengths))
    want, memory = token_by_token(net, projected, spans)
    got = net.prompts(kernels, projected, spans)
    # a norm of a small vector makes its rounding larger
    assert torch.allclose(got.double(), want, rtol=1e-3, atol=5e-5)
    assert torch.allclose(net.memory.double(), memory, rtol=0, atol=2e-5)


@pytest.mark.parametrize("a", [-1e4, -30.0, 0.0, 1e4])
def test_decays_of_every_size(a: float, level: str, kernels: Library) -> None:
    torch.manual_seed(1)
    net = Net.random(1, [0, 0], (16, 16), 4, 1)
    projected = net.project(100)
    projected[3].fill_(a)
    spans = spans_of((100,), (0,))
    want, memory = token_by_token(net, projected, spans)
    got = net.prompts(kernels, projected, spans)
    assert torch.allclose(got.double(), want, rtol=1e-3, atol=5e-5)
    assert torch.allclose(net.memory.double(), memory, rtol=0, atol=2e-5)


def test_any_number_of_threads_and_any_neighbours(level: str, kernels: Library) -> None:
    torch.manual_seed(2)
    net = Net.random(4, [0, 1, 2, 3, 3, 2, 1, 0], (64, 40), 4, 3)
    projected, spans = net.project(110), spans_of((70, 1, 39), (1, 2, 0))
    found = []
    for threads in (1, 2, 3):
        copy = net._replace(inputs=net.inputs.clone(), memory=net.memory.clone())
        found.append((copy.prompts(kernels, projected, spans, threads), copy.inputs, copy.memory))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))
    alone = net._replace(inputs=net.inputs.clone(), memory=net.memory.clone())
    out = alone.prompts(kernels, tuple(x[:70] for x in projected), spans[:1])
    assert torch.equal(out, found[0][0][:70]) and torch.equal(alone.memory[1], found[0][2][1])


def test_a_head_that_is_not_finite_stays_alone(level: str, kernels: Library) -> None:
    torch.manual_seed(3)
    net = Net.random(1, [0, 0, 0], (8, 8), 4, 1)
    projected, spans = net.project(20), spans_of((20,), (0,))
    want, memory = token_by_token(net, projected, spans)
    net.memory[0, 1] = float("inf")
    got = net.prompts(kernels, projected, spans).view(20, 3, 8)
    assert torch.allclose(got[:, [0, 2]].double(), want.view(20, 3, 8)[:, [0, 2]], rtol=1e-3, atol=5e-5)
    assert torch.allclose(net.memory[0, [0, 2]].double(), memory[0, [0, 2]], rtol=0, atol=2e-5)
    assert not got[:, 1].isfinite().any()


def test_a_dummy_head_stays_zero(level: str, kernels: Library) -> None:
    net = Net.random(1, [0, 0], (8, 8), 4, 1)
    for part in (net.taps, net.inputs, net.memory, net.a_log, net.dt_bias):
        part.zero_()
    nothing = net.project(70)
    for part in nothing:
        part.zero_()
    assert not net.prompts(kernels, nothing, spans_of((70,), (0,))).any()
    assert not net.memory.any()
