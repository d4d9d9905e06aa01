"""Random stored words of every format that the kernels take, and what they stand for, by numpy in float64."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from formats.codec import E2M1, E4M3, exponents
from torch import Tensor

from oddrank.runtime.formats import Decoder, decoder
from oddrank.runtime.formats.rows import RowsDecoder


class Case(NamedTuple):
    """name: of the format; block: of the scales of fp8 and of integers in rows (rows, columns)."""

    name: str
    block: tuple[int, int] = (0, 0)
    dtype: torch.dtype = torch.float32

    def decoder(self, k: int = 0) -> Decoder:
        if "-rows" in self.name:
            return RowsDecoder(self.block[1], k, int(self.name[3]), not self.name.endswith("symmetric"))
        if not self.name.startswith("fp8-block"):
            return decoder(self.name)
        suffix = ".weight_scale" if "ct" in self.name else ".weight_scale_inv"
        return decoder(self.name, {suffix: self.block})

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{self.name}-{self.block[0]}x{self.block[1]}-{dtype}" if self.block[0] else f"{self.name}-{dtype}"


CASES = [
    Case("dense", dtype=torch.bfloat16),
    Case("dense", dtype=torch.float16),
    Case("fp8-block", (128, 128)),
    Case("fp8-block", (64, 128), torch.bfloat16),
    Case("fp8-block-ct", (128, 64)),
    Case("fp8-block", (1, 32)),
    Case("fp8-channel", dtype=torch.bfloat16),
    Case("fp8-channel-1d"),
    Case("fp8-tensor"),
    Case("fp8-tensor-ct"),
    Case("nvfp4"),
    Case("nvfp4-ct"),
    Case("mxfp4"),
    Case("mxfp4-ct"),
    Case("mxfp8"),
    Case("int4-rows", (1, 32)),
    Case("int4-rows", (1, 64), torch.float16),
    Case("int4-rows", (1, 128), torch.bfloat16),
    Case("int8-rows", (1, 32), torch.float16),
    Case("int8-rows", (1, 128)),
    Case("int8-rows-symmetric", (1, 32), torch.bfloat16),
    Case("int8-rows-symmetric", (1, 64)),
    Case("int8-channel", dtype=torch.bfloat16),
    Case("int8-tensor"),
]


class Sample(NamedTuple):
    decoder: Decoder
    stored: dict[str, Tensor]
    numbers: np.ndarray[tuple[int, ...], np.dtype[np.float64]]


def sample(case: Case, n: int, k: int, seed: int = 0) -> Sample:
    """[n, k] of all codes but those of NaN and infinity; row 0 is zero where there are others."""
    draw, form = np.random.default_rng(seed), case.decoder(k)
    stored: dict[str, Tensor] = {}
    suffixes = [s.suffix for s in form.format.stored if not s.optional]
    shapes = [form.shape(suffix, n, k) for suffix in suffixes]
    zero = slice(0, 1 if n > 1 else 0)
    kind = case.name.partition("-")[0]
    if kind == "dense":
        values = torch.from_numpy(draw.normal(0, 1, (n, k))).to(case.dtype)
        values[zero] = 0
        return Sample(form, {suffixes[0]: values}, values.double().numpy())
    codes = draw.integers(0, 256, shapes[0], np.uint8)
    if kind == "int4":
        return _int4(case, form, codes, shapes[1], zero, k, draw)
    if "-rows" in case.name:
        return _int8(case, form, codes, shapes[1], zero, k, draw)
    codes[zero] = 0
    if kind == "int8":
        scales = torch.from_numpy(draw.uniform(-2, 2, shapes[1])).to(case.dtype)
        numbers = codes.view(np.int8).astype(np.float64) * scales.double().numpy()
        return Sample(form, {suffixes[0]: torch.from_numpy(codes).view(torch.int8), suffixes[1]: scales}, numbers)
    if kind in ("fp8", "mxfp8"):
        codes[codes & 127 == 127] = 3  # subnormal; others are among the rest
    if kind == "mxfp8":
        scales = draw.integers(120, 130, shapes[1], np.uint8)
        stored = {suffixes[0]: torch.from_numpy(codes).view(torch.float8_e4m3fn), suffixes[1]: torch.from_numpy(scales)}
        numbers = E4M3[codes].astype(np.float64) * np.repeat(exponents(scales), 32, 1)[:, :k]
        return Sample(form, stored, numbers)
    if kind == "fp8":
        scales = torch.from_numpy(draw.uniform(-2, 2, shapes[1])).to(case.dtype)
        spread = scales.double().numpy()
        rows, columns = form.blocks[suffixes[1]]
        if spread.ndim == 1 and len(spread) == n and case.name.endswith("1d"):
            spread = spread[:, None]
        if spread.ndim == 2:
            spread = np.repeat(spread, rows or 1, 0)[:n]
            spread = np.repeat(spread, columns, 1)[:, :k] if columns else spread
        stored = {suffixes[0]: torch.from_numpy(codes).view(torch.float8_e4m3fn), suffixes[1]: scales}
        return Sample(form, stored, E4M3[codes].astype(np.float64) * spread)
    pairs = np.stack([codes & 15, codes >> 4], -1).reshape(n, -1)[:, :k]
    stored[suffixes[0]] = torch.from_numpy(codes)
    if kind == "mxfp4":
        scales = draw.integers(120, 130, shapes[1], np.uint8)
        stored[suffixes[1]] = torch.from_numpy(scales)
        return Sample(form, stored, E2M1[pairs] * np.repeat(exponents(scales), 32, 1)[:, :k])
    scales = draw.integers(0, 127, shapes[1], np.uint8) | draw.integers(0, 2, shapes[1], np.uint8) << 7
    whole = torch.tensor(0.0123).reshape(shapes[2])
    if case.name == "nvfp4-ct":
        whole = 1 / whole
    factor = 1 / float(whole) if case.name == "nvfp4-ct" else float(whole)
    stored |= {suffixes[1]: torch.from_numpy(scales).view(torch.float8_e4m3fn), suffixes[2]: whole}
    return Sample(form, stored, E2M1[pairs] * np.repeat(E4M3[scales].astype(np.float64), 16, 1)[:, :k] * factor)


def _int4(
    case: Case, form: Decoder, codes: np.ndarray, shape: tuple[int, ...], zero: slice, k: int, draw: np.random.Generator
) -> Sample:
    """Zero points of 0 to 16. A zero is its zero point's code."""
    points = draw.integers(0, 17, shape[:-1], np.uint8)
    points[zero] %= 16
    wide = np.repeat(points, case.block[1], 1)
    nibbles = np.stack([codes & 15, codes >> 4], -1).reshape(len(codes), -1)
    nibbles[zero, :k] = wide[zero, :k]
    codes = nibbles[:, 0::2] | nibbles[:, 1::2] << 4
    dtype = case.dtype if case.dtype.itemsize == 2 else torch.half
    scales = torch.from_numpy(draw.uniform(-2, 2, shape[:-1])).to(dtype)
    words = scales.float().numpy().view(np.uint8).reshape(shape).copy()
    assert not words[..., 0].any()
    words[..., 0] = points
    spread = np.repeat(scales.double().numpy(), case.block[1], 1)[:, :k]
    numbers = (nibbles[:, :k].astype(np.float64) - wide[:, :k]) * spread
    return Sample(form, {".codes": torch.from_numpy(codes), ".scales": torch.from_numpy(words)}, numbers)


