"""The operations of a decode step beside products with weights: against memory, and against torch. Prints JSON.

All threads. Caches and states are rotated over at least 256 MB, so none comes from the processor's cache. Rounds take
every piece of work once, by turns; rates are the best round's, shares and gains medians over rounds of ratios within
one. A gated delta step reads and writes its state, so its ceiling is multiplying memory in place. The small operations
are timed as a model calls them, Python included.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812
from report import row

from oddrank.native import Library, elementwise, library
from oddrank.native.attention import decode_attention
from oddrank.native.delta import delta_step
from oddrank.native.norm import rms_norm
from oddrank.native.pages import Pages
from oddrank.native.rotary import cache_heads
from oddrank.native.router import route
from oddrank.runtime.layers.attention import HeadMap
from oddrank.runtime.layers.gated_delta import one_token
from oddrank.runtime.pages import in_large_pages
from oddrank.runtime.topology.limits import cores_available

ROTATED = 256 << 20
ROUNDS = 7
SMALL_CALLS = 200


class Heads(NamedTuple):
    """Query heads, KV heads, head_dim."""

    q: int
    kv: int
    dim: int


GEOMETRIES = {"32q/8kv x 128": Heads(32, 8, 128), "24q/4kv x 256": Heads(24, 4, 256), "9q/3kv x 64": Heads(9, 3, 64)}
LENGTHS = (4096, 32768)
COMPARED = "attention, 32q/8kv x 128, 32768 keys"


def filled(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """Random numbers, the same block over and over, in memory as the runtime's loader asks for it."""
    made, block = in_large_pages(torch.empty(shape, dtype=dtype)), torch.randn(1 << 18).to(dtype)
    for part in made.view(-1).split(len(block)):
        part.copy_(block[: len(part)])
    return made


