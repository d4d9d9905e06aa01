"""From logical positions to stored entries: the one place where footprints meet layouts.

`logical_index` asks a dim which source positions a rank draws from. `stored_index` turns that into entries of one
stored tensor, and is the storage proof: each stored entry of the result must draw all its real elements from one
entry of the source.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from oddrank.geometry.dims import Counts, Dim, IntArray, Slots


class StorageError(ValueError):
    """A layout that would need a stored entry to be split or mixed. `entry` is the first such target entry."""

    def __init__(self, message: str, entry: int) -> None:
        super().__init__(message)
        self.entry = entry


def logical_index(dim: Dim, stock: Counts, slots: Slots) -> IntArray:
    """Source position for each local position along `dim`, -1 = dummy; int64 [local size]."""
    return dim.index(stock, slots)


def entries(size: int, block: int) -> int:
    """Stored entries along a dimension of `size` elements; the last block may be short; 0 = one for all."""
    return 1 if block == 0 else -(-size // block)


def stored_index(
    logical: IntArray, size: int, block: int, *, shared: bool, target_block: int | None = None, tail: bool = True
) -> IntArray:
    """Source entry for each target entry, -1 = all dummy; int64 [entries].

    logical: source position per target position, -1 = dummy.
    size: source length of the dimension in elements.
    block, target_block: elements per entry in the source and the target (finer = a refined scale).
    shared: a scale; else packed values, whose place inside the entry matters.
    tail: may dummies stand in the unused places of a short last word of packed values?

    Raises StorageError where an entry would mix two source entries, or packed values would change places.
    """
    if block == 0:
        return np.zeros(1, dtype=np.int64)
    target = block if target_block is None else target_block
    if block == 1 and target == 1:
        return logical
    count = entries(len(logical), target)
    padded = np.full(count * target, -1, dtype=np.int64)
    padded[: len(logical)] = logical
    grid = padded.reshape(count, target)
    real: npt.NDArray[np.bool_] = np.greater_equal(grid, 0)
    any_real = real.any(axis=1)
    source = grid // block  # -1 // block is -1
    low = np.where(real, source, np.iinfo(np.int64).max).min(axis=1)
    high = source.max(axis=1)
    mixed = any_real & (low != high)
    if mixed.any():
        at = int(np.flatnonzero(mixed)[0])
        raise StorageError(
            f"entry {at} (elements {at * target} to {at * target + target - 1}) would mix "
            f"source entries {int(low[at])} and {int(high[at])}, each {block} elements",
            at,
        )
    if not shared:
        # a packed word is copied whole: its elements keep their places, and no source element rides along unseen
        place = np.arange(target, dtype=np.int64)[None, :]
        expected = high[:, None] * block + place
        moved = np.not_equal(grid, expected)
        beside = np.less(expected, size)
        if not tail:
            beside |= np.arange(count * target, dtype=np.int64).reshape(count, target) < len(logical)
        wrong = np.where(real, moved, beside)
        wrong[~any_real] = False
        if wrong.any():
            at = int(np.flatnonzero(wrong.any(axis=1))[0])
            raise StorageError(
                f"packed entry {at} ({block} elements a word) would need its source word {int(high[at])} split",
                at,
            )
    return np.where(any_real, high, np.int64(-1))
