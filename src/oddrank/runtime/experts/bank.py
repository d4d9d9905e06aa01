"""Banks: one matrix of every expert of a layer, each of its stored parts one tensor [experts, sections, ...].

A section is a stored matrix by itself. Checkpoints store a layer's experts stacked (one section: gate over up) or one
by one (two: gate, up); a scale that belongs to one stored matrix thus stays with it, and both decode to the same rows.
Values are held as stored, so a bank is as large as the rank's slice of the file.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy.typing as npt
import torch
from torch import Tensor

from oddrank.errors import OddrankError
from oddrank.runtime.experts.kernel import BIAS, Stored
from oddrank.runtime.formats import Decoder, decoder, torch_dtype
from oddrank.runtime.formats.integers import IntegerDecoder
from oddrank.runtime.formats.rows import Packing, packing_of
from oddrank.runtime.pages import in_large_pages
from oddrank.runtime.words import words_of
from oddrank.transform.slice import StoredMatrix

_FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


class ExpertSlice(Protocol):
    """What experts ask of a rank's slice (`oddrank.transform.slice.RankSlice`)."""

    def matrix(self, name: str) -> StoredMatrix: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> str: ...
    def read_into(self, name: str, out: npt.NDArray[Any]) -> None: ...
    def read_rows_into(self, name: str, start: int, out: npt.NDArray[Any]) -> None: ...


class BankPart(NamedTuple):
    """One stored part. shape: of one section. stored: safetensors dtype name, "" of what is made of others. dtype: what
    it is held in."""

    suffix: str
    shape: tuple[int, ...]
    stored: str
    dtype: torch.dtype


class Source(NamedTuple):
    """Where a stored tensor goes. expert: None for all of them, stacked."""

    name: str
    suffix: str
    expert: int | None
    section: int


class BankLayout:
    """What a bank holds and which stored tensors that is.

    decoder: of what is held. experts, sections: see above. n, k: this rank's rows and columns of one section.
    parts: what is held; stored: suffix -> what is read, the same unless `packing` makes the one of the other. sources:
    one for each stored tensor that is read; ignored: stored tensors that are not (activation scales).
    """

    def __init__(
        self,
        part: ExpertSlice,
        stems: Sequence[Sequence[str]] | str,
        experts: int,
        n: int,
        k: int,
        widest: torch.dtype,
        device: torch.device | str = "cpu",
        *,
        biased: bool = False,
    ) -> None:
        """stems: per expert, the matrices' names without `.weight`; or the name of the stack of all of them.
        widest: floating-point values of a dense bank that are stored wider are held in this. device: the rank's.
        biased: a stack has a bias for each expert, [experts, n], which is held as stored.

        OddrankError where the experts are not all stored alike, or have other sizes than these.
        """
        stacked = isinstance(stems, str)
        places = (
            [(stems, None, 0)]
            if isinstance(stems, str)
            else [(stem, e, s) for e, names in enumerate(stems) for s, stem in enumerate(names)]
        )
        first = part.matrix(places[0][0])
        self.experts, self.n, self.k = experts, n, k
        self.sections = 1 if stacked else len(stems[0])
        self.name = places[0][0]
        self.decoder: Decoder = decoder(first.format, first.blocks, first.transposed)
        self.packing = None if biased else _packing(part, self.decoder, first, k, widest, device)
        needed = [s.suffix for s in self.decoder.format.stored if not s.optional]
        if index := _ordered(part, self.decoder, [stem for stem, _, _ in places], k):
            self.packing = None  # the kernels take one x for all experts
            needed = [*dict.fromkeys([*needed, index])]
        if self.packing is not None:
            needed = [suffix for suffix in needed if suffix in self.packing.sources]
        self.stored = {suffix: self._part(part, first.names[suffix], suffix, widest) for suffix in needed}
        if biased:
            dtype = part.dtype(f"{self.name}{BIAS}")
            self.stored[BIAS] = BankPart(BIAS, (n,), dtype, _held_in(f"{self.name}{BIAS}", dtype))
        self.parts = list(self.stored.values())
        if self.packing is not None:
            self.decoder = self.packing.decoder
            self.parts = [BankPart(s, shape, "", dtype) for s, (shape, dtype) in self.packing.held(n).items()]
        self.sources: list[Source] = []
        self.ignored: list[str] = []
        leading = (experts,) if stacked else ()
        for stem, expert, section in places:
            found = part.matrix(stem)
            if found.format != first.format or found.blocks != first.blocks:
                raise OddrankError(
                    f"{stem} is stored as {found.format} and {self.name} as {first.format}. The experts of a layer are "
                    "computed from one bank, so all of them must be stored alike."
                )
            for suffix, read in self.stored.items():
                name = found.names.get(suffix, f"{stem}{suffix}")  # a bias's own
                self._check(part, name, read, leading)
                self.sources.append(Source(name, suffix, expert, section))
            self.ignored += [name for suffix, name in found.names.items() if suffix not in needed]

    def _part(self, part: ExpertSlice, name: str, suffix: str, widest: torch.dtype) -> BankPart:
        stored = part.dtype(name)
        dtype = _held_in(name, stored)
        if self.decoder.format.for_vectors and dtype in _FLOATS and dtype.itemsize > widest.itemsize:
            dtype = widest
        return BankPart(suffix, self.decoder.shape(suffix, self.n, self.k), stored, dtype)

    def _check(self, part: ExpertSlice, name: str, held: BankPart, leading: tuple[int, ...]) -> None:
        shape, dtype = tuple(part.shape(name)), part.dtype(name)
        if shape != (*leading, *held.shape) or dtype != held.stored:
            raise OddrankError(
                f"{name}: the plan gives this rank {dtype} {list(shape)}, and the bank of {self.name} has room for "
                f"{held.stored} {[*leading, *held.shape]}."
            )

    @property
    def expert_nbytes(self) -> int:
        """Bytes of one expert's matrix as held."""
        shapes = (torch.Size(part.shape).numel() * part.dtype.itemsize for part in self.parts)
        return self.sections * sum(shapes)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for layouts whose experts fit each other's memory."""
        return (self.sections, *((p.suffix, p.shape, p.dtype) for p in self.parts))

    def allocate(self, count: int, device: torch.device | str) -> "Bank":
        """Uninitialized memory for `count` experts."""
        return Bank(
            self,
            {
                part.suffix: in_large_pages(
                    torch.empty((count, self.sections, *part.shape), dtype=part.dtype, device=device)
                )
                for part in self.parts
            },
        )


