"""Norms, rotation, activations and sums, each level, against torch in float64 and transformers."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from oddrank.native import Library, elementwise
from oddrank.native.norm import rms_norm, rms_norm_
from oddrank.native.rotary import rotate_
from oddrank.runtime.layers.norm import UnitOffsetRMSNorm
from oddrank.runtime.layers.rotary import RotaryEmbedding

WIDTHS = [1, 7, 8, 33, 64, 257, 576]
EPS = 1e-5


def exact_norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def close(got: Tensor, want: Tensor, ulps: float = 8) -> bool:
    return torch.allclose(got.double(), want, rtol=ulps * 2.0**-24, atol=1e-30)


@pytest.mark.parametrize("width", WIDTHS)
def test_norm(width: int, level: str, kernels: Library) -> None:
    weight = torch.randn(width)
    for rows in (1, 5):
        x = torch.randn(rows, width) * torch.logspace(-3, 3, rows)[:, None]
        delta, before = torch.randn(rows, width), x.clone()
        assert close(rms_norm(kernels, x, weight, EPS), exact_norm(x, weight))
        assert torch.equal(x, before)
        got = rms_norm(kernels, x, weight, EPS, delta=delta)
        assert torch.equal(x, before + delta)
        assert close(got, exact_norm(x, weight))


@pytest.mark.parametrize("width", [4, 16, 20])
def test_norm_of_heads(width: int, level: str, kernels: Library) -> None:
    """Heads within wider rows: the others stay as they are."""
    product = torch.randn(3, 7, 2, width)
    before, weight = product.clone(), torch.randn(width)
    heads = product[:, 2:6, 1]
    assert close(rms_norm(kernels, heads, weight, EPS), exact_norm(heads, weight))
    assert torch.equal(product, before)
    rms_norm_(kernels, heads, weight, EPS)
    assert close(heads, exact_norm(before[:, 2:6, 1], weight))
    product[:, 2:6, 1] = before[:, 2:6, 1]
    assert torch.equal(product, before)


def test_norm_on_threads(level: str, kernels: Library) -> None:
    x, weight = torch.randn(301, 300), torch.randn(300)
    one = rms_norm(kernels, x, weight, EPS)
    assert close(one, exact_norm(x, weight))
    for threads in (2, 3):
        assert torch.equal(rms_norm(kernels, x, weight, EPS, threads=threads), one)


def test_norm_with_an_offset_is_that_of_transformers(level: str) -> None:
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5RMSNorm

    theirs = Qwen3_5RMSNorm(48, 1e-4).double()
    torch.nn.init.normal_(theirs.weight)
    ours = UnitOffsetRMSNorm("norm", 48, 1e-4, torch.float32)
    ours.weight.fill(theirs.weight.detach().float())
    theirs.weight.data = ours.weight.data.double()
    x, term = torch.randn(2, 7, 48)
    with torch.no_grad():
        assert torch.allclose(ours(x).double(), theirs(x.double()), rtol=1e-6, atol=1e-7)
        got = ours.add(x, term)
        assert torch.allclose(got.double(), theirs(x.double()), rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("rotated", [2, 6, 16, 32])
def test_rotation_is_that_of_transformers(rotated: int, level: str, kernels: Library) -> None:
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    positions = torch.tensor([5, 0, 211, 30])
    rotary = RotaryEmbedding(rope, rotated, 256, torch.float32)(positions, [(1, p + 1) for p in positions.tolist()])
    product = torch.randn(4, 5, 3, 32)
    before, heads = product.clone(), product[:, 1:4, 1]
    cos, sin = rotary.cos[:, 0], rotary.sin[:, 0, rotated // 2 :].repeat(1, 2)  # the first half is signed in ours
    part = before[:, 1:4, 1, :rotated].double().transpose(0, 1)[None]
    want, _ = apply_rotary_pos_emb(part, part, cos.double()[None], sin.double()[None])
    rotate_(kernels, heads, *rotary.table, rotary.places)
    assert torch.allclose(heads[..., :rotated].double(), want[0].transpose(0, 1), rtol=0, atol=1e-6)
    product[:, 1:4, 1, :rotated] = before[:, 1:4, 1, :rotated]
    assert torch.equal(product, before)


TORCH = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}


@pytest.mark.parametrize("name", elementwise.ACTIVATIONS)
def test_activations(name: str, level: str, kernels: Library) -> None:
    code = elementwise.ACTIVATIONS.index(name)
    special = torch.tensor([0.0, -0.0, 1e-30, -1e-30, 88.0, -88.0, 104.0, -104.0, 1e4, -1e4, 3e38, -3e38])
    gate = torch.cat([torch.linspace(-30, 30, 5001), special])
    got = elementwise.gated(kernels, torch.cat([gate, torch.ones_like(gate)])[None], code)[0]
    want = TORCH[name](gate.double())
    # rounding of fp32, and of the sum 1 + erf or 1 + e^-x far below one
    assert torch.allclose(got.double(), want, rtol=4e-7, atol=3e-7)
    odd = torch.tensor([[float("nan"), float("inf"), 1.0, 1.0]])
    got = elementwise.gated(kernels, odd, code)[0]
    assert got[0].isnan() and got[1] == float("inf")


@pytest.mark.parametrize("width", [1, 5, 48, 5000])
def test_gated_rows(width: int, level: str, kernels: Library) -> None:
    both, scale = torch.randn(9, 2 * width), torch.randn(9, 1)
    gate, up = both.double().chunk(2, -1)
    plain = elementwise.gated(kernels, both, 0)
    assert torch.allclose(plain.double(), F.silu(gate) * up, rtol=1e-6, atol=1e-7)
    scaled = elementwise.gated(kernels, both, 0, scale)
    assert torch.allclose(scaled.double(), F.silu(gate) * up * torch.sigmoid(scale.double()), rtol=1e-6, atol=1e-7)
    for threads in (2, 3):
        assert torch.equal(elementwise.gated(kernels, both, 0, scale, threads), scaled)


def test_sums_and_copies(level: str) -> None:
    x, y = torch.randn(2, 7, 13)
    bias = torch.randn(13)
    want = x + y
    assert torch.equal(elementwise.add_(x, y), want) and torch.equal(x, want)
    want = x + bias
    assert torch.equal(elementwise.add_(x, bias.expand(7, 13)), want)
    wide = torch.randn(7, 40)
    want = x + wide[:, 5:18]
    assert torch.equal(elementwise.add_(x, wide[:, 5:18]), want)
    want = x + wide.t()[:13].t()
    assert torch.equal(elementwise.add_(x, wide.t()[:13].t()), want)
    copy = elementwise.copy_of(bias.expand(7, 13))
    assert torch.equal(copy, bias.expand(7, 13)) and copy.is_contiguous()
    assert not elementwise.zeros((3, 5), torch.float32, torch.device("cpu")).any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_numbers_are_torchs(dtype: torch.dtype) -> None:
    x, y = torch.randn(2, 3, 8).to(dtype)
    want = x + y
    assert torch.equal(elementwise.add_(x, y), want)
    assert torch.equal(elementwise.copy_of(y), y)
    assert elementwise.zeros((2,), dtype, x.device).dtype == dtype
