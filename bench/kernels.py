"""The compiled CPU kernels: products with a vector and a batch, routed experts, against reading memory. Prints JSON.

All threads. Weights are rotated over at least 256 MB, so none comes from a cache. Every round times reading 256 MB of
memory (torch's sum of them) and then each kernel, once over all its matrices. Rates are the best round's; shares and
gains are medians over rounds of the ratio to the same round's reading (or bf16, or batch 1), so what else the machine
does at the time is on both sides. What a batch gains is bounded by how fast this machine multiplies: torch's matrix
product in the same round, in bf16 where pairs of bf16 are multiplied (level avx512bf16; bf16 and fp8), else in fp32;
integers of 16 bits go twice as many to a register as fp32. `GB_per_cpu_second`: bytes by the processor time of all this
process's threads.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from report import row

from oddrank.native import NativeMatrix, library, native_experts, native_matrix
from oddrank.runtime.formats import Decoder, decoder
from oddrank.runtime.formats.rows import RowsDecoder
from oddrank.runtime.pages import in_large_pages
from oddrank.runtime.topology.limits import cores_available

N = K = 4096
ROTATED = 256 << 20
ROUNDS = 9
BATCH = 8
FORMATS = {"bf16": "dense", "fp8 block": "fp8-block", "NVFP4": "nvfp4", "MXFP4": "mxfp4", "int4": "int4-rows"}
FORMATS |= {"int8": "int8-channel", "int8, groups of 128": "int8-rows", "MXFP8": "mxfp8"}
SHARE, EXPERTS_SHARE, BATCH_GAIN = 0.7, 0.6, 4.0
AGAINST_BF16 = {"fp8 block": 1.7, "NVFP4": 3.0, "MXFP4": 3.0, "int4": 3.0, "int8": 1.7, "int8, groups of 128": 1.7}
AGAINST_BF16["MXFP8"] = 1.7

EXPERTS, CHOSEN, HIDDEN, WIDTH = 256, 8, 2048, 512
"""The geometry of the 35B-A3B's layers."""