def _packing(
    part: ExpertSlice, stored: Decoder, first: StoredMatrix, k: int, widest: torch.dtype, device: torch.device | str
) -> Packing | None:
    """Of a bank whose first matrix is `first`."""
    if widest == torch.float64:
        return None
    dtype_of, exact = (lambda suffix: part.dtype(first.names[suffix])), widest.itemsize >= 4
    return packing_of(stored, k, dtype_of, exact=exact, device=device)


def _ordered(part: ExpertSlice, stored: Decoder, stems: Sequence[str], k: int) -> str:
    """The suffix of what says so where the columns of some matrix are scattered over its scale groups; else ""."""
    if not isinstance(stored, IntegerDecoder) or not k:
        return ""
    for stem in stems:
        name = part.matrix(stem).names.get(stored.index)
        if name is None:
            continue
        groups = torch.empty(part.shape(name), dtype=torch.int32)
        part.read_into(name, words_of(groups, part.dtype(name)))
        if not all(stored.in_order(one) for one in groups.view(-1, k)):
            return stored.index
    return ""


def _held_in(name: str, stored: str) -> torch.dtype:
    dtype = torch_dtype(stored)
    if dtype is None:
        raise OddrankError(f"{name} is stored as {stored}, which the runtime cannot hold.")
    return dtype


class Bank:
    """tensors: suffix -> [experts, sections, ...]."""

    __slots__ = ("layout", "tensors")

    def __init__(self, layout: BankLayout, tensors: Mapping[str, Tensor]) -> None:
        self.layout, self.tensors = layout, tensors

    def target(self, suffix: str) -> Tensor:
        """What the stored tensors of this suffix go to."""
        packing = self.layout.packing
        return self.tensors[suffix if packing is None else packing.sources[suffix]]

    def expert(self, index: int) -> Stored:
        """The stored parts of one expert, [sections, ...] each: views."""
        return {suffix: tensor[index] for suffix, tensor in self.tensors.items()}

    def to(self, device: torch.device | str) -> "Bank":
        return Bank(self.layout, {suffix: tensor.to(device) for suffix, tensor in self.tensors.items()})

    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())


class LayerBanks(NamedTuple):
    """The two banks of a layer: gate over up [2 width, hidden], and down [hidden, width], of every expert."""

    gate_up: Bank
    down: Bank

    def expert(self, index: int) -> tuple[Stored, Stored]:
        return self.gate_up.expert(index), self.down.expert(index)

    def tensors(self) -> Iterator[Tensor]:
        for bank in self:
            yield from bank.tensors.values()

    def to(self, device: torch.device | str) -> "LayerBanks":
        return LayerBanks(self.gate_up.to(device), self.down.to(device))

    def nbytes(self) -> int:
        return self.gate_up.nbytes() + self.down.nbytes()
