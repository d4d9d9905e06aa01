"""Decode steps: computed by the model's Python, recorded, and from then on replayed without any.

The first step of a number of sequences runs as always. The second is recorded (native/tape.py), while it runs. The
third is computed both ways, and the logits, keys, values and states must have the same bits. Then steps are replayed,
until the cache or the table of angles moves. Where a model does something that no compiled operation does, or the bits
differ, its steps stay what they were; the log, at debug level, says why.

What changes from one step to the next is read by the operations from memory that stays where it is: tokens, positions
and slots.
"""

import logging
from collections import OrderedDict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from oddrank.errors import OddrankError
from oddrank.native.compiled import Library, library
from oddrank.native.tape import Blocks, Recording, Tape
from oddrank.runtime.cache import KVCache
from oddrank.runtime.models.llama import Llama
from oddrank.runtime.step import Step

TAPES = 64
"""Numbers of sequences whose steps are kept recorded; of more, those used last."""

log = logging.getLogger(__name__)


class _Inputs:
    """Of a step of n sequences, where its recording reads them."""

    def __init__(self, n: int, hidden: int, dtype: torch.dtype) -> None:
        self.tokens, self.positions = torch.zeros(n, dtype=torch.int64), torch.zeros(n, dtype=torch.int64)
        self.slots, self.hidden = torch.zeros(n, dtype=torch.int64), torch.zeros(n, hidden, dtype=dtype)
        self._tokens, self._positions, self._slots = self.tokens.numpy(), self.positions.numpy(), self.slots.numpy()

    def set(self, tokens: Sequence[int], past: Sequence[int], slots: Sequence[int]) -> None:
        self._tokens[:], self._positions[:], self._slots[:] = tokens, past, slots

    def nbytes(self) -> int:
        return self.tokens.nbytes + self.positions.nbytes + self.slots.nbytes + self.hidden.nbytes


class _Place(NamedTuple):
    """What recordings point into."""

    cache: KVCache
    capacity: int
    angles: Tensor

    def is_still(self, other: "_Place") -> bool:
        return self.cache is other.cache and self.capacity == other.capacity and self.angles is other.angles


class _Recorded:
    """A step of n sequences on tape. embedded: whether looking the tokens up is on it."""

    def __init__(self, inputs: _Inputs, embedded: bool, tape: Tape, logits: Tensor, collectives: list[int]) -> None:
        self.inputs, self.embedded, self.tape, self.logits = inputs, embedded, tape, logits
        self.collectives = collectives
        self.checked = False


