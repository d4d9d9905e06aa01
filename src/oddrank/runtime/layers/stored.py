"""Weights as a plan found them stored: every part of a matrix in a format of its own."""

from collections.abc import Callable, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from oddrank.errors import OddrankError
from oddrank.native import NativeMatrix, NativeStack, native_matrix
from oddrank.runtime.formats import decoder, torch_dtype
from oddrank.runtime.formats.rows import Packing, packing_of
from oddrank.runtime.layers.kernels import THREADED_ELEMENTS, DenseFormat, LinearWeight, Rows
from oddrank.runtime.layers.module import Parameter, Part
from oddrank.runtime.layers.vocab import DenseTable, TableWeight
from oddrank.runtime.pages import in_large_pages
from oddrank.runtime.precision import Precision
from oddrank.runtime.threads import torch_threads
from oddrank.runtime.words import words_of
from oddrank.transform.slice import StoredMatrix

if TYPE_CHECKING:
    from oddrank.gpu.linear import GpuLinear


_PIECE_ELEMENTS = 1 << 18
"""Of a stored tensor, read and packed at a time: a megabyte of words."""


class Storage(Protocol):
    """What a rank slice tells of stored matrices."""

    def matrix(self, name: str) -> StoredMatrix: ...
    def dtype(self, name: str) -> str: ...


class StoredFormat:
    """Finds each matrix's format in the plan. Dense matrices are held as `precision` says, packed integers as the
    kernels take them where those will compute on `device`, all others as stored."""

    def __init__(self, storage: Storage, precision: Precision, device: torch.device | str = "cpu") -> None:
        self.storage, self.precision, self.device = storage, precision, device
        self._dense = DenseFormat(precision)

    def linear(self, parts: Sequence[Rows], k: int) -> LinearWeight:
        """Dense neighbours become one matrix; every other part is one by itself, with its own scales."""
        weights: list[tuple[LinearWeight, int]] = []
        for dense, run in groupby(parts, lambda part: self._is_dense(part.name)):
            if dense:
                together = list(run)
                weights.append((self._dense.linear(together, k), sum(part.rows for part in together)))
            else:
                weights += [(self._stored(part.name, part.rows, k), part.rows) for part in run]
        return weights[0][0] if len(weights) == 1 else StackedWeight(weights)

    def table(self, name: str, rows: int, k: int) -> TableWeight:
        """A matrix of `rows` rows that is also looked up in."""
        if self._is_dense(name):
            return DenseTable(name, rows, k, self.precision)
        return self._stored(name, rows, k)

    def _stored(self, name: str, rows: int, k: int) -> "StoredWeight":
        storage, precision = self.storage, self.precision
        if precision.activations != torch.float64:
            found = storage.matrix(name)
            stored, dtype_of = decoder(found.format, found.blocks), lambda suffix: storage.dtype(found.names[suffix])
            packing = packing_of(stored, k, dtype_of, exact=precision.exact, device=self.device)
            if packing is not None:
                return PackedWeight(
                    storage, name, rows, packing, precision.activations, exact=precision.exact, device=self.device
                )
        return StoredWeight(storage, name, rows, k, precision.activations, exact=precision.exact)

    def _is_dense(self, name: str) -> bool:
        return self.storage.matrix(name).format == "dense"


class StoredWeight(TableWeight):
    """A matrix [n, k] held as stored and decoded as it is multiplied: by the compiled kernels once prepared, on a GPU
    by Triton's, where they take it, else by the decoder, tile by tile. The decoder alone multiplies in float64.

    looked_up: the type of the rows that `take` gives. exact: see NativeMatrix.
    """

    def __init__(
        self, storage: Storage, name: str, n: int, k: int, looked_up: torch.dtype = torch.float32, *, exact: bool = True
    ) -> None:
        matrix = storage.matrix(name)
        self.decoder, self.suffixes = decoder(matrix.format, matrix.blocks), tuple(matrix.names)
        self.parts = [
            _held(stored, storage.dtype(stored), self.decoder.shape(suffix, n, k))
            for suffix, stored in matrix.names.items()
        ]
        self._hold(looked_up, n * k, exact)

    def _hold(self, looked_up: torch.dtype, elements: int, exact: bool) -> None:
        self.looked_up, self._elements, self._exact = looked_up, elements, exact
        self._threads: int | None = None
        self._native: NativeMatrix | None = None
        self._gpu: GpuLinear | None = None
        self._available = 1

    def prepare(self, threads: int) -> None:
        self._threads, stored = threads if self._elements >= THREADED_ELEMENTS else 1, self._stored()
        if stored[self.decoder.values].is_cuda:
            from oddrank.gpu import linear_for

            self._gpu = linear_for(self.decoder, stored)
        self._native, self._available = native_matrix(self.decoder, stored, self._exact), threads

    @property
    def native(self) -> NativeMatrix | None:
        return self._native

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self._native is not None and x.dtype != torch.float64:
            return self._native.linear(x, bias, self._native.threads(x, self._available))
        if self._gpu is not None and x.dtype != torch.float64:
            return self._gpu(x, bias)
        with torch_threads(self._threads or torch.get_num_threads()):
            return self.decoder.linear(x, self._stored(), bias)

    def take(self, rows: Tensor) -> Tensor:
        return self.decoder.take(self._stored(), rows, self.looked_up)

    def _stored(self) -> dict[str, Tensor]:
        return {suffix: part.data for suffix, part in zip(self.suffixes, self.parts, strict=True)}