def _int8(
    case: Case, form: Decoder, codes: np.ndarray, shape: tuple[int, ...], zero: slice, k: int, draw: np.random.Generator
) -> Sample:
    """Zero points of 0 to 256, or 128 for all. A zero is its zero point's code."""
    symmetric = case.name.endswith("symmetric")
    points = np.full(shape[:-1], 128) if symmetric else draw.integers(0, 257, shape[:-1])
    points[zero] %= 256
    wide = np.repeat(points, case.block[1], 1)[:, :k]
    codes[zero, :k] = wide[zero]
    scales = torch.from_numpy(draw.uniform(-2, 2, shape[:-1])).to(case.dtype)
    words = np.zeros((*shape[:-1], shape[-1] // 4), np.uint32)
    words[..., 0] = scales.float().numpy().view(np.uint32)
    if not symmetric:
        z = points - 128
        words[..., 1] = (z & 0xFFFF | (128 * z & 0xFFFF) << 16).astype(np.uint32)
    spread = np.repeat(scales.double().numpy(), case.block[1], 1)[:, :k]
    numbers = (codes[:, :k].astype(np.float64) - wide) * spread
    stored = {".codes": torch.from_numpy(codes ^ 0x80), ".scales": torch.from_numpy(words.view(np.uint8))}
    return Sample(form, stored, numbers)
