"""From a rank's slice of the mapped files into its banks.

Stored tensors are copied straight from the mapping to where they stay. Only what must be converted, or goes to another
device, passes through memory of its own: one expert's part a thread. So a rank's memory while loading is its banks and
a constant, on one thread and on several.
"""

import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from oddrank.checkpoint.dtypes import STORAGE
from oddrank.runtime.experts.bank import Bank, BankPart, ExpertSlice, Source
from oddrank.runtime.formats import torch_dtype
from oddrank.runtime.threads import side_by_side
from oddrank.runtime.words import words_of

Release = Callable[[str], object]

_CHUNK = 64 << 20
"""Bytes of a stack that a thread reads at a time."""


class _Piece(NamedTuple):
    """Experts [start, stop) of a bank's part, from one stored tensor."""

    bank: Bank
    part: BankPart
    source: Source
    start: int
    stop: int


def fill(banks: Sequence[Bank], part: ExpertSlice, release: Release | None = None, *, threads: int = 1) -> int:
    """Copy the stored tensors of `banks` from `part`, on `threads` threads. Returns the bytes stored.

    release: called with each stored tensor's name once it was read, one call at a time.
    """
    pieces = [piece for bank in banks for piece in _pieces(bank)]
    waiting, lock = Counter(piece.source.name for piece in pieces), threading.Lock()

    staging = _Staging()

    def read(piece: _Piece) -> int:
        _read(piece, part, staging)
        name = piece.source.name
        with lock:
            waiting[name] -= 1
            if release is not None and waiting[name] == 0:
                release(name)
        return _nbytes(piece)

    if threads == 1:
        return sum(read(piece) for piece in pieces)
    return sum(side_by_side(threads, read, pieces))


class _Staging(threading.local):
    """Memory of a thread that what it reads passes through, always the same."""

    def __init__(self) -> None:
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def tensor(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        wanted = torch.Size(shape).numel() * dtype.itemsize
        if wanted > len(self._bytes):
            self._bytes = torch.empty(0, dtype=torch.uint8)  # gone before the larger one is there
            self._bytes = torch.empty(wanted, dtype=torch.uint8)
        return self._bytes[:wanted].view(dtype).view(shape)


def _pieces(bank: Bank) -> Iterator[_Piece]:
    for source in bank.layout.sources:
        part = bank.layout.stored[source.suffix]
        if source.expert is not None:
            yield _Piece(bank, part, source, source.expert, source.expert + 1)
            continue
        one = max(1, bank.target(part.suffix)[:1].nbytes)
        step = max(1, _CHUNK // one)
        for start in range(0, bank.layout.experts, step):
            yield _Piece(bank, part, source, start, min(start + step, bank.layout.experts))


def _nbytes(piece: _Piece) -> int:
    words = np.dtype(STORAGE[piece.part.stored]).itemsize
    return (piece.stop - piece.start) * int(np.prod(piece.part.shape, dtype=np.int64)) * words


def _read(piece: _Piece, part: ExpertSlice, staging: _Staging) -> None:
    target = piece.bank.target(piece.part.suffix)[piece.start : piece.stop, piece.source.section]
    stored, packing = torch_dtype(piece.part.stored), piece.bank.layout.packing
    assert stored is not None  # the layout was made of it
    if packing is None and target.device.type == "cpu" and target.dtype == stored:
        _copy(piece, part, target, piece.start)
        return
    staged = staging.tensor((1, *piece.part.shape), stored)
    for at in range(len(target)):
        _copy(piece, part, staged, piece.start + at)
        if packing is None:
            target[at].copy_(staged[0])
        else:
            packing.pack(piece.part.suffix, staged[0], 0, target[at])


def _copy(piece: _Piece, part: ExpertSlice, out: Tensor, first: int) -> None:
    """Words of experts first, first + 1, ... into `out` [experts, ...]."""
    if not out.numel():
        return
    words = words_of(out, piece.part.stored)
    if piece.source.expert is None:
        part.read_rows_into(piece.source.name, first, words)
    else:
        part.read_into(piece.source.name, words[0, ...])
