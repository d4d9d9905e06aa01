"""Routed experts by the Triton kernels: a layer's sum for a batch, of which the host knows the size alone."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor

from oddrank.gpu.kernels.experts import inner, outer, summed
from oddrank.gpu.launch import INTERPRETED, Tiles, by_block, columns_at_a_time, device_of
from oddrank.gpu.matrix import DENSE, GpuMatrix, described
from oddrank.runtime.formats import Decoder

_SUMMED_COLUMNS = 1024


class Blocks(NamedTuple):
    """Choices (token * k + which of its k) in blocks of one expert each, all on the device.

    order: int64 [choices]. experts, starts, stops: int64 [blocks], each block's expert and its places in `order`; a
    block that is not needed has none. size: places of a block at most.
    """

    order: Tensor
    experts: Tensor
    starts: Tensor
    stops: Tensor
    size: int


@cache
def _count(length: int, device: torch.device) -> Tensor:
    with torch.inference_mode(False):
        return torch.arange(length, device=device)


def blocks_of(ids: Tensor, experts: int, size: int) -> Blocks:
    """ids int64 [tokens, k] -> blocks of at most `size` choices, sorted by expert; every size known beforehand."""
    flat, device = ids.reshape(-1), ids.device
    order = flat.argsort(stable=True)
    firsts = torch.searchsorted(flat.index_select(0, order), _count(experts + 1, device))
    needed = (firsts.diff() + size - 1) // size
    ends = needed.cumsum(0)
    number = _count(len(flat) // size + min(experts, len(flat)), device)
    expert = torch.searchsorted(ends, number, right=True)
    real, expert = expert < experts, expert.clamp(max=experts - 1)
    place = number - (ends - needed).index_select(0, expert)
    starts = firsts.index_select(0, expert) + place * size
    stops = torch.minimum(starts + size, firsts.index_select(0, expert + 1))
    return Blocks(order, expert, starts, torch.where(real, stops, starts), size)


def blocks_of_one(ids: Tensor, size: int) -> Blocks:
    """A block for every choice, in the order of the tokens: for so few that hardly two want the same expert."""
    number = _count(ids.numel() + 1, ids.device)
    return Blocks(number[:-1], ids.reshape(-1), number[:-1], number[1:], size)


class GpuExperts:
    """A layer's experts, [width, hidden] twice and [hidden, width] each. Sums are in fp32; what lies between the two
    products is rounded to x's type. Each token's terms are added in the order of its choices."""

    def __init__(self, gate_up: GpuMatrix, down: GpuMatrix) -> None:
        self.gate_up, self.down = gate_up, down
        self.experts, sections = gate_up.values.shape[:2]
        self.width, self.hidden = down.k, down.n
        self._up_row = self.width if sections == 1 else 0

    def takes(self, x: torch.dtype) -> bool:
        """Whether it computes with x of this type: dense weights must not lose anything in it."""
        dense = [bank.values.dtype for bank in (self.gate_up, self.down) if bank.form == DENSE]
        floats = (torch.float32, torch.bfloat16, torch.float16)
        return x in floats and all(x in (held, torch.float32) for held in dense)

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """x [tokens, hidden], weights and ids [tokens, k], each token's ids different -> [tokens, hidden]."""
        tokens, k = ids.shape
        out = torch.empty(tokens, self.hidden, dtype=x.dtype, device=x.device)
        if not ids.numel():
            return out.zero_()
        x, weights, ids = x.contiguous(), weights.contiguous(), ids.long().contiguous()
        blocks = self._blocks(ids)
        between = torch.empty(ids.numel(), self.width, dtype=x.dtype, device=x.device)
        self._inner(x, blocks, between, k)
        terms = torch.empty(ids.numel(), self.hidden, dtype=torch.float32, device=x.device)
        self._outer(between, blocks, weights, terms)
        width = min(_SUMMED_COLUMNS, 1 << (self.hidden - 1).bit_length())
        summed[(-(-self.hidden // width), tokens)](terms, out, self.hidden, k, width=width)
        return out

    def _blocks(self, ids: Tensor) -> Blocks:
        each = ids.numel() / self.experts
        if ids.shape[0] == 1 or each <= 0.5:
            return blocks_of_one(ids, 16)
        return blocks_of(ids, self.experts, 16 if each <= 16 else 64)

    def _inner(self, x: Tensor, blocks: Blocks, out: Tensor, k: int) -> None:
        m, bank = self.gate_up, self.gate_up
        tiles = self._tiles(bank, x.dtype, blocks, 32, self.width)
        value, scale, factor = m.strides(m.values), m.strides(m.scales), m.strides(m.factor)
        two = self._up_row == 0
        inner[(-(-self.width // tiles.n), len(blocks.experts))](
            x, blocks.experts, blocks.order, blocks.starts, blocks.stops, m.values, m.scales, m.factor, out,
            self.width, m.k, k, x.stride(0),
            value.expert, value.section if two else 0, m.value_row,
            scale.expert, scale.section if two else 0, m.scale_row, m.scale_column,
            factor.expert, factor.section if two else 0, self._up_row,
            **self._constants(m, x, tiles),
        )  # fmt: skip

    def _outer(self, x: Tensor, blocks: Blocks, weights: Tensor, out: Tensor) -> None:
        m = self.down
        tiles = self._tiles(m, x.dtype, blocks, 64, self.hidden)
        outer[(-(-self.hidden // tiles.n), len(blocks.experts))](
            x, blocks.experts, blocks.order, blocks.starts, blocks.stops, weights, m.values, m.scales, m.factor, out,
            self.hidden, m.k,
            m.strides(m.values).expert, m.value_row, m.strides(m.scales).expert, m.scale_row, m.scale_column,
            m.strides(m.factor).expert,
            **self._constants(m, x, tiles),
        )  # fmt: skip

    def _tiles(self, m: GpuMatrix, x: torch.dtype, blocks: Blocks, rows: int, n: int) -> Tiles:
        decode = blocks.size <= 16
        k = columns_at_a_time(m, x, decode)
        rows = rows if decode or x == torch.float32 else 2 * rows
        return Tiles(blocks.size, min(rows, max(16, 1 << (n - 1).bit_length())), k, 4, 3 if x.itemsize == 2 else 2)

    def _constants(self, m: GpuMatrix, x: Tensor, tiles: Tiles) -> dict[str, int | bool]:
        return {
            "form": m.form, "block_n": m.block_n, "block_k": m.block_k, "divides": m.divides,
            "by_block": by_block(m, x.dtype), "native": device_of(x.device).native,
            "wide": INTERPRETED or x.dtype == torch.float32,
            "tile_m": tiles.m, "tile_n": tiles.n, "tile_k": tiles.k,
            "num_warps": tiles.warps, "num_stages": tiles.stages,
        }  # fmt: skip


def gpu_experts(
    gate_up: tuple[Decoder, Mapping[str, Tensor]],
    down: tuple[Decoder, Mapping[str, Tensor]],
    activation: Callable[[Tensor], Tensor],
) -> GpuExperts | None:
    """Decoders and stored parts [experts, sections, ...] of a layer's two banks; None where the kernels do not take
    them."""
    if activation is not F.silu:
        return None
    upper, lower = described(*gate_up, leading=2), described(*down, leading=2)
    return None if upper is None or lower is None else GpuExperts(upper, lower)
