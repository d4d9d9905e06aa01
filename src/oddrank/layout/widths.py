"""Layouts of widths and vocabularies: whole units to ranks, dummies where the executor wants equal ranks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np

from oddrank.layout.candidate import Candidate
from oddrank.layout.layouts import DUMMY, Layout, apportion, fullest


def aligned_unit(width: int, ranks: int, unit: int, preferred: int, shares: Sequence[float] | None = None) -> int:
    """The unit to cut in: kernels like ranks of `preferred` channels' multiples, so take the largest power-of-two
    fraction of it that makes the widest rank at most 5% wider than `unit` alone would (2%, for its share, where that
    is how much memory it has)."""
    best, slack = fullest(width, ranks, unit, shares), 1.05 if shares is None else 1.02
    multiple = preferred
    while multiple > 1:
        u = math.lcm(unit, multiple)
        if fullest(width, ranks, u, shares) <= slack * best and width >= ranks * u:
            return u
        multiple //= 2
    return unit


def even(axis: str, width: int, ranks: int, unit: int, kind: str) -> Candidate | None:
    """A plain split where it cuts at whole units, else None."""
    per = width // ranks
    if width % ranks or per % unit:
        return None
    layout = Layout.of(axis, [range(i * per, (i + 1) * per) for i in range(ranks)])
    return Candidate(kind, (layout,), why=f"{per} a rank")


def padded(axis: str, width: int, ranks: int, unit: int, total: int | None = None) -> Candidate | None:
    """Equal ranks: whole units dealt evenly, short ranks filled with dummies. `total` fixes the planned width.
    None where it is too small or does not divide into whole units."""
    per = -(-width // (ranks * unit)) * unit if total is None else total // ranks
    if total is not None and (total < width or total % (ranks * unit)):
        return None
    shares = apportion(-(-width // unit), ranks)
    bounds = np.minimum(np.cumsum([0, *shares]) * unit, width)
    slots = []
    for a, b in itertools.pairwise(bounds):
        part = np.full(per, DUMMY, dtype=np.int64)
        part[: b - a] = np.arange(a, b)
        slots.append(part)
    layout = Layout.of(axis, slots)
    extra = layout.total() - width
    why = f"{per} a rank in units of {unit}" + (f", {extra} dummy" if extra else "")
    return Candidate("pad" if extra else "even", (layout,), why=why)


def ragged(
    axis: str, width: int, ranks: int, unit: int, shares: Sequence[float] | None = None, *, empty: bool = False
) -> Candidate | None:
    """Whole units to ranks, some with one more; no dummies. Where there are fewer units than ranks some have none, with
    `empty`; else the answer is None."""
    units = -(-width // unit)
    if units < ranks and not empty:
        return None
    bounds = np.minimum(np.cumsum([0, *apportion(units, ranks, shares)]) * unit, width)
    layout = Layout.of(axis, [range(a, b) for a, b in itertools.pairwise(bounds)])
    sizes = sorted({int(b - a) for a, b in itertools.pairwise(bounds)})
    why = " or ".join(str(n) for n in sizes) + " a rank" + (f" in units of {unit}" if unit > 1 else "")
    return Candidate("even" if len(sizes) == 1 else "ragged", (layout,), why=why)


def engine_vocab(axis: str, rows: int, ranks: int, multiple: int, total: int | None = None) -> Candidate | None:
    """The vocabulary as vLLM cuts it: padded in its own buffers, the stored tensor as trained.

    Stock vLLM pads to a multiple of 64 and then needs it to divide by the ranks; where it does not, the padding
    multiple becomes 64 * ranks.
    """
    stock = -(-rows // multiple) * multiple
    serves = stock % ranks == 0
    size = total or (stock if serves else -(-rows // (multiple * ranks)) * multiple * ranks)
    if size < rows or size % ranks:
        return None
    per = size // ranks
    slots = []
    for i in range(ranks):
        part = np.full(per, DUMMY, dtype=np.int64)
        real = max(0, min(rows - i * per, per))
        part[:real] = np.arange(i * per, i * per + real)
        slots.append(part)
    kind = "identity" if serves and total is None else "pad"
    why = f"{per} rows a rank" + (f", {size - rows} of them padding in the engine's buffers" if size > rows else "")
    return Candidate(kind, (Layout.of(axis, slots, in_engine=True),), why=why)
