"""What a model file is given to build one rank of a model."""

from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from oddrank.runtime.layers.kernels import DenseFormat, WeightFormat
from oddrank.runtime.layers.norm import RMSNorm
from oddrank.runtime.models.config import ModelConfig
from oddrank.runtime.parallel.group import Group
from oddrank.runtime.precision import Precision


class Slice(Protocol):
    """One rank's slice of a plan: `oddrank.transform.slice.RankSlice`, or anything that answers as it does."""

    def count(self, axis: str) -> int: ...
    def source(self, axis: str) -> npt.NDArray[np.int64]: ...
    def partner(self, axis: str) -> npt.NDArray[np.int64]: ...
    def owns(self, name: str) -> bool: ...
    def names(self) -> list[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> str: ...
    def read_into(self, name: str, out: npt.NDArray[Any]) -> None: ...


@dataclass(frozen=True)
class Build:
    """prefix: where the decoder's tensors sit in the checkpoint ("model.")."""

    config: ModelConfig
    slice: Slice
    group: Group
    precision: Precision
    prefix: str

    def format(self, name: str) -> WeightFormat:
        """How the linear layer `name` is stored."""
        return DenseFormat(self.precision)

    def norm(self, name: str, width: int) -> RMSNorm:
        """The RMS norm `name` over `width` channels, whole on every rank."""
        return RMSNorm(name, width, self.config.eps, self.precision.activations, self.group.device)

    def owns(self, name: str, present: bool) -> bool | None:
        """Whether this rank adds the replicated term `name` to its sum; None where there is no such term."""
        return self.slice.owns(name) if present else None
