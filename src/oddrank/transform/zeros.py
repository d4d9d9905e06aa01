"""Dummy columns in a scale group that has a zero point of its own: there a weight of zero is the zero point's code.

Constant fills do where a group is all dummies. Where it also has real columns (one group for a whole row, or a short
last group that is filled up) the words are made from the zero points that lie beside the values.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from oddrank.errors import OddrankError
from oddrank.formats.base import Format, ZeroPoints
from oddrank.geometry.dims import IntArray

Words = npt.NDArray[Any]


class Zeros(NamedTuple):
    """The dummy columns of a recipe's values that lie in groups of real ones.

    what: the zero points, for messages. points: what they are. suffixes: of the values and of the zero points, on one
    stem. columns: (first entry of
    the values, entries, source group) of each run along K. rows: (first entry of the values, source entry, entries) of
    each real run along N. whole_words: the values' words pack rows just as the zero points' do. values_kn, points_kn:
    which of the two lie as [K, N].
    """

    what: str
    points: ZeroPoints
    suffixes: tuple[str, str]
    columns: tuple[tuple[int, int, int], ...]
    rows: tuple[tuple[int, int, int], ...]
    whole_words: bool
    values_kn: bool
    points_kn: bool

    def beside(self, name: str) -> str:
        """The name of the zero points of the values `name`."""
        return name.removesuffix(self.suffixes[0]) + self.suffixes[1]

    def patches(self, stored: Words) -> Iterator[tuple[tuple[slice, slice], Words]]:
        """(region of the result, words that broadcast to it), from the source's zero points. OddrankError where a code
        that is kept less one would be beyond the last."""
        by_group = stored if self.points_kn else stored.T
        for first, count, group in self.columns:
            words = self._words(by_group[group])
            for target, source, length in self.rows:
                region = slice(first, first + count), slice(target, target + length)
                made = words[None, source : source + length]
                yield (region, made) if self.values_kn else ((region[1], region[0]), made.T)

    def _words(self, packed: Words) -> Words:
        """The values' word of each row (or of each word of rows) that means zero in one group."""
        if self.whole_words:
            return packed
        bits, per = self.points.bits, 32 // self.points.bits
        most = (1 << bits) - 1
        shifts = np.arange(per, dtype=np.uint32) * np.uint32(bits)
        stored = packed[:, None].astype(np.uint32) >> shifts & np.uint32(most)
        codes = stored.reshape(-1) + np.uint32(self.points.plus)
        if (codes > most).any():
            raise OddrankError(
                f"{self.what} has a zero point of {most + 1}, which no code of {bits} bits equals, so no weight in its "
                "row is zero and no column can be padded. Requantize with scale groups, or in the format gptq_v2."
            )
        every_place: Words = codes * np.uint32(sum(1 << bits * i for i in range(per)))
        return every_place


def zeros_of(
    fmt: Format,
    what: str,
    suffixes: tuple[str, str],
    values: tuple[IntArray, IntArray],
    groups: IntArray,
) -> Zeros | None:
    """What the dummy columns of a matrix [N, K] need of its zero points; None where constant fills do.

    values: the values' source entries along (N, K). groups: the zero points' along K.
    """
    points = fmt.zero_points
    if points is None:
        return None
    held, at = fmt.at(points.suffix), fmt.stored[0]
    dummies = np.flatnonzero(values[1] < 0)
    column = dummies * max(1, at.block[1])
    source = groups[column // held.block[1] if held.block[1] else np.zeros_like(column)]
    dummies, source = dummies[source >= 0], source[source >= 0]
    rows = _runs(np.flatnonzero(values[0] >= 0), values[0][values[0] >= 0], step=1)
    if not len(dummies) or not rows:
        return None
    return Zeros(
        what,
        points,
        suffixes,
        tuple((first, count, group) for first, group, count in _runs(dummies, source, step=0)),
        rows,
        at.block[0] == held.block[0],
        at.shape == "kn",
        held.shape == "kn",
    )


def _runs(target: IntArray, source: IntArray, step: int) -> tuple[tuple[int, int, int], ...]:
    """(target, source, length) of runs of consecutive targets whose sources go on by `step`."""
    if not len(target):
        return ()
    breaks = np.flatnonzero((np.diff(target) != 1) | (np.diff(source) != step)) + 1
    starts, ends = [0, *breaks.tolist()], [*breaks.tolist(), len(target)]
    return tuple((int(target[a]), int(source[a]), b - a) for a, b in zip(starts, ends, strict=True))
