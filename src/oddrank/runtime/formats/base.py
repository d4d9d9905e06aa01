"""Decoding a stored matrix [..., N, K], and the reference product with it, which decodes tiles of rows.

A decoder is one file in this folder with a module-level `KIND`, the first words of the names of the formats it decodes
(`fp8` decodes `fp8-block-ct`; several: a tuple), and `DECODER`, its class. Which tensors a format stores,
and what one entry of each covers, is declared in oddrank.formats; a decoder only knows what the words mean.
"""

import importlib
import math
import pkgutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from functools import cache

import torch
from msgspec import structs
from torch import Tensor

from oddrank.errors import OddrankError
from oddrank.formats import Format, Stored, format_named
from oddrank.layout.index import entries

Block = tuple[int, int]
"""Logical elements along (N, K) that one stored entry covers; 0 = the whole dimension."""

Parts = Mapping[str, Tensor]
"""A stored matrix: suffix of the format (`.weight`, `.weight_scale`, ...) -> tensor, held as stored."""

_TILE_ELEMENTS = 1 << 20
"""Elements decoded at a time: 4 MB in fp32, which the last-level cache keeps."""

_TORCH: dict[str, torch.dtype] = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.uint8,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I32": torch.int32,
    "I64": torch.int64,
}


def torch_dtype(stored: str) -> torch.dtype | None:
    """What a stored tensor of this safetensors dtype is held in; None if it cannot be. Exponents (e8m0) are bytes."""
    return _TORCH.get(stored)


class Decoder(ABC):
    """One stored form of a matrix.

    format: as declared. blocks: suffix -> what one entry covers in the tensors at hand, where that differs from the
    declaration (scales rewritten in finer blocks).
    """

    def __init__(self, format: Format, blocks: Mapping[str, Block] | None = None) -> None:
        self.format, self.name = format, format.name
        self.blocks: dict[str, Block] = {s.suffix: s.block for s in format.stored} | dict(blocks or {})
        self._stored: dict[str, Stored] = {s.suffix: s for s in format.stored}
        self._tile_rows = math.lcm(*(max(1, n) for n, _ in self.blocks.values()))

    @property
    def values(self) -> str:
        """The suffix of the tensor that holds the matrix's values."""
        return self.format.stored[0].suffix

    def shape(self, suffix: str, n: int, k: int, leading: tuple[int, ...] = ()) -> tuple[int, ...]:
        """The shape of a stored tensor of a matrix [*leading, n, k]."""
        rows, columns = (entries(size, b) for size, b in zip((n, k), self.blocks[suffix], strict=True))
        stored = self._stored[suffix]
        orders = {"nk": (rows, columns), "kn": (columns, rows), "n": (rows,), "k": (columns,), "one": (1,)}
        return (*leading, *orders.get(stored.shape, ()), *((stored.inner,) if stored.inner else ()))

    @abstractmethod
    def dequantize(self, stored: Parts, dtype: torch.dtype) -> Tensor:
        """The matrix [..., N, K] in `dtype` (fp32 or fp64: arithmetic is done in it)."""

    def rows(self, stored: Parts, start: int, stop: int) -> dict[str, Tensor]:
        """The stored tensors of rows [start, stop) of a matrix [N, K]; `start` is a multiple of every block's rows."""
        found = {}
        for suffix, tensor in stored.items():
            block, shape = self.blocks[suffix][0], self._stored[suffix].shape
            if block == 0 or shape in ("one", "scalar", "k"):
                found[suffix] = tensor
                continue
            part = slice(start // block, -(-stop // block))
            found[suffix] = tensor[..., part] if shape == "kn" else tensor[part]
        return found

    def size(self, stored: Parts) -> int:
        """Rows of a matrix [N, K]."""
        return stored[self.values].shape[0]

    def linear(self, x: Tensor, stored: Parts, bias: Tensor | None = None) -> Tensor:
        """x [..., K] times the transposed matrix [N, K], plus bias [N], gives [..., N] in x's type.

        Half-precision x is multiplied in fp32, tile by tile: no weight is rounded after it was decoded.
        """
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        n = self.size(stored)
        flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).to(wide)
        out = torch.empty(len(flat), n, dtype=wide, device=x.device)
        step = max(1, _TILE_ELEMENTS // max(1, x.shape[-1]) // self._tile_rows) * self._tile_rows
        for start in range(0, n, step):
            stop = min(start + step, n)
            tile = self.dequantize(self.rows(stored, start, stop), wide)
            torch.mm(flat, tile.t(), out=out[:, start:stop])
        if bias is not None:
            out += bias
        return out.to(x.dtype).reshape(*x.shape[:-1], n)

    def take(self, stored: Parts, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Some rows of a matrix [N, K], int64 [n] -> [n, K] in `dtype`."""
        found = {}
        for suffix, tensor in stored.items():
            block = self.blocks[suffix][0]
            whole = block == 0 or self._stored[suffix].shape in ("one", "scalar")
            found[suffix] = tensor if whole else _index(tensor, rows // block)
        one_by_one = type(self)(self.format, {s: (min(n, 1), k) for s, (n, k) in self.blocks.items()})
        return one_by_one.dequantize(found, torch.float64 if dtype == torch.float64 else torch.float32).to(dtype)

    def spread(self, suffix: str, scale: Tensor, n: int, k: int) -> Tensor:
        """A scale of `suffix`, decoded, in a shape that multiplies a matrix [..., n, k] element by element."""
        shape = self._stored[suffix].shape
        if shape in ("n", "one"):
            scale = scale[..., None]
        elif shape == "scalar":
            scale = scale[..., None, None]
        for dim, (size, block) in enumerate(zip((n, k), self.blocks[suffix], strict=True), -2):
            if block > 1 and shape in ("nk", "n") and scale.shape[dim] != 1:
                scale = scale.repeat_interleave(block, dim)
            if scale.shape[dim] > size > 0:
                scale = scale.narrow(dim, 0, size)
        return scale


def _index(tensor: Tensor, rows: Tensor) -> Tensor:
    """Rows of a tensor of any dtype (torch selects no fp8 everywhere)."""
    if tensor.dtype != torch.float8_e4m3fn:
        return tensor.index_select(0, rows)
    return tensor.view(torch.uint8).index_select(0, rows).view(tensor.dtype)


@cache
def _decoders() -> dict[str, type[Decoder]]:
    import oddrank.runtime.formats as package

    found = [importlib.import_module(f"{package.__name__}.{i.name}") for i in pkgutil.iter_modules(package.__path__)]
    made = [m for m in found if hasattr(m, "DECODER")]
    return {kind: m.DECODER for m in made for kind in ((m.KIND,) if isinstance(m.KIND, str) else m.KIND)}


def decoder(name: str, blocks: Mapping[str, Block] | None = None, transposed: bool = False) -> Decoder:
    """The decoder of a plan's format. OddrankError for a format that the runtime does not decode.

    blocks: see `Decoder`; `RankSlice.matrix` tells them. transposed: values are stored [..., K, N], and decoded as
    [..., N, K] all the same; such a matrix is dense.
    """
    for kind, made in _decoders().items():
        if f"{name}-".startswith(f"{kind}-"):
            return made(_transposed(format_named(name)) if transposed else format_named(name), blocks)
    raise OddrankError(
        f"The runtime does not decode the format {name}. It decodes {', '.join(sorted(_decoders()))}; a new one "
        "is one file in oddrank/runtime/formats."
    )


def _transposed(form: Format) -> Format:
    values, *rest = form.stored
    return structs.replace(form, stored=(structs.replace(values, shape="kn"), *rest))
