"""One forward pass over a batch: which tokens, of which sequences, at which positions."""

from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor


class Segment(NamedTuple):
    """Tokens [start, stop) of the step are the next ones of the sequence in cache slot `slot`, which holds
    `past` tokens already."""

    slot: int
    start: int
    stop: int
    past: int

    @property
    def length(self) -> int:
        """Tokens of the sequence once the step is done."""
        return self.past + self.stop - self.start


class Step:
    """Tokens of all sequences laid end to end, without padding.

    tokens, positions: int64 [tokens]. decode: one token of each of the sequences in slots 0, 1, 2, ..., or in `order`,
    int64 [sequences], which only compiled operations take.
    static: `positions` alone says how long the sequences are, when the step runs.
    """

    static = False

    def __init__(self, tokens: Tensor, segments: Sequence[Segment], order: Tensor | None = None) -> None:
        self.tokens, self.order = tokens, order
        self.segments = tuple(segments)
        self.decode = (order is not None or self.in_order) and all(s.stop - s.start == 1 for s in self.segments)
        if self.decode:
            self.positions = torch.tensor([s.past for s in self.segments], device=tokens.device)
        else:
            spans = [torch.arange(s.past, s.length, device=tokens.device) for s in self.segments]
            self.positions = torch.cat(spans)
        self.longest = max(s.length for s in self.segments)
        self.uniform = all(s.length == self.longest for s in self.segments)
        self.sequences = [(s.stop - s.start, s.length) for s in self.segments]
        self.views: dict[Any, Any] = {}
        """What the cache keeps for the step, by attention window."""
        self._masks: dict[tuple[int | None, int | None, torch.dtype], Tensor] = {}

    @property
    def in_order(self) -> bool:
        """Whether the sequences are in slots 0, 1, 2, ..."""
        return all(s.slot == i for i, s in enumerate(self.segments))

    @property
    def last(self) -> Tensor:
        """Where each sequence's last token lies in the step, int64 [sequences]."""
        return torch.tensor([s.stop - 1 for s in self.segments], device=self.tokens.device)

    @cached_property
    def spans(self) -> Tensor:
        """Every sequence's slot, first token in the step, tokens in the step, tokens before them: int64 [sequences,
        4]."""
        rows = [(s.slot, s.start, s.stop - s.start, s.past) for s in self.segments]
        return torch.tensor(rows, device=self.tokens.device)

    @cached_property
    def slots(self) -> Tensor:
        """Every token's slot, int64 [tokens]."""
        return torch.repeat_interleave(self.spans[:, 0], self.spans[:, 2])

    @classmethod
    def of(cls, sequences: Sequence[tuple[int, Sequence[int], int]], device: torch.device | str) -> "Step":
        """From (slot, new tokens, tokens the slot holds already) of each sequence."""
        segments: list[Segment] = []
        tokens: list[int] = []
        for slot, new, past in sequences:
            segments.append(Segment(slot, len(tokens), len(tokens) + len(new), past))
            tokens.extend(new)
        return cls(torch.tensor(tokens, dtype=torch.int64, device=device), segments)

    def decode_mask(self, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """What a decode step adds to the scores, [sequences, 1, 1, keys]; None where every sequence sees all keys.

        The keys are the last `min(longest, window)` positions below `longest`.
        """
        if self.uniform:
            return None
        key = (None, window, dtype)
        if key not in self._masks:
            first = 0 if window is None else max(0, min(s.length for s in self.segments) - window)
            at = torch.arange(first, self.longest, device=self.tokens.device)
            length = torch.tensor([s.length for s in self.segments], device=self.tokens.device)[:, None]
            hidden = at >= length
            if window is not None:
                hidden |= at < length - window
            self._masks[key] = _scores(hidden, dtype)[:, None, None, :]
        return self._masks[key]

    def first_key(self, window: int | None) -> int:
        """The first position that any sequence of a decode step reads."""
        return 0 if window is None else max(0, min(s.length for s in self.segments) - window)

    def prefill_mask(self, index: int, window: int | None, dtype: torch.dtype) -> Tensor | None:
        """What segment `index` adds to its scores, [tokens, keys]; None where that is the plain causal mask."""
        segment = self.segments[index]
        if segment.past == 0 and (window is None or segment.length <= window):
            return None
        key = (index, window, dtype)
        if key not in self._masks:
            row = torch.arange(segment.past, segment.length, device=self.tokens.device)[:, None]
            at = torch.arange(segment.length, device=self.tokens.device)
            hidden = at > row
            if window is not None:
                hidden |= at <= row - window
            self._masks[key] = _scores(hidden, dtype)
        return self._masks[key]


def _scores(hidden: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill_(hidden, float("-inf"))
