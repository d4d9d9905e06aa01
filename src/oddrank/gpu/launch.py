"""How the kernels are launched: sizes of tiles, parts of a sum, and the choice among sizes by measuring them."""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import torch
import triton

from oddrank.gpu.matrix import DENSE, MXFP4, NVFP4, GpuMatrix

INTERPRETED: bool = bool(triton.knobs.runtime.interpret)
"""Triton's interpreter runs the kernels, on any device."""

DECODE_TOKENS = 16
"""Up to so many rows of x weights are read once, and reading them is all that takes time."""

_SHORTEST_PART = 512
"""Columns of x that a part of a sum has at least: starting a program and adding its part cost as much as fewer."""

_PROGRAMS_EACH = 4
"""Programs that each multiprocessor should have to read memory as fast as it can."""

log = logging.getLogger(__name__)


class Tiles(NamedTuple):
    """Of a program: m rows of x, n rows of the matrix, k columns at a time. warps, stages: of it."""

    m: int
    n: int
    k: int
    warps: int = 4
    stages: int = 3


class Device(NamedTuple):
    """processors: multiprocessors. native: whether it converts e4m3 by an instruction."""

    processors: int
    native: bool


@cache
def device_of(device: torch.device) -> Device:
    """What matters of a GPU. The interpreter is as small as it takes for tests to see sums in parts."""
    if device.type != "cuda":
        return Device(1, False)
    found = torch.cuda.get_device_properties(device)
    return Device(found.multi_processor_count, (found.major, found.minor) >= (8, 9))


def by_block(matrix: GpuMatrix, x: torch.dtype) -> bool:
    """Whether scales multiply the sums after every block of columns: floats, and powers of two that fp16 lacks."""
    return matrix.block_k > 0 and (matrix.form != MXFP4 or x == torch.float16)


def columns_at_a_time(matrix: GpuMatrix, x: torch.dtype, decode: bool) -> int:
    """The k of a tile: what one scale covers, where it multiplies sums, else a row's 128 bytes or so."""
    if by_block(matrix, x):
        return min(128, matrix.block_k & -matrix.block_k)
    if x == torch.float32 or matrix.form == DENSE:
        return 64
    return 256 if decode and matrix.form in (NVFP4, MXFP4) else 128


def tiles_for(matrix: GpuMatrix, m: int, x: torch.dtype) -> list[Tiles]:
    """Sizes for a product with m rows of x, the likeliest first. They differ in nothing that changes the order in which
    a sum is added up, so any of them gives the same bits."""
    decode = m <= DECODE_TOKENS
    k = columns_at_a_time(matrix, x, decode)
    if decode:
        return [Tiles(16, 64 if matrix.n > 64 else 32, k, 4, 4)]
    if x == torch.float32:
        return [Tiles(32, 64, k, 4, 2)]
    if m <= 64:
        return [Tiles(32, 64, k), Tiles(64, 64, k), Tiles(32, 128, k), Tiles(64, 128, k, 8)]
    return [Tiles(64, 128, k), Tiles(128, 128, k, 8), Tiles(64, 64, k), Tiles(128, 64, k)]


def parts(n: int, k: int, tiles: Tiles, processors: int) -> tuple[int, int]:
    """How many parts a sum is computed in, where few rows of x leave multiprocessors idle; and the columns of each."""
    wanted = -(-_PROGRAMS_EACH * processors // -(-n // tiles.n))
    count = max(1, min(wanted, k // _SHORTEST_PART))
    steps = -(-k // tiles.k)
    chunk = -(-steps // count) * tiles.k
    return -(-k // chunk), chunk


_chosen: dict[tuple[object, ...], Tiles] = {}


def fastest(key: tuple[object, ...], candidates: Sequence[Tiles], run: Callable[[Tiles], object]) -> Tiles:
    """The candidate with which `run` takes least time, measured when a key is first seen; the first where nothing can
    be measured: in the interpreter, and while a graph is captured."""
    found = _chosen.get(key)
    if found is not None:
        return found
    if len(candidates) == 1 or INTERPRETED or torch.cuda.is_current_stream_capturing():
        return candidates[0]
    times = []
    for tiles in candidates:
        try:
            run(tiles)
        except triton.runtime.errors.OutOfResources:  # a smaller GPU
            continue
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        events[0].record()
        for _ in range(3):
            run(tiles)
        events[1].record()
        events[1].synchronize()
        times.append((events[0].elapsed_time(events[1]), tiles))
    _chosen[key] = min(times)[1] if times else candidates[0]
    return _chosen[key]
