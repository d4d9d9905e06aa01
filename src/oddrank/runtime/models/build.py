"""What a model file is given to build one rank of a model."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from msgspec import structs

from oddrank.runtime.experts.share import ExpertShare
from oddrank.runtime.layers.norm import RMSNorm, UnitOffsetRMSNorm
from oddrank.runtime.layers.stored import StoredFormat
from oddrank.runtime.models.config import ModelConfig
from oddrank.runtime.parallel.group import Group
from oddrank.runtime.precision import Precision
from oddrank.transform.slice import StoredMatrix


class Slice(Protocol):
    """One rank's slice of a plan: `oddrank.transform.slice.RankSlice`, or anything that answers as it does."""

    def count(self, axis: str) -> int: ...
    def source(self, axis: str) -> npt.NDArray[np.int64]: ...
    def partner(self, axis: str) -> npt.NDArray[np.int64]: ...
    def owns(self, name: str) -> bool: ...
    def matrix(self, name: str) -> StoredMatrix: ...
    def part_of(self, name: str) -> str | None: ...
    def names(self) -> list[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> str: ...
    def read_into(self, name: str, out: npt.NDArray[Any]) -> None: ...
    def read_rows_into(self, name: str, start: int, out: npt.NDArray[Any]) -> None: ...


@dataclass(frozen=True)
class Build:
    """prefix: where the decoder's tensors sit in the checkpoint ("model."). experts: what the expert layers share."""

    config: ModelConfig
    slice: Slice
    group: Group
    precision: Precision
    prefix: str
    experts: ExpertShare

    @cached_property
    def weights(self) -> StoredFormat:
        """Matrices, each in the format that the plan found it in."""
        return StoredFormat(self.slice, self.precision, self.group.device)

    @cached_property
    def exact_weights(self) -> StoredFormat:
        """The same with dense matrices held in the activations' type: for the few whose rounding decides something."""
        precision = structs.replace(self.precision, weights=self.precision.activations)
        return StoredFormat(self.slice, precision, self.group.device)

    @property
    def wide(self) -> torch.dtype:
        """The activations' type, or fp32 where that is a half."""
        return torch.promote_types(self.precision.activations, torch.float32)

    @cached_property
    def wide_weights(self) -> StoredFormat:
        """The same held, and multiplied by, in `wide`."""
        return StoredFormat(self.slice, structs.replace(self.precision, weights=self.wide, activations=self.wide))

    def norm(self, name: str, width: int) -> RMSNorm:
        """The family's RMS norm `name` over `width` channels, whole on every rank."""
        kind = UnitOffsetRMSNorm if self.config.norm_offset else RMSNorm
        return kind(name, width, self.config.eps, self.precision.activations, self.group.device)

    def owns(self, name: str, present: bool) -> bool | None:
        """Whether this rank adds the replicated term `name` to its sum; None where there is no such term."""
        return self.slice.owns(name) if present else None
