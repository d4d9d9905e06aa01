"""Copies of experts from host memory to the device, in the background."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import torch
from torch import Tensor

from oddrank.runtime.experts.kernel import Stored

Pairs = Sequence[tuple[Stored, Stored]]
"""(from, to), each suffix -> tensor."""


class Ready(Protocol):
    """A copy that was started. Calling it lets what is computed next see the copied values."""

    def __call__(self) -> None: ...


class Copier(Protocol):
    """Starts copies, in order. A target may still be read by what was asked of the device before; the copy waits."""

    def start(self, pairs: Pairs) -> Ready: ...


class ThreadCopier:
    """Where the device is the CPU: a thread that copies. What was computed before has ended: it waits for nothing."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, "oddrank-copies")

    def start(self, pairs: Pairs) -> Ready:
        return self._thread.submit(self._copy, pairs).result

    def _copy(self, pairs: Pairs) -> None:
        with torch.inference_mode():
            for source, target in pairs:
                for suffix, tensor in target.items():
                    tensor.copy_(source[suffix])


class StreamCopier:
    """On CUDA: a stream of its own, which waits for the computing stream, and the other way round."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, pairs: Pairs) -> Ready:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for source, target in pairs:
                for suffix, tensor in target.items():
                    tensor.copy_(source[suffix], non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record(self._stream)
        return lambda: torch.cuda.current_stream(self._device).wait_event(copied)


def copier(device: torch.device) -> Copier:
    return StreamCopier(device) if device.type == "cuda" else ThreadCopier()


def pin(tensors: Sequence[Tensor]) -> Callable[[], None]:
    """Page-lock host memory in place, so that a GPU copies from it by itself; returns what undoes it.

    torch's own pinned allocations are rounded up to a power of two, which for banks is up to twice their size.
    """
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    pinned: list[Tensor] = []
    for tensor in tensors:
        if tensor.numel() and int(runtime.cudaHostRegister(tensor.data_ptr(), tensor.nbytes, 0)) == 0:
            pinned.append(tensor)

    def undo() -> None:
        while pinned:
            runtime.cudaHostUnregister(pinned.pop().data_ptr())

    return undo
