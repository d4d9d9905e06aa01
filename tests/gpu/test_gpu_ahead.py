"""The kernels compiled for GPUs that are not here, as they are launched: what the interpreter does not look at.

A stand-in for Triton's driver names the target; kernels are compiled down to machine code and never loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from native.words import Case, sample

triton = pytest.importorskip("triton")

SMALLEST, A100 = 99 << 10, 163 << 10
"""Shared memory that a program can have: on the smallest of the GPUs since 2020, and on an A100."""

FP8, FP8_ROWS = Case("fp8-block", (128, 128)), Case("fp8-channel")
NVFP4, MXFP4, DENSE = Case("nvfp4-ct"), Case("mxfp4"), Case("dense", dtype=torch.bfloat16)
INT4, INT4_SHORT = Case("int4-rows", (1, 128)), Case("int4-rows", (1, 32))
INT8, INT8_ROWS, MXFP8 = Case("int8-rows", (1, 128)), Case("int8-channel"), Case("mxfp8")
EVERY = [FP8, FP8_ROWS, Case("fp8-tensor"), NVFP4, Case("nvfp4"), MXFP4, INT4, INT4_SHORT, INT8, INT8_ROWS, MXFP8]


class AbsentDriver:
    """Enough of a driver to compile by."""

    def __init__(self, capability: int) -> None:
        from triton.backends.compiler import GPUTarget

        self._target = GPUTarget("cuda", capability, 32)

    def get_current_target(self) -> Any:
        return self._target

    def get_current_device(self) -> int:
        return int(self._target.arch)  # kernels are kept by device

    def get_current_stream(self, device: int | None = None) -> int:
        return 0


class Compiled:
    """Stands where a kernel stands; launched, it compiles."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.made: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            self.made.append(self.kernel.warmup(*arguments, grid=grid, **constants))

        return launch


Kernels = dict[str, Compiled]


@pytest.fixture(params=[80, 90], ids=["sm_80", "sm_90"])
def kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Kernels:
    import oddrank.gpu.experts as experts
    import oddrank.gpu.launch as launch
    import oddrank.gpu.linear as linear

    if launch.INTERPRETED:
        pytest.skip("Triton's interpreter is on")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    device = launch.Device(8, request.param >= 89)
    found = {}
    for module, names in ((linear, ("product", "added")), (experts, ("inner", "outer", "summed"))):
        monkeypatch.setattr(module, "device_of", lambda _: device)
        for name in names:
            found[name] = Compiled(getattr(module, name))
            monkeypatch.setattr(module, name, found[name])
    monkeypatch.setattr(triton.runtime.driver, "_active", AbsentDriver(request.param))
    return found


def check(kernel: Compiled, count: int, shared: int) -> None:
    assert len(kernel.made) == count
    for made in kernel.made:
        assert len(made.asm["cubin"]) > 0
        assert made.metadata.shared <= shared
        # a subnormal taken for zero would lose small weights
        assert not re.search(r"\b(mul|fma|add)\S*\.ftz", made.asm["ptx"])
    kernel.made.clear()


def products(kernels: Kernels, case: Case, dtype: torch.dtype, m: int, every: bool = False) -> None:
    from oddrank.gpu import linear_for
    from oddrank.gpu.launch import tiles_for

    made = sample(case, 200, 1056)
    linear = linear_for(made.decoder, made.stored)
    assert linear is not None
    x, out = torch.empty(m, 1056, dtype=dtype), torch.empty(m, 200, dtype=dtype)
    candidates = tiles_for(linear.matrix, m, dtype)
    for place, tiles in enumerate(candidates if every else candidates[:1]):
        linear._launch(x, torch.empty(200, dtype=dtype), out, tiles, 8)
        check(kernels["product"], 1, A100 if place else SMALLEST)
    check(kernels["added"], int(m <= 16), SMALLEST)


FEW = [
    (FP8, torch.bfloat16, 1),
    (FP8, torch.bfloat16, 100),
    (NVFP4, torch.bfloat16, 1),
    (NVFP4, torch.float16, 100),
    (NVFP4, torch.float32, 40),
    (MXFP4, torch.bfloat16, 1),
    (MXFP4, torch.float16, 1),
    (INT4, torch.bfloat16, 1),
    (INT4_SHORT, torch.bfloat16, 1),
    (INT4, torch.bfloat16, 100),
    (INT8, torch.bfloat16, 1),
    (INT8_ROWS, torch.bfloat16, 1),
    (MXFP8, torch.bfloat16, 1),
]


@pytest.mark.parametrize(("case", "dtype", "m"), FEW, ids=str)
def test_products(kernels: Kernels, case: Case, dtype: torch.dtype, m: int) -> None:
    products(kernels, case, dtype, m)


@pytest.mark.long
@pytest.mark.parametrize("m", [1, 40, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_every_product(kernels: Kernels, case: Case, dtype: torch.dtype, m: int) -> None:
    products(kernels, case, dtype, m, every=True)


def routed(kernels: Kernels, case: Case, dtype: torch.dtype, tokens: int, stacked: bool) -> None:
    from oddrank.gpu import experts_for

    upper, lower = sample(case, 256 if stacked else 128, 192), sample(case, 192, 128)
    sections = 1 if stacked else 2
    banks = [
        {suffix: part.expand(4, count, *part.shape).contiguous() for suffix, part in made.stored.items()}
        for made, count in ((upper, sections), (lower, 1))
    ]
    layer = experts_for((upper.decoder, banks[0]), (lower.decoder, banks[1]), F.silu)
    assert layer is not None
    ids = torch.arange(2).expand(tokens, 2)
    layer(torch.zeros(tokens, 192, dtype=dtype), torch.zeros(tokens, 2), ids)
    for name in ("inner", "outer", "summed"):
        check(kernels[name], 1, SMALLEST)


@pytest.mark.parametrize(("case", "tokens"), [(NVFP4, 1), (NVFP4, 200), (FP8, 1), (DENSE, 200), (INT4, 1)], ids=str)
def test_experts(kernels: Kernels, case: Case, tokens: int) -> None:
    routed(kernels, case, torch.bfloat16, tokens, stacked=tokens == 1)


@pytest.mark.long
@pytest.mark.parametrize("tokens", [1, 20, 200])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", EVERY, ids=str)
def test_every_expert(kernels: Kernels, case: Case, dtype: torch.dtype, tokens: int) -> None:
    routed(kernels, case, dtype, tokens, stacked=True)
