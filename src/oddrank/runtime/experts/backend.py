"""What a backend is: who computes a layer's routed experts, and where their weights are meanwhile.

One file each: resident, offload, cpu, hybrid. All compute an expert by the same kernel; they differ in where.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cached_property
from typing import TYPE_CHECKING, ClassVar, NamedTuple

import torch
from torch import Tensor

from oddrank.formats.declared import kind_of
from oddrank.native import NativeExperts
from oddrank.runtime.experts.bank import BankLayout, LayerBanks
from oddrank.runtime.experts.kernel import Batch, ExpertKernel, Routed
from oddrank.runtime.experts.share import ExpertShare

if TYPE_CHECKING:
    from oddrank.gpu.experts import GpuExperts

Terms = Iterator[tuple[Routed, Tensor]]
"""Every expert's weighted output for its tokens, on the device, in the order of the batch's experts."""


class Layer(NamedTuple):
    """A layer's experts: its banks, on the device or in host memory as the backend wants them; how to compute one."""

    banks: LayerBanks
    kernel: ExpertKernel
    device: torch.device


class Compiled:
    """A layer's sums by the compiled kernel, or by Triton's where banks and x are on a GPU, if it takes the banks. The
    kernel is made when it is first asked for."""

    def __init__(self, layer: Layer, share: ExpertShare) -> None:
        self._layer, self._threads = layer, share.threads

    @cached_property
    def _native(self) -> NativeExperts | None:
        if self._layer.device.type != "cpu":
            return None
        banks = self._layer.banks
        return self._layer.kernel.native(banks.gate_up.tensors, banks.down.tensors)

    @cached_property
    def _gpu(self) -> "GpuExperts | None":
        from oddrank.gpu import experts_for

        banks, kernel = self._layer.banks, self._layer.kernel
        if not kernel.plain or not all(tensor.is_cuda for tensor in banks.tensors()):
            return None
        return experts_for(
            (kernel.gate_up, banks.gate_up.tensors), (kernel.down, banks.down.tensors), kernel.activation
        )

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor | None:
        if x.is_cuda:
            return None if self._gpu is None or not self._gpu.takes(x.dtype) else self._gpu(x, weights, ids)
        if x.dtype == torch.float64 or self._native is None:
            return None
        return self._native(x, weights, ids, self._threads)


class Backend(ABC):
    """name: for --experts. on_device: its banks are on the device, else in host memory. caches: it has a cache of
    experts on the device. kinds: of numbers that it computes with (the first word of a format's name)."""

    name: ClassVar[str]
    on_device: ClassVar[bool] = False
    caches: ClassVar[bool] = False
    kinds: ClassVar[frozenset[str]] = frozenset({"dense", "fp8", "int4", "int8", "mxfp4", "mxfp8", "nvfp4"})

    @abstractmethod
    def __init__(self, layer: Layer, share: ExpertShare) -> None: ...

    @abstractmethod
    def terms(self, batch: Batch) -> Terms: ...

    def whole(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor | None:
        """The sum for a batch at once; on a CPU in fp32, with the bits that adding up `terms` gives. None where it
        cannot."""
        return None

    def nbytes(self) -> int:
        """Bytes that it keeps on the device beside its banks."""
        return 0

    @classmethod
    def takes(cls, layouts: tuple[BankLayout, ...]) -> bool:
        """Whether it computes with matrices stored so."""
        return all(kind_of(layout.decoder.name) in cls.kinds for layout in layouts)
