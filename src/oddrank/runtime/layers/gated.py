"""Activations, and the gated unit that multiplies two halves of a product (Shazeer, 2020, arXiv 2002.05202)."""

from collections.abc import Callable

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor

from oddrank.errors import OddrankError
from oddrank.native import elementwise
from oddrank.native.operations import compiled
from oddrank.runtime.layers.module import Module

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "swish": F.silu,
    "gelu": F.gelu,
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
}

_COMPILED = {"silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu"}


def activation(name: str) -> Callable[[Tensor], Tensor]:
    """The function that config.json calls `name`."""
    if name not in ACTIVATIONS:
        raise OddrankError(
            f'config.json has hidden_act "{name}", which the runtime does not compute. Known: {", ".join(ACTIVATIONS)}.'
        )
    return ACTIVATIONS[name]


class GatedUnit(Module):
    """act(gate) * up of [..., gate | up], halves of equal width.

    name: config.json's name of the activation. scale: [..., 1]; sigmoid(scale) multiplies as well.
    """

    def __init__(self, name: str) -> None:
        self._act = activation(name)
        self._code = elementwise.ACTIVATIONS.index(_COMPILED[name])
        self._threads = 1

    def prepare(self, threads: int) -> None:
        self._threads = threads

    def __call__(self, gate_up: Tensor, scale: Tensor | None = None) -> Tensor:
        library = compiled(gate_up)
        if library is not None and gate_up.is_contiguous():
            return elementwise.gated(library, gate_up, self._code, scale, self._threads)
        gate, up = gate_up.chunk(2, -1)
        out = self._act(gate).mul_(up)
        return out if scale is None else out.mul_(torch.sigmoid(scale))
