"""Which number types a run computes in."""

import msgspec
import torch

from oddrank.errors import OddrankError

TORCH: dict[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
}
"""safetensors dtype names that a dense weight may have, and the torch dtype of each."""

_NAMES: dict[str, torch.dtype] = {
    "bf16": torch.bfloat16,
    "bfloat16": torch.bfloat16,
    "fp16": torch.float16,
    "float16": torch.float16,
    "fp32": torch.float32,
    "float32": torch.float32,
    "fp64": torch.float64,
    "float64": torch.float64,
}


class Precision(msgspec.Struct, frozen=True):
    """weights: what matrices are held in. activations: what flows between layers, and what ranks sum.
    cache: what keys and values are kept in.

    Norm weights and biases are small and held as activations.
    """

    weights: torch.dtype
    activations: torch.dtype
    cache: torch.dtype

    @property
    def exact(self) -> bool:
        """Whether kernels round products in fp32 only; else x may be rounded, to bf16 or finer."""
        return self.weights.itemsize >= 4

    @classmethod
    def of(cls, name: str, device: torch.device | str = "cpu", cache: str | None = None) -> "Precision":
        """The types for "bf16", "fp16", "fp32" or "fp64" (or torch's names for them). `cache`: another type
        for keys and values.

        On a CPU only weights are half precision; activations and the cache stay fp32, and are rounded, if at
        all, inside of products (see `exact`). Rounding them all would cost time, and it would
        make small differences in the order of sums, which a different number of ranks always brings, a
        hundred times larger: greedy text would part much sooner.
        """
        dtype = named(name)
        wide = dtype.itemsize == 2 and torch.device(device).type == "cpu"
        activations = torch.float32 if wide else dtype
        return cls(dtype, activations, activations if cache is None else named(cache))


def named(name: str) -> torch.dtype:
    """The torch dtype called "bf16", "float16", "torch.float32", ... OddrankError for any other name."""
    try:
        return _NAMES[name.removeprefix("torch.")]
    except KeyError:
        raise OddrankError(
            f'"{name}" is not a number type to compute in. Known: {", ".join(sorted(_NAMES))}.'
        ) from None
