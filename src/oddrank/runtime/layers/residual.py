"""The residual stream of a decoder: what every block reads normed and adds to."""

from torch import Tensor

from oddrank.native.elementwise import add_
from oddrank.runtime.layers.norm import RMSNorm


class Residual:
    """h [tokens, hidden], which it owns. A term that was added last waits for the next norm, which adds it and norms in
    one go."""

    def __init__(self, h: Tensor) -> None:
        self._h = h
        self._term: Tensor | None = None

    def __iadd__(self, term: Tensor) -> "Residual":
        """term: [tokens, hidden], summed over the ranks. Not to be written to before the next norm.

        TypeError for a `Partial`.
        """
        if not isinstance(term, Tensor):
            raise TypeError(f"Only a reduced sum is added to the residual stream, not a {type(term).__name__}.")
        if self._term is not None:
            add_(self._h, self._term)
        self._term = term
        return self

    def normed(self, norm: RMSNorm) -> Tensor:
        """norm(h), a new tensor."""
        term, self._term = self._term, None
        return norm(self._h) if term is None else norm.add(self._h, term)
