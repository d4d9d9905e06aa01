"""Does a layout change what an operation across all elements of an axis computes?"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from oddrank.geometry import Crosstalk, Model
from oddrank.layout.executors import Executor
from oddrank.layout.layouts import Layout


def disturbed(cross: Crosstalk, layout: Layout, count: int) -> str | None:
    """What an executor that knows nothing of the operation would do to it, of `count` elements laid out so; None if
    nothing."""
    ranks = [layout.slots(r) for r in range(len(layout.ranks))]
    slots, trained = np.concatenate(ranks), np.arange(count)
    if cross.operation == "rms_norm":
        # equal copies of every element leave a mean over the axis as it was, in any order
        times = np.bincount(slots[slots >= 0], minlength=count)
        changed = bool((slots < 0).any()) or len(set(times.tolist())) > 1
        return "include dummies or unequal copies" if changed else None
    # what is computed from an element's number needs all elements in their order: over the ranks or on each
    as_trained = np.array_equal(slots, trained) or all(np.array_equal(r, trained) for r in ranks)
    return None if as_trained else "number them anew, or see dummies and copies"


def unhandled(model: Model, layouts: Iterable[Layout], facts: Executor) -> list[tuple[Crosstalk, str]]:
    """The operations across the axes of these layouts that this executor would disturb, and how."""
    by_axis = {la.axis: la for la in layouts}
    found = []
    for cross in model.crosstalk:
        if cross.operation in facts.handles or cross.axis not in by_axis:
            continue
        what = disturbed(cross, by_axis[cross.axis], model.axis(cross.axis).count)
        if what is not None:
            found.append((cross, what))
    return found
