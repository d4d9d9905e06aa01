"""Rotary position embedding (Su et al., 2021, arXiv 2104.09864) and the scalings that checkpoints ask for.

Frequencies and angles are fp32 in every precision, as in transformers: they are constants of the model, and the
same ones for every rank and every size.
"""

import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from oddrank.errors import OddrankError
from oddrank.native.operations import compiled
from oddrank.native.rotary import rotate_

_ROWS = 256
"""Positions that a table of angles begins with; it doubles as sequences grow."""


class Rotary:
    """The angles of a step's tokens: which rows they are of a table of cosines and one of signed sines, [rows, rotated
    channels]; sines are negative in the first half.

    table: (cosines, sines). places: int64 [tokens], each token's row.
    """

    def __init__(self, table: tuple[Tensor, Tensor], places: Tensor) -> None:
        self.table, self.places, self.half = table, places, table[0].shape[-1] // 2

    @cached_property
    def cos(self) -> Tensor:
        """[tokens, 1, rotated channels]"""
        return self.table[0].index_select(0, self.places).unsqueeze(1)

    @cached_property
    def sin(self) -> Tensor:
        """[tokens, 1, rotated channels]"""
        return self.table[1].index_select(0, self.places).unsqueeze(1)

    def apply_(self, x: Tensor, threads: int = 1) -> Tensor:
        """Rotate x [tokens, heads, head_dim] in place: x * cos + rotate_half(x) * sin. Of heads wider than the
        rotation the first channels."""
        library = compiled(x)
        if library is not None and x.stride(-1) == 1:
            return rotate_(library, x, *self.table, self.places, threads)
        if x.shape[-1] != 2 * self.half:
            x = x[..., : 2 * self.half]
        swapped = torch.roll(x, self.half, -1)
        return x.mul_(self.cos).addcmul_(swapped, self.sin)


class RotaryEmbedding:
    """Makes the `Rotary` of a step from its positions.

    rope: the config's rope_parameters with `rope_type` and `rope_theta`. dim: rotated channels of a head.
    max_positions: max_position_embeddings. dtype: of the activations.
    OddrankError for a rope_type that is not known.
    """

    def __init__(
        self,
        rope: dict[str, Any],
        dim: int,
        max_positions: int,
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        kind = rope.get("rope_type", "default")
        if kind not in _FREQUENCIES:
            raise OddrankError(
                f'config.json asks for the rotary scaling "{kind}", which the runtime does not compute. '
                f"Known: {', '.join(sorted(_FREQUENCIES))}."
            )
        self._frequencies, self._rope, self._dim = _FREQUENCIES[kind], rope, dim
        self._max_positions, self._dtype, self._device = max_positions, dtype, torch.device(device)
        try:
            self.inv_freq, self._scaling = self._at(max_positions)
        except (KeyError, TypeError, ValueError, ZeroDivisionError, AttributeError) as error:
            raise OddrankError(
                f'config.json: these rope parameters make no "{kind}" scaling '
                f"({type(error).__name__}: {error}): {rope}."
            ) from None
        self._dynamic = kind == "dynamic"
        self.limit = int(max_positions * rope["factor"]) if self._dynamic else max_positions
        """Positions that the model is meant for."""
        self.table = self._make(torch.arange(0, device=self._device), self.inv_freq)
        """Cosines and sines of the positions so far, [positions, dim]. It moves only where `reserve` needs more."""

    def reserve(self, length: int) -> None:
        """Have the table reach sequences of `length` tokens."""
        if length > self.table[0].shape[0]:
            rows = max(_ROWS, 1 << (length - 1).bit_length())
            self.table = self._make(torch.arange(rows, device=self._device), self.inv_freq)

    def stretched(self, length: int) -> bool:
        """Whether a sequence of `length` tokens has angles of its own, not the table's."""
        return self._dynamic and length > self._max_positions

    def __call__(self, positions: Tensor, sequences: Sequence[tuple[int, int]]) -> Rotary:
        """positions: int64 [tokens]. sequences: (tokens in this step, length with them) of each sequence."""
        longest = max((length for _, length in sequences), default=0)
        if self.stretched(longest):
            inv_freq = torch.cat([self._at(length)[0].expand(n, -1) for n, length in sequences])
            return Rotary(self._make(positions, inv_freq), torch.arange(len(positions), device=self._device))
        self.reserve(longest)
        return Rotary(self.table, positions)

    def _make(self, positions: Tensor, inv_freq: Tensor) -> tuple[Tensor, Tensor]:
        angles = positions[:, None].float() * inv_freq
        cos, sin = angles.cos(), angles.sin()
        if self._scaling != 1.0:
            cos, sin = cos * self._scaling, sin * self._scaling
        cos, sin = torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)
        return cos.to(self._dtype), sin.to(self._dtype)

    def _at(self, length: int) -> tuple[Tensor, float]:
        inv_freq, scaling = self._frequencies(self._rope, self._dim, self._max_positions, length)
        return inv_freq.to(self._device), scaling


