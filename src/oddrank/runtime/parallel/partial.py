"""The runtime's one rule: a partial sum is not a tensor until it has been reduced, once."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Never

import torch
from torch import Tensor

from oddrank.native.elementwise import add_, copy_of, zeros
from oddrank.runtime.parallel.group import Group

_LIVE, _ADDED, _REDUCED = 0, 1, 2


class Partial:
    """This rank's term of a sum over `group`, as a row-parallel layer returns it.

    It adds to another `Partial` of the same group, shape and dtype, and becomes a tensor through `reduce()`,
    once. Everything else that one might do with a tensor raises `TypeError` (and mypy rejects it): what a
    single rank holds is not the layer's output. Both adding and reducing use the term up.

    The `Partial` owns `tensor`: sums and the reduction are done in place.
    """

    __slots__ = ("_borrowed", "_group", "_spec", "_state", "_tensor")

    # numpy must not take it for an object array.
    __array_ufunc__ = None

    _tensor: Tensor | None  # None: this rank has nothing to add
    _spec: tuple[torch.Size, torch.dtype] | None  # what _tensor would tell where there is none
    _borrowed: bool  # the tensor is somebody else's (a parameter, a replicated activation): never write to it

    def __init__(self, tensor: Tensor, group: Group) -> None:
        self._tensor = tensor
        self._group = group
        self._spec = None
        self._borrowed = False
        self._state = _LIVE

    @classmethod
    def from_replicated(
        cls, tensor: Tensor, owner: int | bool, group: Group, shape: Sequence[int] | None = None
    ) -> "Partial":
        """A term that every rank holds in full (a bias, a replicated expert's output), counted once.

        `owner` is the rank that adds it, or whether this rank does; the other ranks add nothing. `shape` is
        the shape of the sum it joins where that is wider (a bias [hidden] for [tokens, hidden]).
        `tensor` is never written to.
        """
        if shape is not None:
            tensor = tensor.expand(*shape)
        if not (owner if isinstance(owner, bool) else owner == group.rank):
            return cls.nothing(tensor.shape, tensor.dtype, group)
        term = cls(tensor, group)
        term._borrowed = True
        return term

    @classmethod
    def nothing(cls, shape: Sequence[int], dtype: torch.dtype, group: Group) -> "Partial":
        """The term of a rank that holds no real units of the summed axis: zero, without a tensor of zeros."""
        term = cls.__new__(cls)
        term._tensor = None
        term._group = group
        term._spec = (torch.Size(shape), dtype)
        term._borrowed = False
        term._state = _LIVE
        return term

    @property
    def shape(self) -> torch.Size:
        return self._describe()[0]

    @property
    def dtype(self) -> torch.dtype:
        return self._describe()[1]

    @property
    def group(self) -> Group:
        return self._group

    def _describe(self) -> tuple[torch.Size, torch.dtype]:
        if self._tensor is not None:
            return self._tensor.shape, self._tensor.dtype
        if self._spec is None:
            raise TypeError(_used_up(self))
        return self._spec

    def __add__(self, other: "Partial") -> "Partial":
        if type(other) is not Partial:
            raise TypeError(_refusal("added to " + type(other).__name__))
        if self._state or other._state or self is other:
            raise TypeError(_used_up(self if self._state else other))
        if self._group is not other._group or self._describe() != other._describe():
            raise TypeError(f"These partial sums do not add: {self!r} and {other!r}.")
        mine, theirs = self._tensor, other._tensor
        self._tensor = other._tensor = None
        self._state = other._state = _ADDED
        # Addition commutes bit for bit, so the sum goes wherever there is memory to write to.
        if mine is None or theirs is None:
            source, total = (other, theirs) if mine is None else (self, mine)
            if total is None:
                return Partial.nothing(*self._describe(), self._group)
            result = Partial(total, self._group)
            result._borrowed = source._borrowed
            return result
        if not self._borrowed:
            return Partial(add_(mine, theirs), self._group)
        if not other._borrowed:
            return Partial(add_(theirs, mine), self._group)
        return Partial(add_(copy_of(mine), theirs), self._group)

    def reduce(self) -> Tensor:
        """The sum over the group's ranks, the same bits on each: one all-reduce."""
        if self._state:
            raise TypeError(_used_up(self))
        self._state = _REDUCED
        tensor = self._tensor
        if tensor is None:
            shape, dtype = self._describe()
            tensor = zeros(shape, dtype, self._group.device)
        elif self._borrowed:
            tensor = copy_of(tensor)
        self._tensor = None
        return self._group.all_reduce(tensor)

    def __repr__(self) -> str:
        if self._state:
            return f"Partial({'reduced' if self._state == _REDUCED else 'added to another'})"
        return f"Partial(shape={tuple(self.shape)}, dtype={self.dtype}, group={self._group!r})"

    if not TYPE_CHECKING:  # for a type checker these are simply not there

        def __radd__(self, other: Any) -> Never:
            raise TypeError(_refusal("added to " + type(other).__name__))

        def __getattr__(self, name: str) -> Never:
            raise AttributeError(_refusal(f"asked for .{name}"))

        def __eq__(self, other: Any) -> Never:
            raise TypeError(_refusal("compared"))

        def __array__(self, *args: Any, **kwargs: Any) -> Never:
            raise TypeError(_refusal("made a numpy array"))

        def __bool__(self) -> Never:
            raise TypeError(_refusal("used as a truth value"))

        def __reduce__(self) -> Never:
            raise TypeError("A Partial cannot be copied or pickled: its term of the sum would count twice.")

        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Never:
            raise TypeError(_refusal(f"passed to {getattr(func, '__name__', func)}"))


def _refusal(what: str) -> str:
    return (
        f"A Partial is one rank's term of a sum, not a tensor; it was {what}. Call reduce() first, or, for a "
        "term that every rank holds, add Partial.from_replicated(term, owner, group)."
    )


def _used_up(term: Partial) -> str:
    how = "reduced" if term._state == _REDUCED else "added to another"
    if term._state == _LIVE:
        return "A Partial was added to itself: that would count its term twice."
    return f"This Partial was already {how}; its term would count twice."
