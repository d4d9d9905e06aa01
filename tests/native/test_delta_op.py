"""The gated delta step, each level, against transformers' modules in float64."""

from __future__ import annotations

import pytest
import torch
from native.delta_nets import Net, theirs, written_out

from oddrank.native import Library

CASES = [
    (1, [0], (8, 8), 4),
    (2, [0, 0, 1, 1], (16, 24), 4),
    (3, [2, 0, 0, 2, 1], (5, 7), 2),
    (2, [1, 0, 1], (33, 20), 3),
]


@pytest.mark.parametrize(("k_heads", "partner", "widths", "kernel"), CASES, ids=str)
def test_steps(
    k_heads: int, partner: list[int], widths: tuple[int, int], kernel: int, level: str, kernels: Library
) -> None:
    """Several in a row, two of three slots; both references, each from the states before the step."""
    net = Net.random(k_heads, partner, widths, kernel, 3)
    idle = net.inputs[2].clone(), net.memory[2].clone()
    for n in (2, 2, 1):
        projected = net.project(n)
        exact, modules = written_out(net, projected), theirs(net, projected)
        got = net.step(kernels, projected)
        for want, bound in ((exact, 5e-6), (modules, 2e-5)):
            # a norm of a small vector makes its rounding larger
            assert torch.allclose(got.double(), want[0], rtol=1e-4, atol=bound)
            assert torch.equal(net.inputs[:n].double(), want[1])
            assert torch.allclose(net.memory[:n].double(), want[2], rtol=0, atol=bound)
    assert torch.equal(net.inputs[2], idle[0]) and torch.equal(net.memory[2], idle[1])


def test_any_number_of_threads(level: str, kernels: Library) -> None:
    net = Net.random(4, [0, 1, 2, 3, 3, 2, 1, 0], (64, 128), 4, 3)
    projected = net.project(3)
    found = []
    for threads in (1, 2, 3):
        copy = net._replace(inputs=net.inputs.clone(), memory=net.memory.clone())
        found.append((copy.step(kernels, projected, threads), copy.inputs, copy.memory))
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("a", [-1e4, -30.0, 19.9, 20.1, 1e4])
def test_decays_of_every_size(a: float, level: str, kernels: Library) -> None:
    net = Net.random(1, [0, 0], (8, 16), 4, 1)
    qkv, z, b, gates = net.project(1)
    gates.fill_(a)
    want = written_out(net, (qkv, z, b, gates))
    got = net.step(kernels, (qkv, z, b, gates))
    assert torch.allclose(got.double(), want[0], rtol=1e-4, atol=1e-5)
    assert torch.allclose(net.memory.double(), want[2], rtol=0, atol=5e-6)


def test_what_a_head_does_not_read_does_not_reach_it(level: str, kernels: Library) -> None:
    """A key head without a value head, and a value head whose state is not finite."""
    net = Net.random(3, [2, 0, 2], (8, 8), 4, 1)
    projected = net.project(1)
    want, _, memory = written_out(net, projected)
    projected[0][0, 8:16] = float("nan")
    net.memory[0, 1] = float("inf")
    got = net.step(kernels, projected).view(3, 8)
    assert torch.allclose(got[[0, 2]].double(), want.view(3, 8)[[0, 2]], rtol=1e-4, atol=1e-5)
    assert torch.allclose(net.memory[0, [0, 2]].double(), memory[0, [0, 2]], rtol=0, atol=5e-6)
    assert got[1].isnan().all()


def test_a_dummy_head_stays_zero(level: str, kernels: Library) -> None:
    net = Net.random(1, [0, 0], (8, 8), 4, 1)
    for part in (net.taps, net.inputs, net.memory, net.a_log, net.dt_bias):
        part.zero_()
    assert not net.step(kernels, tuple(torch.zeros_like(x) for x in net.project(1))).any()
    assert not net.memory.any()
