"""The progress bar of loading: on rank 0, and only for eyes (a terminal)."""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from oddrank.checkpoint.dtypes import nbytes
from oddrank.runtime.parallel.group import Group
from oddrank.transform.slice import RankSlice

Advance = Callable[[str], None]
"""Called with the name of each stored tensor once the rank has its part of it."""


@contextmanager
def load_bar(part: RankSlice, group: Group, without: tuple[str, ...] = ()) -> Iterator[Advance]:
    """A bar over the bytes of rank 0's slice, optional parts `without` left out, while the block runs."""
    if group.rank or not sys.stderr.isatty():
        yield lambda name: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    sizes = {n: nbytes(part.dtype(n), part.shape(n)) for n in part.names() if part.part_of(n) not in without}
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(binary_units=True), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True), transient=True) as bar:
        whose = f"loading, rank 0 of {group.size}" if group.size > 1 else "loading"
        task = bar.add_task(whose, total=sum(sizes.values()))
        yield lambda name: bar.advance(task, sizes.get(name, 0))
