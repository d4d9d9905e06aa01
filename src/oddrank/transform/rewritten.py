"""Index metadata that follows from a matrix's shape, written anew where that changes: its sizes, its scale groups."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from oddrank.checkpoint.dtypes import STORAGE
from oddrank.errors import OddrankError

Words = npt.NDArray[Any]


class Rewritten(NamedTuple):
    """what: the stored tensor, for messages. before, after: its words in the source, if it says what the shape implies,
    and in the result. unset: a source that is this word throughout says nothing, nor does the result; None if none."""

    what: str
    before: Words
    after: Words
    unset: int | None

    def of(self, source: Words) -> Words:
        """The words of the result. OddrankError where the source says something else of the matrix."""
        if np.array_equal(source, self.before):
            return self.after
        if self.unset is not None and bool((source == self.unset).all()):
            return np.full_like(self.after, self.unset)
        at = tuple(int(i) for i in np.argwhere(source != self.before)[0])
        raise OddrankError(
            f"{self.what} says {int(source[at])} at {list(at)} where the matrix's shape and order imply "
            f"{int(self.before[at])}, so its columns cannot be moved. A tensor of scale groups in activation order "
            "(desc_act, actorder) must be announced in the quantization config; any other is damaged: get it again."
        )


def rewritten(
    kind: Literal["sizes", "groups"], what: str, dtype: str, before: tuple[int, int], after: tuple[int, int], group: int
) -> Rewritten:
    """before, after: the matrix's [N, K]. group: columns of a scale group, 0 = all."""
    word = STORAGE[dtype]
    if kind == "sizes":
        return Rewritten(what, np.array(before, dtype=word), np.array(after, dtype=word), None)
    groups = [(np.arange(k) // group if group else np.zeros(k)).astype(word) for k in (before[1], after[1])]
    return Rewritten(what, groups[0], groups[1], (1 << 8 * word.itemsize) - 1)