Frequencies = Callable[[dict[str, Any], int, int, int], tuple[Tensor, float]]
"""(rope_parameters, dim, max_position_embeddings, length) -> (inverse frequencies fp32 [dim / 2], factor on
cos and sin)."""


def _powers(theta: float, dim: int) -> Tensor:
    exponents = torch.arange(0, dim, 2, dtype=torch.int64).float() / dim
    return torch.pow(theta, exponents)


def _default(rope: dict[str, Any], dim: int, _max: int, _length: int) -> tuple[Tensor, float]:
    return 1.0 / _powers(rope["rope_theta"], dim), 1.0


def _linear(rope: dict[str, Any], dim: int, _max: int, _length: int) -> tuple[Tensor, float]:
    """Position interpolation (Chen et al., 2023, arXiv 2306.15595)."""
    return 1.0 / _powers(rope["rope_theta"], dim) / rope["factor"], 1.0


def _dynamic(rope: dict[str, Any], dim: int, most: int, length: int) -> tuple[Tensor, float]:
    """NTK-aware scaling that grows with the sequence beyond `most` positions."""
    stretch = rope["factor"] * max(length, most) / most - (rope["factor"] - 1)
    return 1.0 / _powers(rope["rope_theta"] * stretch ** (dim / (dim - 2)), dim), 1.0


def _llama3(rope: dict[str, Any], dim: int, most: int, _length: int) -> tuple[Tensor, float]:
    """Llama 3.1: long waves are slowed by `factor`, short ones kept, those between blended."""
    inv_freq = 1.0 / _powers(rope["rope_theta"], dim)
    factor, low, high = rope["factor"], rope["low_freq_factor"], rope["high_freq_factor"]
    original = rope.get("original_max_position_embeddings", most)
    waves = 2 * math.pi / inv_freq
    slow = inv_freq / factor
    blend = (original / waves - low) / (high - low)
    between = (1 - blend) * slow + blend * inv_freq
    out = torch.where(waves > original / low, slow, torch.where(waves < original / high, inv_freq, between))
    return out, 1.0


def _yarn(rope: dict[str, Any], dim: int, most: int, _length: int) -> tuple[Tensor, float]:
    """YaRN (Peng et al., 2023, arXiv 2309.00071)."""
    theta = rope["rope_theta"]
    original = rope.get("original_max_position_embeddings", most)
    factor = rope.get("factor") or most / original

    def scaled(scale: float, by: float = 1.0) -> float:
        return 1.0 if scale <= 1 else 0.1 * by * math.log(scale) + 1.0

    attention = rope.get("attention_factor")
    if attention is None:
        one, all_dims = rope.get("mscale"), rope.get("mscale_all_dim")
        attention = scaled(factor, one) / scaled(factor, all_dims) if one and all_dims else scaled(factor)

    def dimension(rotations: float) -> float:
        return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, dim - 1)
    if first == last:
        last += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - first) / (last - first)).clamp(0, 1)
    powers = _powers(theta, dim)
    keep = 1 - ramp
    return 1.0 / (factor * powers) * (1 - keep) + 1.0 / powers * keep, float(attention)


_FREQUENCIES: dict[str, Frequencies] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
}
