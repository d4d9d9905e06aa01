"""What the rank processes of test_native_collectives.py run."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import numpy as np
import torch

from oddrank import OddrankError
from oddrank.native.compiled import library
from oddrank.native.tape import Blocks, Recording
from oddrank.runtime.parallel import Group, Link, connect, dist
from oddrank.runtime.parallel.group import Columns

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
DTYPES = (*FLOATS, torch.int8, torch.uint8, torch.int16, torch.int32, torch.int64, torch.bool)


@contextmanager
def without_library() -> Iterator[None]:
    with mock.patch.object(dist, "library", lambda: None):
        yield


def together(group: Group, size: int, name: str) -> Group | None:
    """The first `size` ranks as a group of their own; None on the others."""
    names = f"local:oddrank-test-{group.broadcast(os.getpid())}-{name}-{size}"
    return connect(group.rank, size, names) if group.rank < size else None


def terms(seed: int, ranks: int, shape: tuple[int, ...], dtype: torch.dtype) -> list[torch.Tensor]:
    """What each rank adds: floats of very different sizes, so that the order of a sum shows, or any whole numbers."""
    draw = np.random.default_rng(seed)
    if not dtype.is_floating_point:
        values = draw.integers(0, 2 if dtype == torch.bool else 256, (ranks, *shape))
        return list(torch.from_numpy(values).to(dtype))
    values = draw.normal(size=(ranks, *shape)) * 2.0 ** draw.integers(-6, 7, (ranks, *shape))
    return list(torch.from_numpy(values).to(dtype))


def wanted_sum(parts: list[torch.Tensor]) -> torch.Tensor:
    """In rank order, half precision in fp32 and rounded once, by numpy; bool by or."""
    dtype = parts[0].dtype
    if dtype == torch.bool:
        return torch.from_numpy(np.logical_or.reduce([p.numpy() for p in parts]))
    wide = [(p.float() if dtype in (torch.bfloat16, torch.float16) else p).numpy() for p in parts]
    total = wide[0].copy()
    for part in wide[1:]:
        total += part
    return torch.from_numpy(total).to(dtype)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and bool((a == b).all())


def wrong_sums(group: Group, seed: int) -> list[str]:
    """Random shapes of every dtype, some of them longer than a slot: which are wrong."""
    draw, wrong = np.random.default_rng(seed), []
    for dtype in DTYPES:
        for most in (0, 1, 70, 5_000, 40_000, 150_000)[: 6 if dtype in (torch.bfloat16, torch.float32) else 5]:
            shape: tuple[int, ...] = (int(draw.integers(most // 2, most + 1)),)
            if most == 70:
                shape = tuple(draw.integers(1, 9, 3))
            parts = terms(int(draw.integers(1 << 30)), group.size, shape, dtype)
            mine = parts[group.rank].clone()
            if group.all_reduce(mine) is not mine or not same(mine, wanted_sum(parts)):
                wrong.append(f"{dtype} {shape}")
    strided = terms(seed, group.size, (40, 30), torch.float32)
    mine = strided[group.rank].clone()
    group.all_reduce(mine.T)
    if not same(mine, wanted_sum(strided)):
        wrong.append("not contiguous")
    return wrong


def wrong_columns(group: Group, seed: int) -> list[str]:
    """Random widths, none of some ranks, some of them longer than a slot; in order, cut short, or anywhere."""
    draw, wrong = np.random.default_rng(seed), []
    for dtype in (torch.bfloat16, torch.float32, torch.int64, torch.uint8):
        for rows, most in ((1, 9), (3, 50), (2, 50_000), (0, 5)):
            widths = draw.integers(0, most, group.size)
            widths[draw.integers(group.size)] = 0
            widths[draw.integers(group.size)] += 1
            total = int(widths.sum())
            parts = [terms(int(draw.integers(1 << 30)), 1, (rows, int(w)), dtype)[0] for w in widths]
            whole = torch.cat(parts, 1)
            kept = int(draw.integers(1, total + 1))
            order = torch.from_numpy(draw.permutation(total)[:kept])
            place = torch.full((total,), -1)
            place[order] = torch.arange(kept)
            for columns, expected in (
                (Columns(widths.tolist(), total), whole),
                (Columns(widths.tolist(), kept), whole[:, :kept]),
                (Columns(widths.tolist(), kept, place), whole[:, order]),
            ):
                if not same(group.all_gather_columns(parts[group.rank], columns), expected):
                    wrong.append(f"{dtype} {rows} x {widths.tolist()} -> {kept}")
    return wrong


def everything(group: Group, link: Link, compiled_too: bool) -> dict[str, Any]:
    """For every size of group: what is wrong with and without the compiled library."""
    found: dict[str, Any] = {"wrong": [], "kinds": set()}
    for size in range(2, group.size + 1):
        for compiled in (True, False) if compiled_too and size in (3, 7) else (compiled_too,):
            if compiled:
                part = together(group, size, "compiled")
            else:
                with without_library():
                    part = together(group, size, "plain")
            if part is not None:
                found["kinds"].add((type(part).__name__, part.recordable))
                found["wrong"] += [(size, compiled, w) for w in wrong_sums(part, size) + wrong_columns(part, size)]
                if compiled and size in (2, 3):
                    found[f"tape of {size}"] = replays(part)
                part.close()
            group.barrier()
    return found


def replays(group: Group) -> dict[str, Any]:
    """Collectives of a tape, with new numbers at each replay, ranks out of step in turn; then tapes that differ."""
    library_ = library()
    assert library_ is not None
    draw, wrong = np.random.default_rng(9), 0
    widths = [5, 0, 7, 2, 4, 1, 3][: group.size]
    x, y = torch.zeros(3, 1000), torch.zeros(2, widths[group.rank])
    columns = Columns(widths, sum(widths))
    with Recording(library_, Blocks()) as recording:
        group.all_reduce(x)
        out = group.all_gather_columns(y, columns)
        group.all_reduce(x)
    stray = recording.stray
    for turn in range(200):
        parts = terms(turn, group.size, (3, 1000), torch.float32)
        ends = [terms(turn, 1, (2, w), torch.float32)[0] for w in widths]
        x.copy_(parts[group.rank])
        y.copy_(ends[group.rank])
        if turn % group.size == group.rank and draw.integers(4) == 0:
            os.sched_yield()
        ok = recording.tape.replay()
        once = wanted_sum(parts)
        wrong += not (ok and same(x, wanted_sum([once] * group.size)) and same(out, torch.cat(ends, 1)))
    said = []
    for name, other in (("longer", lambda g: g.all_reduce(torch.zeros(9))), ("barrier", lambda g: g.barrier())):
        part = together(group, group.size, name)
        assert part is not None
        eight = torch.zeros(8)
        with Recording(library_, Blocks()) as short:
            part.all_reduce(eight)
        try:
            if group.rank == 1:
                other(part)
            elif short.tape.replay():
                said.append("no error")
            part.check()
        except OddrankError as error:
            said.append(str(error))
        group.barrier()
    return {"wrong": wrong, "stray": stray, "said": said}
