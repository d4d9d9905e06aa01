"""The token embedding and the output head, each rank with its rows of the vocabulary in any order."""

from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own name for it)
from torch import Tensor

from oddrank.errors import OddrankError
from oddrank.native.compiled import library
from oddrank.native.embedding import TABLES, take_rows
from oddrank.runtime.layers.kernels import LinearWeight, NarrowWeight, Rows, WeightFormat, dense_product
from oddrank.runtime.layers.module import Module, Parameter
from oddrank.runtime.parallel.group import Columns, Group
from oddrank.runtime.parallel.partial import Partial
from oddrank.runtime.precision import Precision

_CONTENDERS = 64
"""How many of a rank's largest rounded logits are computed again exactly."""


class TableWeight(LinearWeight):
    """A matrix [N, K] that is multiplied by, and whose rows are looked up."""

    def take(self, rows: Tensor) -> Tensor:
        """int64 [n] -> [n, K], in the activations' type."""
        raise NotImplementedError

    def take_tokens(self, tokens: Tensor, row: Tensor | None) -> Tensor | None:
        """The same for tokens, of which `row` (int32) says in what row each is, -1 for nowhere: zeros. None: each is in
        the row of its number. As one compiled operation; None where there is none for the table."""
        return None


class DenseTable(TableWeight):
    """Stays unpacked, so that rows can be looked up."""

    def __init__(self, name: str, rows: int, k: int, precision: Precision) -> None:
        self.weight = Parameter([(f"{name}.weight", rows)], (k,), precision.weights)
        self.dtype = precision.activations
        self.narrow = NarrowWeight(self.weight) if precision.weights != precision.activations else None
        self._threads = 1

    def prepare(self, threads: int) -> None:
        self._threads = threads

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if self.narrow is None:
            return dense_product(self.weight.data, x, bias, self._threads)
        return self.narrow(x, bias)

    def take(self, rows: Tensor) -> Tensor:
        return F.embedding(rows, self.weight.data).to(self.dtype)

    def take_tokens(self, tokens: Tensor, row: Tensor | None) -> Tensor | None:
        table, found = self.weight.data, library()
        if found is None or self.dtype != torch.float32 or table.dtype not in TABLES or not tokens.is_cpu:
            return None
        return take_rows(found, table, tokens, row)


class TableFormat(Protocol):
    """How tables are stored."""

    def table(self, name: str, rows: int, k: int) -> TableWeight: ...


class VocabParallelEmbedding(Module):
    """Row lookup. tokens int64 [tokens] -> Partial [tokens, hidden]: a token's row is on one rank, the others
    add nothing.

    source: int64 [local rows], the token each row belongs to, -1 for a dummy.
    """

    def __init__(
        self,
        form: TableFormat,
        name: str,
        source: npt.NDArray[np.int64],
        hidden: int,
        group: Group,
        precision: Precision,
    ) -> None:
        self.table = form.table(name, len(source), hidden)
        self.group, self.dtype, self.hidden = group, precision.activations, hidden
        real = np.flatnonzero(source >= 0)
        self._whole = group.size == 1 and bool((source == np.arange(len(source))).all())
        row = np.full(int(source.max(initial=-1)) + 1, -1, dtype=np.int32)
        row[source[real]] = real
        self._row = torch.from_numpy(row).to(group.device)

    def __call__(self, tokens: Tensor) -> Partial:
        if len(self._row) == 0:
            return Partial.nothing((len(tokens), self.hidden), self.dtype, self.group)
        taken = self.table.take_tokens(tokens, None if self._whole else self._row)
        if taken is not None:
            return Partial(taken, self.group)
        if self._whole:
            return Partial(self.table.take(tokens), self.group)
        last = len(self._row) - 1
        row = self._row[tokens.clamp(max=last)]
        absent = (row < 0) | (tokens > last)
        out = self.table.take(row.clamp_(min=0))
        return Partial(out.masked_fill_(absent[:, None], 0), self.group)


class ParallelLMHead(Module):
    """hidden [tokens, hidden] -> logits [tokens, vocab] on every rank, in the order of the vocabulary.

    Ranks may hold different numbers of rows, in any order, dummies among them; those never reach the result.
    tied: the embedding whose rows are also the head's. Every rank constructs it at the same time: they tell
    each other which rows they hold (one all-gather).
    """

    def __init__(
        self,
        form: WeightFormat,
        name: str,
        source: npt.NDArray[np.int64],
        hidden: int,
        vocab: int,
        group: Group,
        precision: Precision,
        tied: VocabParallelEmbedding | None = None,
    ) -> None:
        self.weight = form.linear([Rows(name, len(source))], hidden) if tied is None else tied.table
        self.group, self._rows, self._dtype = group, len(source), precision.activations
        held = group.all_gather_list(torch.from_numpy(np.array(source)).to(group.device))
        self._columns = _columns([rows.cpu().numpy() for rows in held], vocab, group)

    def __call__(self, x: Tensor) -> Tensor:
        local = self._local(x) if self._rows else x.new_empty(len(x), 0)
        return self.group.all_gather_columns(local, self._columns)

    def _local(self, x: Tensor) -> Tensor:
        logits = self.weight(x)
        narrow = self.weight.narrow if isinstance(self.weight, DenseTable) else None
        if narrow is not None and narrow.rounds and len(x) <= 3:
            # The half-precision product rounds each logit to 8 bits, which makes ties of near neighbours.
            for scores, row in zip(logits, x, strict=True):
                best = scores.topk(min(_CONTENDERS, self._rows), sorted=False).indices
                scores.index_copy_(0, best, narrow.exact(row, best))
        return logits


def _columns(rows: list[npt.NDArray[np.int64]], vocab: int, group: Group) -> Columns:
    """How gathered logits come into the vocabulary's order. rows: what each rank holds."""
    held, widths = np.concatenate(rows), [len(each) for each in rows]
    is_real = (held >= 0) & (held < vocab)
    counts = np.bincount(held[is_real], minlength=vocab)
    wrong = np.flatnonzero(counts != 1)
    if len(wrong):
        raise OddrankError(
            f"Token {int(wrong[0])} of {vocab} is on {int(counts[wrong[0]])} of {group.size} ranks' vocabulary "
            f"rows ({len(wrong)} such tokens); each must be on exactly one. The plan is not sound."
        )
    if bool((held[:vocab] == np.arange(vocab)).all()):
        return Columns(widths, vocab)
    return Columns(widths, vocab, torch.from_numpy(np.where(is_real, held, -1)).to(group.device))
