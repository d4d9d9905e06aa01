"""Every stored form decoded by the runtime, against numpy and words that compressed-tensors made."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from formats.codec import E2M1
from formats.dialects import DIALECTS
from runtime.quantized.stores import EVERY, SERVED, Matrix, Store, tensors

from oddrank.errors import OddrankError
from oddrank.formats import formats
from oddrank.formats.declared import kind_of
from oddrank.layout.executors import RUNTIME
from oddrank.runtime.formats import base, decoder

SHAPES = [(128, 128), (304, 192), (1, 64), (64, 448)]


def usual(name: str) -> str:
    """Without the columns of a scale group of packed integers, which any checkpoint may choose."""
    return re.sub(r"^(int\d-(?:pack|gptq|awq).*)-(?:g\d+|channel)$", r"\1", name)


def test_every_format_that_is_declared_has_its_decoder() -> None:
    served = {name for name in formats() if kind_of(name) in RUNTIME.formats}
    served.remove("mxfp4-blocks")  # gpt-oss's stacked experts: see tests/formats/test_gpt_oss_experts.py
    assert {usual(d.format) for d in EVERY.values()} == {usual(name) for name in served}
    assert all(decoder(name).name == name for name in served)
    with pytest.raises(OddrankError, match=r"int3.*fp8, int4-awq, .*, mxfp4, mxfp8, nvfp4"):
        decoder("int3-g128")


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", sorted(SERVED))
def test_numbers(name: str, shape: tuple[int, int]) -> None:
    if shape[0] % SERVED[name].cut[0] == 1:
        shape = (8, shape[1])  # rows of words
    whole = Matrix.of(name, *shape)
    stored, form = tensors(whole.parts), decoder(SERVED[name].format)
    want = torch.from_numpy(whole.decode())
    for suffix, tensor in stored.items():
        assert form.shape(suffix, *shape) == tensor.shape
    assert torch.allclose(form.dequantize(stored, torch.float64), want, rtol=1e-15, atol=0)
    assert torch.allclose(form.dequantize(stored, torch.float32).double(), want, rtol=3e-7, atol=0)
    # two experts, stacked: two matrices with scales of their own
    other = tensors(Matrix.of(name, *shape, seed=1).parts)
    both = form.dequantize({s: torch.stack([t, other[s]]) for s, t in stored.items()}, torch.float64)
    assert torch.equal(both[0], form.dequantize(stored, torch.float64))
    assert torch.equal(both[1], form.dequantize(other, torch.float64))


@pytest.mark.parametrize("name", sorted(n for n, d in DIALECTS.items() if d.block == (128, 128)))
def test_refined_scales(name: str) -> None:
    """Scales of blocks of 64 along the dimension that was cut; a rank of 192 rows or columns has three of them."""
    whole = Matrix.of(name, 512, 320)
    for rows, columns in ((range(192, 384), None), (None, range(64, 256))):
        part = whole.cut(rows, columns)
        form = decoder(part.dialect.format, Store({"m": part}).matrix("m").blocks)
        want = whole.decode()[rows or slice(None)][:, columns or slice(None)]
        assert np.array_equal(form.dequantize(tensors(part.parts), torch.float64).numpy(), want)


@pytest.mark.parametrize("name", sorted(EVERY))
def test_products_and_rows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tile by tile, with a short last tile; x in any type is multiplied in fp32 or wider."""
    m = Matrix.of(name, 304, 192)
    form, stored, want = decoder(m.dialect.format), tensors(m.parts), torch.from_numpy(m.decode())
    bias = torch.randn(304, dtype=torch.float64)
    monkeypatch.setattr(base, "_TILE_ELEMENTS", 192 * 140)
    for dtype, bound in ((torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 2.0**-8)):
        for count in (1, 7):
            x = torch.randn(count, 192, dtype=torch.float64).to(dtype)
            got = form.linear(x, stored, bias.to(dtype))
            exact = x.double() @ want.t() + bias.to(dtype).double()
            assert got.dtype == dtype
            assert float((got.double() - exact).abs().max() / exact.abs().max()) < bound
    rows = torch.tensor([303, 0, 128, 127, 64, 299])
    assert torch.allclose(form.take(stored, rows, torch.float64), want[rows], rtol=1e-15, atol=0)
    assert form.take(stored, rows, torch.bfloat16).dtype == torch.bfloat16


@pytest.mark.parametrize("name", sorted(EVERY))
@pytest.mark.parametrize("shape", [(0, 64), (64, 0)])
def test_nothing_stored(name: str, shape: tuple[int, int]) -> None:
    """A rank without a unit of the axis."""
    form = decoder(EVERY[name].format)
    held = tensors(Matrix.of(name, 64, 64).parts)
    stored = {s: torch.zeros(form.shape(s, *shape), dtype=t.dtype) for s, t in held.items()}
    if ".weight_shape" in stored:
        stored[".weight_shape"] = torch.tensor(shape)
    assert form.dequantize(stored, torch.float32).shape == shape
    out = form.linear(torch.ones(3, shape[1]), stored)
    assert out.shape == (3, shape[0]) and not out.any()


def test_all_bytes_of_four_bit_numbers() -> None:
    """The low nibble is the even column."""
    codes = torch.arange(256, dtype=torch.uint8).reshape(1, 256)
    stored = {".weight": codes, ".weight_scale": torch.full((1, 16), 127).byte()}
    got = decoder("mxfp4").dequantize(stored, torch.float64)
    assert got[0, 0::2].tolist() == [E2M1[i & 15] for i in range(256)]
    assert got[0, 1::2].tolist() == [E2M1[i >> 4] for i in range(256)]


def test_all_exponents() -> None:
    """2^(e - 127) down to fp32's subnormals; 255 is NaN. A dummy column has 0x00 and decodes to zero, not to NaN."""
    scale = torch.arange(256, dtype=torch.uint8).reshape(256, 1)
    ones = torch.full((256, 16), 0x22, dtype=torch.uint8)  # 1.0 twice
    for dtype in (torch.float32, torch.float64):
        got = decoder("mxfp4").dequantize({".weight": ones, ".weight_scale": scale}, dtype)[:, 0].double()
        assert torch.equal(got[:255], torch.ldexp(torch.ones(255).double(), torch.arange(255) - 127))
        assert got[255].isnan()
    zeros = {".weight": torch.zeros(1, 16, dtype=torch.uint8), ".weight_scale": torch.zeros(1, 1, dtype=torch.uint8)}
    assert not decoder("mxfp4").dequantize(zeros, torch.float32).any()


def test_global_scales_of_the_two_nvfp4_dialects_are_reciprocals() -> None:
    """Taken for each other, weights are off by a factor of millions (traps: 12)."""
    m = Matrix.of("NVFP4, ModelOpt", 32, 64)
    stored = tensors(m.parts)
    want = decoder("nvfp4").dequantize(stored, torch.float64)
    assert torch.allclose(want, torch.from_numpy(m.decode()), rtol=1e-15)
    renamed = {
        ".weight_packed": stored[".weight"], ".weight_scale": stored[".weight_scale"],
        ".weight_global_scale": (1 / stored[".weight_scale_2"].double()).reshape(1).float(),
    }  # fmt: skip
    assert torch.allclose(decoder("nvfp4-ct").dequantize(renamed, torch.float64), want, rtol=1e-6)
    renamed[".weight_global_scale"] = stored[".weight_scale_2"].reshape(1)
    assert float((decoder("nvfp4-ct").dequantize(renamed, torch.float64) / want).nanmedian()) > 1e4