def loaded(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in memory as the runtime's loader asks for it."""
    return in_large_pages(torch.empty_like(tensor)).copy_(tensor)


def form_of(name: str, k: int) -> Decoder:
    """Packed integers: as the runtime holds every packing of them, with zero points."""
    form = FORMATS[name]
    return RowsDecoder(128, k, int(form[3])) if form.endswith("-rows") else decoder(form)


def stored(form: Decoder, n: int, k: int, leading: tuple[int, ...] = ()) -> dict[str, torch.Tensor]:
    """Random words: every finite code of the values, scales near one hundredth."""
    found = {}
    for place, part in enumerate(p for p in form.format.stored if not p.optional):
        shape, kind = form.shape(part.suffix, n, k, leading), form.name.partition("-")[0]
        if kind == "dense":
            found[part.suffix] = torch.randn(shape).mul_(0.02).bfloat16()
        elif place == 0:
            e4m3 = kind in ("fp8", "mxfp8")
            words = torch.randint(0, 127 if e4m3 else 256, shape, dtype=torch.uint8)
            signed = torch.int8 if part.dtypes == ("I8",) else torch.uint8
            found[part.suffix] = words.view(torch.float8_e4m3fn if e4m3 else signed)
        elif kind in ("mxfp4", "mxfp8"):
            found[part.suffix] = torch.randint(118, 122, shape, dtype=torch.uint8)
        elif kind == "nvfp4" and place == 1:
            found[part.suffix] = torch.randint(40, 80, shape, dtype=torch.uint8).view(torch.float8_e4m3fn)
        elif isinstance(form, RowsDecoder):
            words = torch.full((*shape[:-1], shape[-1] // 4), 0.01).bfloat16().float().view(torch.int32)
            if form.bits == 4:
                words += torch.randint(0, 16, words.shape, dtype=torch.int32)
            else:
                words[..., 1] = torch.randint(0, 128, shape[:-1], dtype=torch.int32) * 0x800001
            found[part.suffix] = words.view(torch.uint8)
        else:
            found[part.suffix] = torch.full(shape, 0.01)
    return found


class Rotation:
    """Matrices of one format; `run` multiplies by each once."""

    def __init__(self, name: str, threads: int) -> None:
        form = form_of(name, K)
        one = stored(form, N, K)
        self.each = sum(part.nbytes for part in one.values())
        self.count, self.threads = max(2, -(-ROTATED // self.each)), threads
        self.matrices: list[NativeMatrix] = []
        for _ in range(self.count):
            made = native_matrix(form, {suffix: loaded(part) for suffix, part in one.items()}, exact=False)
            assert made is not None
            self.matrices.append(made)

    @property
    def nbytes(self) -> int:
        return self.each * self.count

    def run(self, x: torch.Tensor) -> None:
        for matrix in self.matrices:
            matrix.linear(x, None, self.threads)


class Layer:
    """A layer's experts in one format; `run` has it compute tokens that choose every expert once between them."""

    def __init__(self, name: str, threads: int) -> None:
        forms, self.threads = [form_of(name, k) for k in (HIDDEN, WIDTH)], threads
        shapes = (2 * WIDTH, HIDDEN), (HIDDEN, WIDTH)
        banks = [stored(form, *shape, leading=(EXPERTS, 1)) for form, shape in zip(forms, shapes, strict=True)]
        banks = [{suffix: loaded(part) for suffix, part in bank.items()} for bank in banks]
        made = native_experts((forms[0], banks[0]), (forms[1], banks[1]), F.silu, exact=False)
        assert made is not None
        self.experts = made
        self.nbytes = sum(part.nbytes for bank in banks for part in bank.values())
        order = torch.randperm(EXPERTS)
        self.ids = [order[i : i + CHOSEN].reshape(1, -1) for i in range(0, EXPERTS, CHOSEN)]
        self.x, self.weights = torch.randn(1, HIDDEN), torch.full((1, CHOSEN), 1 / CHOSEN)

    def run(self) -> None:
        for ids in self.ids:
            self.experts(self.x, self.weights, ids, self.threads)


def seconds(work: Callable[[], object]) -> tuple[float, float]:
    """Wall and processor seconds."""
    start, cpu = time.perf_counter(), time.process_time()
    work()
    return time.perf_counter() - start, time.process_time() - cpu


def main() -> int:
    load = round(os.getloadavg()[0], 2)
    found, threads = library(), cores_available()
    if found is None:
        print(json.dumps({"load": load, "failed": "the compiled kernels are missing"}))
        return 1
    torch.set_num_threads(threads)
    memory = in_large_pages(torch.empty(ROTATED // 4)).fill_(1)
    works: dict[str, tuple[int, Callable[[], object]]] = {"reading": (memory.nbytes, memory.sum)}
    square = torch.randn(1024, 1024)
    pairs = square.bfloat16()
    works["fp32 products"] = 1024**3, lambda: square @ square
    works["bf16 products"] = 1024**3, lambda: pairs @ pairs
    each: dict[str, int] = {}
    one, some = torch.randn(1, K), torch.randn(BATCH, K)
    for name in FORMATS:
        matrices = Rotation(name, threads)
        each[name] = matrices.each
        works[name] = matrices.nbytes, lambda m=matrices: m.run(one)
        works[f"{name}, batch {BATCH}"] = matrices.nbytes, lambda m=matrices: m.run(some)
    for name in ("fp8 block", "NVFP4", "int4"):
        layer = Layer(name, threads)
        works[f"experts, {name}"] = layer.nbytes, layer.run
    wall: dict[str, list[float]] = {name: [] for name in works}
    cpu: dict[str, list[float]] = {name: [] for name in works}
    for turn in range(ROUNDS + 1):
        for name, (nbytes, work) in works.items():
            a, b = seconds(work)
            if name in ("reading", "fp32 products", "bf16 products"):
                time.sleep(0.05)  # torch's threads spin for milliseconds after their work, on cores that are wanted
            if turn:  # the first warms up
                wall[name].append(a / nbytes)
                cpu[name].append(b / nbytes)

    def ratio(of: str, to: str) -> float:
        """How many times as many bytes a second `of` takes as `to`."""
        return statistics.median(b / a for a, b in zip(wall[of], wall[to], strict=True))

    def speed(name: str) -> float:
        return 1e-9 / min(wall[name])

    rows: list[dict[str, Any]] = []
    ceiling = "reading memory", speed("reading")
    rows.append(row(f"reading memory, {threads} threads", speed("reading"), "GB/s", None))
    for name in FORMATS:
        share = ratio(name, "reading")
        what = f"matrix {N} x {K} times a vector, {name}"
        rows.append(row(what, speed(name), "GB/s", share >= SHARE, f">= {SHARE:.0%} of reading", *ceiling, share))
        if name in AGAINST_BF16:
            gain, least = ratio(name, "bf16") * each["bf16"] / each[name], AGAINST_BF16[name]
            rows.append(row(f"{what}, against bf16", gain, "x", gain >= least, f">= {least} x"))
        gain = BATCH * ratio(f"{name}, batch {BATCH}", name)
        met, of_batch = gain >= BATCH_GAIN, f"{what}: tokens a second at batch {BATCH}, against 1"
        times = 2 if name in ("NVFP4", "MXFP4", "int4", "int8", "int8, groups of 128") else 1
        kind = "bf16" if times == 1 and found.level == "avx512bf16" else "fp32"
        roof = times * statistics.median(
            a * each[name] / (b * N * K) for a, b in zip(wall[name], wall[f"{kind} products"], strict=True)
        )
        is_ = f"the same at {'twice ' * (times - 1)}the rate of torch's {kind} product of 1024 x 1024"
        rows.append(row(of_batch, gain, "x", met, f">= {BATCH_GAIN} x", is_, roof))
    for name in ("fp8 block", "NVFP4", "int4"):
        share = ratio(f"experts, {name}", "reading")
        what = f"{CHOSEN} of {EXPERTS} experts, {HIDDEN} x {WIDTH}, {name}, a token: active bytes"
        target = f">= {EXPERTS_SHARE:.0%} of reading"
        rows.append(row(what, speed(f"experts, {name}"), "GB/s", share >= EXPERTS_SHARE, target, *ceiling, share))
    per_cpu = {name: round(1e-9 / statistics.median(times), 2) for name, times in cpu.items()}
    report = {"load": load, "level": found.level, "threads": threads, "GB_per_cpu_second": per_cpu, "rows": rows}
    print(json.dumps(report, indent=2))
    return 0 if all(r["passed"] is not False for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