class DecodeSteps:
    """Decode steps of one rank's model. record: whether to record them at all."""

    def __init__(self, model: Llama, record: bool = True) -> None:
        self.model = model
        able = record and model.group.recordable and model.group.device.type == "cpu"
        able = able and model.precision.activations == torch.float32  # what compiled operations take
        self._library: Library | None = library() if able else None
        self._blocks = Blocks()
        self._tapes: OrderedDict[int, _Recorded] = OrderedDict()
        self._seen: set[int] = set()
        self._refused: set[int] = set()
        self._place: _Place | None = None
        self.replayed = 0
        """Steps that were replayed."""

    def __call__(
        self, tokens: Sequence[int], past: Sequence[int], cache: KVCache, slots: Sequence[int] | None = None
    ) -> Tensor:
        """The logits [n, vocab] of one more token of each of the sequences in `slots`, by default 0 to n - 1, which
        hold `past` tokens. Good until the next step."""
        n, longest = len(tokens), max(past) + 1
        slots = range(n) if slots is None else slots
        if self._library is None or n in self._refused or self.model.rotary.stretched(longest):
            return self._compute(tokens, past, slots, cache)
        cache.reserve(longest)
        self.model.rotary.reserve(longest)
        self._settle(cache)
        recorded = self._tapes.get(n)
        if recorded is None:
            if n in self._seen:
                return self._record(self._library, tokens, past, slots, cache)
            self._seen.add(n)
            return self._compute(tokens, past, slots, cache)
        self._tapes.move_to_end(n)
        if not recorded.checked:
            return self._check(recorded, tokens, past, slots, cache)
        self.replayed += 1
        return self._replay(recorded, tokens, past, slots)

    @property
    def recording(self) -> bool:
        """Whether steps may be recorded."""
        return self._library is not None

    def tape(self, n: int) -> Tape | None:
        """The recording that steps of n sequences are replayed from, if they are."""
        recorded = self._tapes.get(n)
        return None if recorded is None or not recorded.checked else recorded.tape

    def nbytes(self) -> int:
        """Bytes that recordings compute in."""
        return self._blocks.nbytes + sum(each.inputs.nbytes() for each in self._tapes.values())

    def forget(self) -> None:
        """Drop what was recorded, and with it the hold on the cache."""
        self._tapes.clear()
        self._place = None

    def _settle(self, cache: KVCache) -> None:
        """Recordings point into the cache and the table of angles: drop them where those have moved."""
        place = _Place(cache, cache.capacity, self.model.rotary.table[0])
        if self._place is None or not place.is_still(self._place):
            self.forget()
            self._place = place

    def _step(self, tokens: Sequence[int], past: Sequence[int], slots: Sequence[int], cache: KVCache) -> Step:
        """Without compiled operations, a decode step only where the slots are 0, 1, ... of a cache that is no pages."""
        sequences = [(slot, [token], held) for slot, token, held in zip(slots, tokens, past, strict=True)]
        step = Step.of(sequences, self.model.group.device)
        if self._library is None:
            step.decode = step.decode and not cache.paged
            return step
        if step.decode:
            return step
        return Step(step.tokens, step.segments, torch.tensor(list(slots), dtype=torch.int64))

    def _compute(self, tokens: Sequence[int], past: Sequence[int], slots: Sequence[int], cache: KVCache) -> Tensor:
        return self.model.logits(self.model(self._step(tokens, past, slots, cache), cache))

    def _record(
        self, found: Library, tokens: Sequence[int], past: Sequence[int], slots: Sequence[int], cache: KVCache
    ) -> Tensor:
        model, n, step = self.model, len(tokens), self._step(tokens, past, slots, cache)
        inputs = _Inputs(n, model.config.hidden, model.precision.activations)
        inputs.set(tokens, past, slots)
        step.tokens, step.positions, step.order = inputs.tokens, inputs.positions, inputs.slots
        cache.begin(step)
        before = _collectives(model)
        with Recording(found, self._blocks) as recording:
            h = model.embed(step.tokens)
        embedded = recording.stray is None
        if not embedded:
            log.debug("looking up %d tokens is not recorded: it calls %s", n, recording.stray)
            before = _collectives(model)
            recording, h = Recording(found, self._blocks), inputs.hidden.copy_(h)
        with recording:
            logits = model.logits(model.run_blocks(h, step, cache))
        logits = self._blocks.released(logits)  # no step needs those of the one before: their memory serves all numbers
        made = [after - start for after, start in zip(_collectives(model), before, strict=True)]
        if recording.stray is not None:
            log.debug("decoding %d sequences is not recorded: it calls %s", n, recording.stray)
        if self._all_agree(n, recording.stray is None):
            self._tapes[n] = _Recorded(inputs, embedded, recording.tape, logits, made)
            while len(self._tapes) > TAPES:
                self._tapes.popitem(last=False)
        return logits

    def _check(
        self, recorded: _Recorded, tokens: Sequence[int], past: Sequence[int], slots: Sequence[int], cache: KVCache
    ) -> Tensor:
        """Compute a step, take back what it wrote, and replay it."""
        n, before = len(tokens), cache.written(past, slots)
        wanted = [self._compute(tokens, past, slots, cache).clone(), *cache.written(past, slots)]
        cache.write(past, slots, before)
        found = [self._replay(recorded, tokens, past, slots), *cache.written(past, slots)]
        same = all(_same_bits(a, b) for a, b in zip(wanted, found, strict=True))
        if not same:
            log.debug("decoding %d sequences is not replayed: it gives other numbers than the model", n)
        if self._all_agree(n, same):
            recorded.checked = True
            log.debug(
                "decoding %d sequences: %d calls recorded, which compute in %.1f MiB",
                n, len(recorded.tape), self.nbytes() / 2**20,
            )  # fmt: skip
        cache.write(past, slots, wanted[1:])
        return wanted[0]

    def _replay(self, recorded: _Recorded, tokens: Sequence[int], past: Sequence[int], slots: Sequence[int]) -> Tensor:
        inputs = recorded.inputs
        inputs.set(tokens, past, slots)
        if not recorded.embedded:
            inputs.hidden.copy_(self.model.embed(inputs.tokens))
        if not recorded.tape.replay():
            self.model.group.check()
            raise OddrankError("A recorded operation failed and none of the ranks is to blame for it.")
        counts = self.model.group.counts
        counts.all_reduce += recorded.collectives[0]
        counts.all_gather += recorded.collectives[1]
        return recorded.logits

    def _all_agree(self, n: int, good: bool) -> bool:
        """Whether a recording is good on every rank: they all go on alike."""
        group = self.model.group
        if group.size > 1:
            good = bool(group.all_gather(torch.tensor([good])).all())
        if not good:
            self._refused.add(n)
            self._tapes.pop(n, None)
        return good


def _collectives(model: Llama) -> tuple[int, int]:
    return model.group.counts.all_reduce, model.group.counts.all_gather


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return bool(np.array_equal(a.contiguous().view(torch.uint8).numpy(), b.contiguous().view(torch.uint8).numpy()))
