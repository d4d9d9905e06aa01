"""Weights as a plan found them stored: every part of a matrix in a format of its own."""

from collections.abc import Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from oddrank.errors import OddrankError
from oddrank.native import NativeMatrix, NativeStack, native_matrix
from oddrank.runtime.formats import decoder, torch_dtype
from oddrank.runtime.layers.kernels import THREADED_ELEMENTS, DenseFormat, LinearWeight, Rows
from oddrank.runtime.layers.module import Parameter, Part
from oddrank.runtime.layers.vocab import DenseTable, TableWeight
from oddrank.runtime.precision import Precision
from oddrank.runtime.threads import torch_threads
from oddrank.transform.slice import StoredMatrix

if TYPE_CHECKING:
    from oddrank.gpu.linear import GpuLinear


class Storage(Protocol):
    """What a rank slice tells of stored matrices."""

    def matrix(self, name: str) -> StoredMatrix: ...
    def dtype(self, name: str) -> str: ...


class StoredFormat:
    """Finds each matrix's format in the plan. Dense matrices are held as `precision` says, all others as stored."""

    def __init__(self, storage: Storage, precision: Precision) -> None:
        self.storage, self.precision = storage, precision
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
        precision = self.precision
        return StoredWeight(self.storage, name, rows, k, precision.activations, exact=precision.exact)

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
        self.looked_up, self._elements, self._exact = looked_up, n * k, exact
        self._threads: int | None = None
        self._native: NativeMatrix | None = None
        self._gpu: GpuLinear | None = None
        self._available = 1

    def prepare(self, threads: int) -> None:
        self._threads = threads if self._elements >= THREADED_ELEMENTS else 1
        if self.parts[0].data.is_cuda:
            from oddrank.gpu import linear_for

            self._gpu = linear_for(self.decoder, self._stored())
        self._native, self._available = native_matrix(self.decoder, self._stored(), self._exact), threads

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
