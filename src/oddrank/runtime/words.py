"""Tensors as the words that a checkpoint moves."""

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from oddrank.checkpoint.dtypes import STORAGE

_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Bytes of an element -> the torch dtype through which its bits reach numpy."""


def words_of(tensor: Tensor, stored: str) -> npt.NDArray[np.unsignedinteger]:
    """A numpy view of a tensor's storage, as the unsigned integers of this safetensors dtype."""
    words: npt.NDArray[np.unsignedinteger] = tensor.view(_CARRIERS[tensor.element_size()]).numpy().view(STORAGE[stored])
    return words