class PackedWeight(StoredWeight):
    """A matrix of packed integers, held in rows as the kernels take them (see formats/rows.py). It is packed as it is
    read, a piece at a time."""

    def __init__(
        self, storage: Storage, name: str, n: int, packing: Packing, looked_up: torch.dtype = torch.float32, *,
        exact: bool = True, device: torch.device | str = "cpu",
    ) -> None:  # fmt: skip
        self._name, self._n, self._packing, self._device = name, n, packing, device
        self._names = storage.matrix(name).names
        self.decoder, self.parts = packing.decoder, []
        self._hold(looked_up, n * packing.k, exact)
        self._tensors: dict[str, Tensor] = {}

    def own_tensors(self) -> list[str]:
        return list(self._names.values())

    def load_own(self, part: Any, release: Callable[[str], object] | None = None) -> int:
        packing, read = self._packing, 0
        tensors: dict[str, Tensor] = {}
        for suffix, (shape, dtype) in packing.held(self._n).items():
            tensors[suffix] = in_large_pages(torch.empty(shape, dtype=dtype))
        for suffix, name in self._names.items():
            like = _held(name, part.dtype(name), packing.stored.shape(suffix, self._n, packing.k))
            if tuple(part.shape(name)) != like.shape:
                raise OddrankError(
                    f"{name}: the plan gives this rank {list(part.shape(name))} and the model has room for "
                    f"{list(like.shape)}."
                )
            if suffix in packing.sources and torch.Size(like.shape).numel():
                self._pack(part, suffix, like, tensors[packing.sources[suffix]])
            read += torch.Size(like.shape).numel() * like.dtype.itemsize
        if packing.stored.index in self._names:
            self._put_in_order(part, self._names[packing.stored.index], tensors)
        for name in self._names.values():
            if release is not None:
                release(name)
        self._tensors = {suffix: tensor.to(self._device) for suffix, tensor in tensors.items()}
        return read

    def _pack(self, part: Any, suffix: str, like: Parameter, target: Tensor) -> None:
        name, count = self._names[suffix], like.shape[0]
        step = max(8, _PIECE_ELEMENTS // torch.Size(like.shape[1:]).numel() // 8 * 8)
        staged = torch.empty(min(step, count), *like.shape[1:], dtype=like.dtype)
        for first in range(0, count, step):
            rows = staged[: min(step, count - first)]
            part.read_rows_into(name, first, words_of(rows, part.dtype(name)))
            self._packing.pack(suffix, rows, first, target)

    def _put_in_order(self, part: Any, name: str, tensors: dict[str, Tensor]) -> None:
        groups = torch.empty(self._packing.k, dtype=torch.int32)
        part.read_into(name, words_of(groups, part.dtype(name)))
        if not self._packing.stored.in_order(groups):
            tensors[".order"] = self._packing.order(groups, tensors[".codes"], name)

    def held(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors.values())

    def _stored(self) -> dict[str, Tensor]:
        if not self._tensors:
            raise OddrankError(f"{self._name} is used before it was loaded.")
        return self._tensors


def _held(name: str, stored: str, shape: tuple[int, ...]) -> Parameter:
    dtype = torch_dtype(stored)
    if dtype is None:
        raise OddrankError(f"{name} is stored as {stored}, which the runtime does not hold.")
    return Parameter.of([Part(name)], shape, dtype)


class StackedWeight(LinearWeight):
    """Matrices of the same input, one above the other: one call of the compiled kernels where they take all of them.
    weights: each with its rows."""

    def __init__(self, weights: Sequence[tuple[LinearWeight, int]]) -> None:
        self.weights = [weight for weight, _ in weights]
        self._rows = [rows for _, rows in weights]
        self._threads = 1
        self._stack: NativeStack | None = None
        self._prepared = self._looked = False

    def prepare(self, threads: int) -> None:
        self._threads, self._prepared = threads, True  # what the weights' own give is known when all are prepared

    def _stacked(self) -> NativeStack | None:
        if self._prepared and not self._looked:
            self._looked = True
            matrices = [weight.native for weight, rows in zip(self.weights, self._rows, strict=True) if rows]
            native = [matrix for matrix in matrices if matrix is not None]
            if native and len(native) == len(matrices):
                self._stack = NativeStack(native)
        return self._stack

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        stack = self._stacked()
        if stack is not None and x.dtype != torch.float64:
            return stack(x, bias, stack.threads(x, self._threads))
        parts = [weight(x) for weight, rows in zip(self.weights, self._rows, strict=True) if rows]
        out = torch.cat(parts, -1) if parts else x.new_empty(*x.shape[:-1], 0)
        return out if bias is None else out.add_(bias)