class Attention:
    """Several layers' caches of one sequence of `length` tokens; `run` attends to each once."""

    def __init__(self, found: Library, heads: Heads, length: int, dtype: torch.dtype, threads: int) -> None:
        each = 2 * heads.kv * length * heads.dim * dtype.itemsize
        count = max(1, -(-ROTATED // each))
        shape = (1, 2 * heads.kv, length, heads.dim)
        self.caches = [filled(shape, dtype) for _ in range(count)]
        self.pages = [Pages.of(cache) for cache in self.caches]
        self.nbytes, self.found, self.heads, self.threads = count * each, found, heads, threads
        self.q = torch.randn(1, heads.q, heads.dim)
        self.map = HeadMap(np.arange(heads.q) // (heads.q // heads.kv), heads.kv)
        self.positions, self.scale = torch.tensor([length - 1]), heads.dim**-0.5

    def run(self) -> None:
        for pages in self.pages:
            decode_attention(
                self.found, self.q, pages, self.positions, self.map.starts, self.map.queries, self.scale,
                threads=self.threads,
            )  # fmt: skip

    def torch(self) -> None:
        heads = self.heads
        for cache in self.caches:
            k, v = cache[:, : heads.kv], cache[:, heads.kv :]
            q = self.q.view(1, heads.kv, -1, heads.dim).to(cache.dtype)
            F.scaled_dot_product_attention(q, k, v, scale=self.scale)


class Delta:
    """Layers of gated delta nets, 16 key and 48 value heads of 128 x 128; `run` makes a step of each."""

    K_HEADS, V_HEADS, WIDTH, KERNEL = 16, 48, 128, 4

    def __init__(self, found: Library, threads: int) -> None:
        each = 4 * self.V_HEADS * self.WIDTH**2
        count = -(-ROTATED // each)
        self.states = [filled((1, self.V_HEADS, self.WIDTH, self.WIDTH), torch.float32) for _ in range(count)]
        self.nbytes, self.found, self.threads = count * each, found, threads
        channels, values = (2 * self.K_HEADS + self.V_HEADS) * self.WIDTH, self.V_HEADS * self.WIDTH
        self.projected = torch.randn(1, channels + values + 2 * self.V_HEADS)
        self.parts = self.projected.split([channels, values, self.V_HEADS, self.V_HEADS], -1)
        self.inputs, self.taps = torch.randn(1, self.KERNEL - 1, channels), torch.randn(self.KERNEL, channels)
        self.per_head, self.norm = torch.randn(self.V_HEADS), torch.randn(self.WIDTH)
        self.partner = torch.arange(self.V_HEADS) // (self.V_HEADS // self.K_HEADS)
        self.unit = F.normalize(torch.randn(1, self.V_HEADS, self.WIDTH), dim=-1)

    def run(self) -> None:
        for state in self.states:
            delta_step(
                self.found, self.parts, self.taps, (self.inputs, state), self.per_head, self.per_head, self.norm,
                self.partner, 1e-6, 1e-6, self.threads,
            )  # fmt: skip

    def torch(self) -> None:
        """The recurrence alone."""
        gates = torch.sigmoid(self.per_head)[None]
        for state in self.states:
            one_token(self.unit, self.unit, self.unit, -gates, gates, state)


def small(found: Library) -> dict[str, Callable[[], object]]:
    """Operations whose time is mostly the call, at the sizes of the demo model and of the 35B-A3B's router."""
    x, term, weight = torch.randn(1, 576), torch.randn(1, 576), torch.randn(576)
    both, scores = torch.randn(1, 3072), torch.randn(1, 256)
    product = torch.randn(1, 15, 64)
    pages, at = Pages.of(torch.randn(1, 6, 256, 64)), torch.tensor([200])
    table = torch.ones(256, 64), torch.zeros(256, 64)  # q is turned in place, over and over
    heads = HeadMap(np.arange(9) // 3, 3)
    q, kv = product[:, :9], product[:, 9:]
    return {
        "residual + norm of 576": lambda: rms_norm(found, x, weight, 1e-5, delta=term),
        "silu(gate) * up of 1536": lambda: elementwise.gated(found, both, 0),
        "rotation and caching of 9q/3kv x 64": lambda: cache_heads(found, q, kv, pages, (*table, at), at),
        "attention of 9q/3kv x 64 over 201 keys": lambda: decode_attention(
            found, q, pages, at, heads.starts, heads.queries, 0.125
        ),
        "8 of 256 experts": lambda: route(found, scores, 8),
    }


def seconds(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


@torch.inference_mode()
def main() -> int:
    load = round(os.getloadavg()[0], 2)
    found, threads = library(), cores_available()
    if found is None:
        print(json.dumps({"load": load, "failed": "the compiled kernels are missing"}))
        return 1
    torch.set_num_threads(threads)
    memory = in_large_pages(torch.empty(ROTATED // 4)).fill_(1)
    works: dict[str, tuple[int, Callable[[], object]]] = {
        "reading": (memory.nbytes, memory.sum),
        "rewriting": (memory.nbytes, lambda: memory.mul_(1)),
    }
    names = {}
    for name, heads in GEOMETRIES.items():
        for length in LENGTHS:
            kinds = ("bf16", "fp32") if length == LENGTHS[-1] and heads.dim == 128 else ("bf16",)
            for kind in kinds:
                one = Attention(found, heads, length, {"bf16": torch.bfloat16, "fp32": torch.float32}[kind], threads)
                names[f"attention, {name}, {length} keys in {kind}"] = one
    for name, one in names.items():
        works[name] = one.nbytes, one.run
        if name.startswith(COMPARED):
            works[f"{name}, torch"] = one.nbytes, one.torch
    delta = Delta(found, threads)
    works["delta"], works["delta, torch"] = (delta.nbytes, delta.run), (delta.nbytes, delta.torch)
    wall: dict[str, list[float]] = {name: [] for name in works}
    calls: dict[str, list[float]] = {}
    for turn in range(ROUNDS + 1):
        for name, (nbytes, work) in works.items():
            time.sleep(0.02)  # torch's threads spin for milliseconds after their work, on cores that are wanted
            taken = seconds(work) / nbytes
            if turn:  # the first warms up
                wall[name].append(taken)
        for name, work in small(found).items():
            calls.setdefault(name, []).append(seconds(lambda w=work: [w() for _ in range(SMALL_CALLS)]) / SMALL_CALLS)

    def ratio(of: str, to: str) -> float:
        """How many times as many bytes a second `of` takes as `to`."""
        return statistics.median(b / a for a, b in zip(wall[of], wall[to], strict=True))

    def speed(name: str) -> float:
        return 1e-9 / min(wall[name])

    rows: list[dict[str, Any]] = [row(f"reading memory, {threads} threads", speed("reading"), "GB/s", None)]
    for name in names:
        share = ratio(name, "reading")
        rows.append(row(f"{name}: bytes of keys and values", speed(name), "GB/s", None, None,
                        "reading memory", speed("reading"), share))  # fmt: skip
        if name.startswith(COMPARED):
            rows.append(row(f"{name}, against torch's", ratio(name, f"{name}, torch"), "x", None))
    share = ratio("delta", "rewriting")
    rows.append(row("gated delta step, 48 heads of 128 x 128: bytes of states, each read and written", speed("delta"),
                    "GB/s", None, None, "rewriting memory",
                    speed("rewriting"), share))  # fmt: skip
    rows.append(row("gated delta step, against torch's recurrence alone", ratio("delta", "delta, torch"), "x", None))
    rows += [row(f"{name}, a call from Python", 1e6 * min(taken), "us", None) for name, taken in calls.items()]
    report = {"load": load, "level": found.level, "threads": threads, "rows": rows}
    print(json.dumps(report, indent=2))
    return 0 if all(r["passed"] is not False for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
