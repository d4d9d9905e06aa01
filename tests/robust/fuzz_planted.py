"""Faults that the fuzzing must notice, planted in oddrank by name."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from oddrank.checkpoint import checkpoint, directory, header
from oddrank.layout import proof


def anywhere() -> None:
    """Files are opened wherever a name or a link leads."""
    directory.inside = lambda root, name, _source: Path(root, name).resolve()


def another_exception() -> None:
    """A dtype that is not known is looked up all the same."""
    known = dict(header.BITS)

    class Lookup(dict[str, int]):
        def get(self, key: str, default: Any = None) -> Any:  # type: ignore[override]
            return known[key]

    header.BITS = Lookup(known)


def hang() -> None:
    """The wait for what is missing never ends."""

    def wait(*_: Any) -> None:
        while True:
            time.sleep(0.01)

    checkpoint._refuse_missing, real = (
        lambda source, shards, by: real(source, shards, by) if all(map(source.holds, shards)) else wait(),
        checkpoint._refuse_missing,
    )


def leak() -> None:
    """Everything that was ever read is kept."""
    kept: list[bytes] = []
    real = directory.read_file

    def read(path: Path, *limit: int) -> bytes:
        kept.append(bytes(1 << 20) + real(path, *limit))
        return kept[-1][1 << 20 :]

    directory.read_file = read


def unproven() -> None:
    """The proof says yes to everything."""
    yes = tuple(proof.Check(str(number), True, "") for number in range(7))
    proof.prove = lambda _plan, _census: yes


PLANTED: dict[str, Callable[[], None]] = {f.__name__: f for f in (anywhere, another_exception, hang, leak, unproven)}
