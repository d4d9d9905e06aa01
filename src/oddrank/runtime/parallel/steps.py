"""Processes that advance in common steps through a piece of shared memory.

Layout: N lines of 128 bytes, one a rank, which only that rank writes (`_SEQUENCE` and the other words below); the
gate, a line of its own; and a byte for each rank, set while it sleeps.

In step k a rank publishes k as its sequence number and waits until every other rank's is at least k. The rank that
then sees all of them, the last to arrive, opens the gate to k and wakes whoever sleeps at it, so that a rank
sleeps at most once a step. Two ranks may both find themselves last; they do the same thing.

Memory order: what a rank stores before it publishes a step, the others load after they have seen it. The compiled
library says so to the machine (native/ranks.cpp). Without it, plain stores from an interpreter will do on x86-64, which
keeps stores in order and loads in order; only a store that must be visible before a later load needs a full barrier
there, and taking a lock is one.
"""

import mmap
import os
import threading
import time
from collections.abc import Callable
from typing import NoReturn

from oddrank.errors import OddrankError
from oddrank.native.ranks import CLOSED, DIED, DISAGREES, LEFT, NativeRanks
from oddrank.runtime.parallel import futex
from oddrank.runtime.parallel.group import PeerLostError
from oddrank.runtime.parallel.peers import Peer

_LINE = 16  # words of 8 bytes: two cache lines, which x86 fetches together
_SEQUENCE, _SIGNATURE, _LEFT = 0, 1, 3  # words of a line; there is a signature for even and for odd steps
_LOOKS = 100  # looks at a sequence number before a rank offers its core to others
_SPIN = 100_000  # ns of that before it sleeps
_NAP = futex.timespec(0.05)  # sleep after which a rank checks that those it waits for are alive


def bytes_needed(size: int) -> int:
    """Bytes that `size` ranks need, whole pages."""
    return -(-((size + 1) * _LINE * 8 + size) // mmap.PAGESIZE) * mmap.PAGESIZE


class Steps:
    """Rank `rank`'s view of the steps of `len(pids)` processes, in the first bytes of `memory`.

    `address` is where `memory` is mapped. With `spin`, a rank looks again for up to 0.1 ms before it sleeps; that is
    for ranks that have a core each. `words_of` turns a signature into words for an error message.
    """

    def __init__(
        self,
        rank: int,
        pids: list[int],
        memory: mmap.mmap,
        address: int,
        spin: bool,
        words_of: Callable[[int], str],
    ) -> None:
        self._step = 0
        self._native: NativeRanks | None = None
        self.spin = spin
        self._rank = rank
        self._size = size = len(pids)
        self._map = memory
        self._words = memoryview(memory).cast("Q")
        self._line = rank * _LINE
        self._others = [(other, other * _LINE) for other in range(size) if other != rank]
        self._gate = size * _LINE
        self._gate_address = address + self._gate * 8
        self._sleepers = slice((size + 1) * _LINE * 8, (size + 1) * _LINE * 8 + size)
        self._mark = self._sleepers.start + rank
        self._nobody = bytes(size)
        self._peers = {other: Peer(pids[other]) for other, _ in self._others}
        self._fence = threading.Lock()
        self._words_of = words_of
        self._closed = False

    def use(self, native: NativeRanks) -> None:
        """Meet through the compiled library from now on. Before the first step."""
        self._native = native

    def descriptors(self) -> list[int]:
        """Every rank's pidfd, -1 where there is none to watch."""
        return [self._peers[rank].descriptor if rank in self._peers else -1 for rank in range(self._size)]

    @property
    def step(self) -> int:
        """The last step that this rank published."""
        return self._step if self._native is None else int(self._native.state.step)

    def meet(self, signature: int) -> None:
        """Publish the next step, with everything stored before it, and wait until the others have too.

        `signature` says what the rank does in this step, which must be the same on all of them; it is less than
        2**64. Raises `OddrankError` if it is not, `PeerLostError` if a rank is gone.
        """
        if self._native is not None:
            self._native.meet(signature)
            self.check()
            return
        words, line = self._words, self._line
        self._step = step = self._step + 1
        kept = _SIGNATURE + (step & 1)
        words[line + kept] = signature
        words[line + _SEQUENCE] = step
        with self._fence:  # or two ranks could each miss the other's number, and neither open the gate
            pass
        for _, at in self._others:
            if words[at] < step:
                self._wait(step)
                break
        else:
            if self._map[self._sleepers] != self._nobody:
                words[self._gate] = step
                futex.wake(self._gate_address)
        for other, at in self._others:
            if words[at + kept] != signature:
                self._raise_disagreement(other, words[at + kept], signature)

    def check(self) -> None:
        """Raise what went wrong in the compiled library, if anything did."""
        assert self._native is not None
        state = self._native.state
        if not state.failure:
            return
        if state.failure == DISAGREES:
            self._raise_disagreement(int(state.other), int(state.theirs), int(state.mine))
        if state.failure in (LEFT, DIED):
            self._raise_lost(int(state.other), state.failure == LEFT, int(state.step))
        self._raise_closed()

    def _wait(self, step: int) -> None:
        words = self._words
        if self._closed:
            self._raise_closed()
        if self.spin and self._look(step):
            return
        self._map[self._mark] = 1
        with self._fence:  # the last rank sees this mark, or this rank sees that one's number
            pass
        while not (self._complete(step) or words[self._gate] >= step):
            # The low half of the gate's number, little-endian, is the word slept on.
            if futex.wait(self._gate_address, words[self._gate] & 0xFFFFFFFF, _NAP):
                self._check_presence(step, ask_system=False)
            else:
                self._check_presence(step, ask_system=True)
        self._map[self._mark] = 0

    def _look(self, step: int) -> bool:
        """Look again for a while; whether all the others have published `step`."""
        words = self._words
        looks, end = _LOOKS, 0
        for _, at in self._others:
            while words[at] < step:
                if looks:
                    looks -= 1
                    continue
                # Something else may want this core, perhaps the very rank that is waited for.
                os.sched_yield()
                now = time.perf_counter_ns()
                end = end or now + _SPIN
                if now > end:
                    return False
        return True

    def _complete(self, step: int) -> bool:
        words = self._words
        return all(words[at] >= step for _, at in self._others)

    def _check_presence(self, step: int, ask_system: bool) -> None:
        words = self._words
        for other, at in self._others:
            if words[at] >= step:
                continue
            left = words[at + _LEFT]
            gone = left or (ask_system and not self._peers[other].alive())
            if gone and words[at] < step:  # it may have published this step and gone since
                self._raise_lost(other, bool(left), step)

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        if self._native is not None and not self._native.state.failure:
            self._native.state.failure = CLOSED
        self._words[self._line + _LEFT] = 1
        futex.wake(self._gate_address)
        for peer in self._peers.values():
            peer.close()

    def _raise_closed(self) -> NoReturn:
        raise OddrankError(f"Rank {self._rank} has left the group and called another collective.")

    def _raise_lost(self, other: int, left: bool, step: int) -> NoReturn:
        raise PeerLostError(
            f"Rank {other} of {self._size} (pid {self._peers[other].pid}) "
            f"{'has left the group' if left else 'has died'}; rank {self._rank} waits for it in step {step}."
        )

    def _raise_disagreement(self, other: int, theirs: int, mine: int) -> NoReturn:
        self.close()
        raise OddrankError(
            f"Ranks called different collectives: rank {self._rank} {self._words_of(mine)}, rank {other} "
            f"{self._words_of(theirs)}. Every rank must call the same ones in the same order, with equal shapes."
        )
