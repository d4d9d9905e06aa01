"""Dims: how one dimension of a stored tensor is made of axes.

A dim is asked two questions. `size(counts)`: how long is it when every axis has so many elements. And
`index(stock, slots)`: given what each local slot holds, which positions of the *source* dimension does the
local dimension draw from, -1 where it draws from none (a dummy). Everything that moves bytes, and the storage
proof, is built on that one index.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import msgspec
import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]
Counts = Mapping[str, int]


class Slots(msgspec.Struct, frozen=True, eq=False):
    """What one rank (or the virtual checkpoint) holds: per axis, the source element of each slot, -1 = dummy.

    source: axis name -> int64 [slots].
    partner: follower axis -> int64 [slots], the local leader slot each follower slot reads.
    apart: interleaved dims lie section by section here: followers need not be as many for every leader.
    """

    source: Mapping[str, IntArray]
    partner: Mapping[str, IntArray]
    apart: bool = False

    def counts(self) -> dict[str, int]:
        return {name: len(s) for name, s in self.source.items()}


def spread(source: IntArray, width: int, stride: int | None = None, offset: int = 0) -> IntArray:
    """Positions of elements `source`, each `width` consecutive positions starting at `offset + element * stride`;
    -1 stays -1. Shape [len(source) * width]."""
    stride = width if stride is None else stride
    at = source[:, None] * stride + (offset + np.arange(width, dtype=np.int64))[None, :]
    return np.where(source[:, None] < 0, np.int64(-1), at).reshape(-1)


class Whole(msgspec.Struct, frozen=True, tag="whole"):
    """A dimension no axis divides: hidden, a head's own width, a convolution kernel. Every rank has all of it."""

    length: int

    def axes(self) -> Iterator[tuple[str, int]]:
        return iter(())

    def size(self, counts: Counts) -> int:
        return self.length

    def index(self, stock: Counts, slots: Slots) -> IntArray:
        return np.arange(self.length, dtype=np.int64)


class Along(msgspec.Struct, frozen=True, tag="along"):
    """`width` consecutive positions for each element of `axis`. A query head with its output gate stored beside
    it is `Along("q_heads", 2 * head_dim)`; interleaved gate and up rows are `Along("moe", 2)`."""

    axis: str
    width: int = 1

    def axes(self) -> Iterator[tuple[str, int]]:
        yield self.axis, self.width

    def size(self, counts: Counts) -> int:
        return counts[self.axis] * self.width

    def index(self, stock: Counts, slots: Slots) -> IntArray:
        source = slots.source[self.axis]
        return source if self.width == 1 else spread(source, self.width)


class Groups(msgspec.Struct, frozen=True, tag="groups"):
    """Interleaved per element of the leading axis `by`: for each of its elements, the parts one after another;
    a part along a follower axis brings all the followers of that element. Qwen3-Next's `in_proj_qkvz` is
    `Groups("gdn_k_heads", (Along(k, 128), Along(k, 128), Along(v, 128), Along(v, 128)))`: per key head
    `[q, k, r * v, r * z]`.

    Local slots must be uniform: follower slot i belongs to leader slot i // g. `index` raises ValueError where
    they are not (such a layout has no interleaved form). Slots that are `apart` may be anything: their parts lie one
    after another, each for all of its elements, as in a `Concat`.
    """

    by: str
    parts: tuple[Along, ...]

    def axes(self) -> Iterator[tuple[str, int]]:
        for part in self.parts:
            yield part.axis, part.width

    def size(self, counts: Counts) -> int:
        return sum(counts[p.axis] * p.width for p in self.parts)

    def index(self, stock: Counts, slots: Slots) -> IntArray:
        leaders = len(slots.source[self.by])
        ratios = [stock[p.axis] // stock[self.by] for p in self.parts]
        stride = sum(r * p.width for r, p in zip(ratios, self.parts, strict=True))
        rows = 1 if slots.apart else leaders
        columns: list[IntArray] = []
        offset = 0
        for ratio, part in zip(ratios, self.parts, strict=True):
            source = slots.source[part.axis]
            if not slots.apart and len(source) and (not leaders or len(source) % leaders):
                raise ValueError(f"{len(source)} {part.axis} slots do not group by {leaders} {self.by} slots")
            # element h of the follower lies in group h // ratio, at place h % ratio inside its section
            group, place = np.divmod(source, ratio)
            start = np.where(source < 0, np.int64(-1), group * stride + offset + place * part.width)
            at = start[:, None] + np.arange(part.width, dtype=np.int64)[None, :]
            at = np.where(start[:, None] < 0, np.int64(-1), at)
            columns.append(at.reshape(rows, len(source) // max(1, rows) * part.width))
            offset += ratio * part.width
        return np.concatenate(columns, axis=1).reshape(-1)


class Concat(msgspec.Struct, frozen=True, tag="concat"):
    """Sections one after another (`q|k|v`, `gate|up`). Each is cut by itself, never the whole as one block."""

    parts: tuple[Along | Groups | Whole, ...]

    def axes(self) -> Iterator[tuple[str, int]]:
        for part in self.parts:
            yield from part.axes()

    def size(self, counts: Counts) -> int:
        return sum(p.size(counts) for p in self.parts)

    def index(self, stock: Counts, slots: Slots) -> IntArray:
        pieces: list[IntArray] = []
        offset = 0
        for part in self.parts:
            index = part.index(stock, slots)
            pieces.append(np.where(index < 0, np.int64(-1), index + offset))
            offset += part.size(stock)
        return np.concatenate(pieces)


Dim = Whole | Along | Groups | Concat
