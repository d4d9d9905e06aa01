"""Whole quantized models whose stored matrices and experts are multiplied by the kernels, in Triton's interpreter,
against transformers' logits: every matrix of a release, as a rank of several gets it."""

from __future__ import annotations

import pytest
import torch
from runtime.quantized import test_integer_models as integers
from runtime.quantized.hybrids import distance
from runtime.quantized.test_quantized_models import TOKENS, on_ranks, plan, reference
from torch import Tensor

from oddrank.gpu import experts_for, linear_for
from oddrank.gpu.experts import GpuExperts
from oddrank.gpu.linear import GpuLinear
from oddrank.runtime.experts import backend
from oddrank.runtime.layers.stored import StoredWeight
from oddrank.runtime.loader import prepare
from oddrank.runtime.models import Llama
from oddrank.runtime.step import Step

CALLS: dict[str, int] = {}


class Counted:
    def __init__(self, name: str, found: GpuLinear | GpuExperts) -> None:
        self.name, self.found = name, found

    def __call__(self, *arguments: Tensor | None) -> Tensor:
        CALLS[self.name] = CALLS.get(self.name, 0) + 1
        return self.found(*arguments)  # type: ignore[arg-type]


@pytest.fixture
def by_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, of which there is none here: tensors are in the machine's memory."""

    def linear(weight: StoredWeight, threads: int) -> None:
        found = linear_for(weight.decoder, weight._stored())
        assert found is not None
        weight._gpu = Counted("linear", found)  # type: ignore[assignment]

    def experts(compiled: backend.Compiled, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        layer = compiled._layer
        up, down = layer.banks.gate_up.tensors, layer.banks.down.tensors
        found = experts_for((layer.kernel.gate_up, up), (layer.kernel.down, down), layer.kernel.activation)
        assert found is not None
        return Counted("experts", found)(x, weights, ids)

    monkeypatch.setattr(StoredWeight, "prepare", linear)
    monkeypatch.setattr(backend.Compiled, "__call__", experts)
    CALLS.clear()


@pytest.mark.long
@pytest.mark.parametrize(("fmt", "tp"), [("nvfp4-ct", 1), ("fp8-block", 3), ("mxfp4", 2), ("awq", 3), ("int4-ct", 2)])
def test_logits(by_kernels: None, fmt: str, tp: int) -> None:
    """A prompt of two tokens and one token more."""
    family, packed = "qwen3_5_moe", ("qwen3_5_moe", fmt) in integers.CASES
    tokens = integers.TOKENS if packed else TOKENS

    def work(model: Llama) -> Tensor:
        prepare(model)
        cache, rows = model.new_cache(1), []
        for start, stop in ((0, 2), (2, 3)):
            step = Step.of([(0, tokens[start:stop], start)], "cpu")
            rows.append(model.logits(model(step, cache)))
        return torch.cat(rows)

    want = (integers.reference if packed else reference)(family, fmt)[:3]
    for logits in on_ranks(family, fmt, plan(family, fmt, tp), work, "fp32"):
        assert distance(logits.double(), want) < 1e-4
    assert CALLS["linear"] >= 4 * tp and CALLS["experts"] >= 4 * tp
