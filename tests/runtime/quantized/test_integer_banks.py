"""Routed experts of packed integers: what banks hold of them, and what a layer computes, against numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from formats.codec import Raw
from formats.integers import Packed, awq, ct, gptq, skewed, stored

from oddrank.native import library
from oddrank.runtime.experts.bank import BankLayout
from oddrank.runtime.experts.kernel import ExpertKernel, add_up, route
from oddrank.runtime.experts.loading import fill
from oddrank.transform.slice import StoredMatrix

EXPERTS, HIDDEN, WIDTH = 3, 128, 64
PACKINGS = {
    "AWQ": awq(32),
    "AWQ, whole rows": awq(0),
    "GPTQ": gptq(group=64),
    "GPTQ in activation order": gptq(group=32, scatter=3),
    "GPTQ, 8 bits": gptq(8, 32),
    "compressed-tensors, 8 bits, whole rows": ct(8, 0),
    "compressed-tensors": ct(group=32),
    "compressed-tensors, asymmetric": ct(group=64, symmetric=False),
}


class Words:
    """The experts' stored tensors, as a rank slice has them."""

    def __init__(self, packing: Packed) -> None:
        self.packing = packing
        self.raw: dict[str, Raw] = {}
        self.numbers: dict[str, np.ndarray] = {}
        for e in range(EXPERTS):
            for seed, (name, n, k) in enumerate(
                (("gate_proj", WIDTH, HIDDEN), ("up_proj", WIDTH, HIDDEN), ("down_proj", HIDDEN, WIDTH))
            ):
                parts = stored(packing, skewed(n, k, 10 * e + seed) / 32)
                self.raw |= {f"{e}.{name}{suffix}": raw for suffix, raw in parts.items()}
                self.numbers[f"{e}.{name}"] = packing.decode(parts)

    def matrix(self, name: str) -> StoredMatrix:
        names = {n.removeprefix(name): n for n in self.raw if n.startswith(f"{name}.")}
        return StoredMatrix(self.packing.format, names, {})

    def shape(self, name: str) -> tuple[int, ...]:
        return self.raw[name].words.shape

    def dtype(self, name: str) -> str:
        return self.raw[name].dtype

    def read_into(self, name: str, out: Any) -> None:
        out[...] = self.raw[name].words

    def read_rows_into(self, name: str, start: int, out: Any) -> None:
        out[...] = self.raw[name].words[start : start + len(out)]

    def layouts(self, widest: torch.dtype) -> tuple[BankLayout, BankLayout]:
        up = [[f"{e}.gate_proj", f"{e}.up_proj"] for e in range(EXPERTS)]
        down = [[f"{e}.down_proj"] for e in range(EXPERTS)]
        return BankLayout(self, up, EXPERTS, WIDTH, HIDDEN, widest), BankLayout(
            self, down, EXPERTS, HIDDEN, WIDTH, widest
        )

    def sum(self, x: np.ndarray, weights: np.ndarray, ids: np.ndarray) -> np.ndarray:
        out = np.zeros_like(x)
        for t in range(len(x)):
            for w, e in zip(weights[t], ids[t], strict=True):
                gate, up = (self.numbers[f"{e}.{name}"] @ x[t] for name in ("gate_proj", "up_proj"))
                out[t] += w * (self.numbers[f"{e}.down_proj"] @ (gate / (1 + np.exp(-gate)) * up))
        return out


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("widest", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", PACKINGS)
def test_layers(name: str, widest: torch.dtype, threads: int) -> None:
    """In rows where the compiled kernel computes; as stored in float64, and where experts have their columns in orders
    of their own."""
    words = Words(PACKINGS[name])
    layouts = words.layouts(widest)
    banks = [layout.allocate(EXPERTS, "cpu") for layout in layouts]
    for bank in banks:
        for tensor in bank.tensors.values():
            tensor.view(torch.uint8).fill_(85)  # what was there before must not matter
    released: list[str] = []
    fill(banks, words, released.append, threads=threads)
    unread = {n for n in words.raw if n.endswith((".weight_shape", ".g_idx"))}
    assert {*words.raw} - unread <= {*released} and len(released) == len({*released})
    plain = widest == torch.float64 or "order" in name or library() is None
    assert all((layout.packing is None) == plain for layout in layouts)
    kernel = ExpertKernel(layouts[0].decoder, layouts[1].decoder, F.silu, widest.itemsize >= 4)
    for e in range(EXPERTS):
        up, down = (bank.expert(e) for bank in banks)
        both = np.concatenate([words.numbers[f"{e}.gate_proj"], words.numbers[f"{e}.up_proj"]])
        got = kernel.gate_up.dequantize(up, torch.float64).reshape(-1, HIDDEN)
        assert torch.equal(got, torch.from_numpy(both))
        got = kernel.down.dequantize(down, torch.float64)[0]
        assert torch.equal(got, torch.from_numpy(words.numbers[f"{e}.down_proj"]))
    draw = np.random.default_rng(0)
    x, weights = draw.normal(0, 1, (5, HIDDEN)), draw.uniform(0, 1, (5, 2))
    ids = np.stack([draw.choice(EXPERTS, 2, replace=False) for _ in range(5)])
    want, dtype = words.sum(x, weights, ids), torch.float64 if widest == torch.float64 else torch.float32
    given = torch.from_numpy(x).to(dtype), torch.from_numpy(weights).to(dtype), torch.from_numpy(ids)
    compiled = kernel.native(banks[0].tensors, banks[1].tensors)
    assert (compiled is None) == plain
    batch = route(*given)
    terms = ((r, kernel.term(batch, r, banks[0].expert(r.expert), banks[1].expert(r.expert))) for r in batch.routed)
    bound = {torch.bfloat16: 1e-3, torch.float32: 1e-5, torch.float64: 1e-12}[widest]
    for got in [add_up(batch, terms)] if compiled is None else [add_up(batch, terms), compiled(*given, threads)]:
        assert np.abs(got.double().numpy() - want).max() < bound * np.abs(want).max()
