"""Pages of the KV cache: who holds them, and which prefixes they still remember.

A page holds the keys and values of `size` consecutive tokens of every layer. A full page is known by its tokens and all
those before them, so that a request whose prompt begins alike uses it again; while it does, nobody writes to it. Pages
that nobody holds keep what they remember until their place is needed, the longest unused first.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Sequence

Key = bytes
"""Of a prefix of whole pages: a digest of all its tokens."""

_ROOT: Key = b""


def key_of(parent: Key, tokens: Sequence[int]) -> Key:
    """The key of the prefix `parent` and one page of tokens more. A digest that nobody can aim: two prompts of one key
    would read each other's memory."""
    return hashlib.blake2b(parent + array("q", tokens).tobytes(), digest_size=16).digest()


def keys_of(tokens: Sequence[int], size: int) -> list[Key]:
    """Of each whole page of tokens."""
    keys, parent = [], _ROOT
    for end in range(size, len(tokens) + 1, size):
        parent = key_of(parent, tokens[end - size : end])
        keys.append(parent)
    return keys


class Pages:
    """count pages of `size` tokens. reuse: whether prefixes are remembered at all."""

    def __init__(self, count: int, size: int, reuse: bool = True) -> None:
        self.count, self.size, self.reuse = count, size, reuse
        self._free = list(range(count - 1, -1, -1))
        self._holders = [0] * count
        self._key: list[Key | None] = [None] * count
        self._page: dict[Key, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()  # held by nobody, remembered; the longest unused first

    @property
    def available(self) -> int:
        """Pages that can be had now, by forgetting what they remember if need be."""
        return len(self._free) + len(self._idle)

    @property
    def held(self) -> int:
        """Pages that some request holds."""
        return self.count - self.available

    @property
    def remembered(self) -> int:
        """Pages that hold a known prefix, in use or not."""
        return len(self._page)

    def known(self, keys: Sequence[Key]) -> int:
        """How many of a prompt's first pages are remembered."""
        found = 0
        for key in keys:
            if key not in self._page:
                break
            found += 1
        return found

    def is_idle(self, key: Key) -> bool:
        """Whether a known page is held by nobody."""
        return self._page[key] in self._idle

    def take_known(self, keys: Sequence[Key]) -> list[int]:
        """Hold the remembered pages of these keys, all of which are known."""
        pages = [self._page[key] for key in keys]
        for page in pages:
            self._idle.pop(page, None)
            self._holders[page] += 1
        return pages

    def take(self, wanted: int) -> list[int]:
        """Hold so many pages that nobody else holds; `wanted` is at most `available`."""
        assert wanted <= self.available
        taken = []
        for _ in range(wanted):
            if self._free:
                page = self._free.pop()
            else:
                page, _ = self._idle.popitem(last=False)
                self._forget(page)
            self._holders[page] = 1
            taken.append(page)
        return taken

    def remember(self, page: int, key: Key) -> None:
        """A held page is full now, of these tokens. Where another page has them already that one stays known."""
        if self.reuse and key not in self._page:
            self._page[key] = page
            self._key[page] = key

    def release(self, pages: Sequence[int]) -> None:
        """Hold them no more. The last of them is forgotten first: a prefix without its beginning is of no use."""
        for page in reversed(pages):
            self._holders[page] -= 1
            assert self._holders[page] >= 0
            if self._holders[page] == 0:
                if self._key[page] is None:
                    self._free.append(page)
                else:
                    self._idle[page] = None

    def forget_all(self) -> None:
        """Remember nothing that nobody holds."""
        while self._idle:
            page, _ = self._idle.popitem()
            self._forget(page)
            self._free.append(page)

    def _forget(self, page: int) -> None:
        key = self._key[page]
        if key is not None:
            del self._page[key]
            self._key[page] = None


class Snapshots:
    """States of layers of linear attention, kept at the ends of known prefixes: places 0 to count - 1, the longest
    unused given up first. Without one a prefix cannot be gone on from, whatever pages remember it."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._free = list(range(count - 1, -1, -1))
        self._place: OrderedDict[Key, int] = OrderedDict()

    def __len__(self) -> int:
        return len(self._place)

    def __contains__(self, key: Key) -> bool:
        return key in self._place

    @property
    def unwritten(self) -> int:
        """Places that were reserved and not remembered: none between two steps, unless one got lost."""
        return self.count - len(self._free) - len(self._place)

    def find(self, keys: Sequence[Key]) -> int:
        """The longest of these prefixes (as a number of pages) that has one; 0: none."""
        for length in range(len(keys), 0, -1):
            if keys[length - 1] in self._place:
                return length
        return 0

    def use(self, key: Key) -> int:
        """The place of a snapshot that `find` found."""
        self._place.move_to_end(key)
        return self._place[key]

    def reserve(self) -> int | None:
        """A place to write to, for `remember` once it is written; None where all are being written to."""
        if self._free:
            return self._free.pop()
        return self._place.popitem(last=False)[1] if self._place else None

    def remember(self, key: Key, place: int) -> None:
        """The place holds the state after this prefix now."""
        if key in self._place:
            self._free.append(place)
        else:
            self._place[key] = place

    def forget_all(self) -> None:
        while self._place:
            self._free.append(self._place.popitem()[1])
