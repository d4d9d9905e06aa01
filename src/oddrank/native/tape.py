"""A piece of computing remembered as its calls of compiled operations, and done again without Python.

While it records, everything is computed as always. Memory that is asked for meanwhile comes from the recorder's own
blocks, which nobody else gets; as in the computation itself, a block whose tensor has gone serves again. A call is
remembered with its arguments, so a replay reads and writes the same memory in the same order. Whatever torch computes
itself would be missing from a replay, so it is looked for and the recording is refused: only views and memory pass.
"""

import ctypes
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from oddrank.native.calls import recorded
from oddrank.native.compiled import Library

_ALIGNMENT = 64
_aten = torch.ops.aten

_EMPTY = {
    _aten.empty.memory_format,
    _aten.empty_like.default,
    _aten.empty_strided.default,
    _aten.new_empty.default,
    _aten.new_empty_strided.default,
}
_VIEWS_OF_NOTHING = {_aten.lift_fresh.default, _aten.lift.default}
"""Said to be views; they bring in a tensor made from Python's numbers."""


class Blocks:
    """Memory for what is computed on the way. A block serves again once no tensor is in it."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._free: dict[int, list[np.ndarray[Any, Any]]] = {}
        self._places: dict[int, np.ndarray[Any, Any]] = {}

    def holds(self, tensor: Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._places

    def released(self, tensor: Tensor) -> Tensor:
        """The tensor, without a hold on its block: once `tensor` has gone, what is recorded and replayed after that
        may write there."""
        if not self.holds(tensor):
            return tensor
        block = self._places[tensor.untyped_storage().data_ptr()]
        whole = torch.from_numpy(block).view(tensor.dtype)
        return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def empty_like(self, made: Tensor) -> Tensor:
        """A tensor of the shape, strides and dtype of `made`, which must be dense."""
        size = max(_ALIGNMENT, 1 << (made.nbytes - 1).bit_length())  # few sizes, so that blocks serve again
        free = self._free.setdefault(size, [])
        block = free.pop() if free else self._new(size)
        view = block[: max(made.nbytes, 1)]
        weakref.finalize(view, free.append, block).atexit = False
        whole = torch.from_numpy(view)[: made.nbytes].view(made.dtype)  # the storage alone keeps `view`
        return whole.as_strided(made.shape, made.stride())

    def _new(self, size: int) -> "np.ndarray[Any, Any]":
        memory = np.empty(size + _ALIGNMENT, np.uint8)
        start = -memory.ctypes.data % _ALIGNMENT
        block = memory[start : start + size]
        self._places[block.ctypes.data] = block
        self.nbytes += len(memory)
        return block


class _Call(ctypes.Structure):
    """tape.cpp's Call."""

    _fields_ = (("function", ctypes.c_void_p), ("arguments", ctypes.c_void_p))


class Tape:
    """Calls in their order, with all that they point into; `blocks` is kept, too."""

    def __init__(self, library: Library, blocks: Blocks) -> None:
        self.names: list[str] = []
        """Of the operations, a call each."""
        self.nanoseconds: np.ndarray[Any, np.dtype[np.int64]] | None = None
        """int64 [calls]; replays add to it what each call takes. None: they don't look at the clock."""
        self._blocks = blocks
        self._kept: list[object] = []
        self._made: list[tuple[int, int]] = []
        self._calls: Any = None
        pointer = ctypes.c_void_p
        self._replay = library.function("replay", ctypes.c_int64, pointer, ctypes.c_int64, pointer)

    def __len__(self) -> int:
        return len(self._made)

    def add(self, function: Any, arguments: ctypes.Structure, kept: Sequence[object]) -> None:
        address = ctypes.cast(function, ctypes.c_void_p).value
        assert address is not None
        self.names.append(function.__name__.removeprefix("oddrank_"))
        self._made.append((address, ctypes.addressof(arguments)))
        # What lies in a block must not be kept: the block has to serve again, as it will in a replay.
        self._kept += [arguments, *(k for k in kept if not (isinstance(k, Tensor) and self._blocks.holds(k)))]

    def replay(self) -> bool:
        """Make the calls again. False where one failed, and those after it were not made."""
        if self._calls is None:
            self._calls = (_Call * len(self._made))(*(_Call(*made) for made in self._made))
        profile = None if self.nanoseconds is None else self.nanoseconds.ctypes.data
        done: int = self._replay(ctypes.addressof(self._calls), len(self._made), profile)
        return done == len(self._made)


class Recording:
    """Records a tape inside one `with` block or several. `stray` then names what the tape lacks, which is then of no
    use."""

    def __init__(self, library: Library, blocks: Blocks) -> None:
        self.tape = Tape(library, blocks)
        self.stray: str | None = None
        self._mode = _OnlyMemory(self, blocks)
        self._inside = ExitStack()

    def __enter__(self) -> "Recording":
        self._inside.enter_context(recorded(self))
        self._inside.enter_context(self._mode)
        return self

    def __exit__(self, *_error: object) -> None:
        self._inside.close()

    def add(self, function: Any, arguments: ctypes.Structure, kept: tuple[object, ...]) -> None:
        if self.stray is None:
            self.tape.add(function, arguments, kept)

    def refuse(self, what: str) -> None:
        if self.stray is None:
            self.stray = what


class _OnlyMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees what torch does: memory comes from the blocks, views pass, anything else passes and is told."""

    def __init__(self, recording: Recording, blocks: Blocks) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording, self._blocks = recording, blocks

    def _see(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if self._recording.stray is not None:
            return function(*args, **kwargs)
        if function in _EMPTY:
            made = function(*args, **kwargs)
            dense = made.device.type == "cpu" and made.is_contiguous() and made.layout == torch.strided
            return self._blocks.empty_like(made) if dense else self._stray(function, made)
        result = function(*args, **kwargs)
        if function.is_view and function not in _VIEWS_OF_NOTHING and _shares(args[0], result):
            return result
        return self._stray(function, result)

    def _stray(self, function: Any, result: Any) -> Any:
        self._recording.refuse(str(function))
        return result


# Set after the class is made, or torch would wrap it to keep its compiler out, and import the compiler for that: a
# second, and a hundred megabytes a rank.
_OnlyMemory.__torch_dispatch__ = _OnlyMemory._see  # type: ignore[assignment, method-assign]


def _shares(source: Tensor, result: Any) -> bool:
    """Whether what was said to be a view is one: reshape, contiguous and to copy where they must."""
    views = result if isinstance(result, list | tuple) else [result]
    place = source.untyped_storage().data_ptr()
    return all(isinstance(v, Tensor) and v.untyped_storage().data_ptr() == place for v in views)
