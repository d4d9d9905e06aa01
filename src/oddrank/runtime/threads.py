"""How many threads torch uses, for a while.

A parallel region ends when its slowest thread does. Splitting work that takes microseconds gains nothing on idle cores
and loses milliseconds on busy ones, where a thread may not be running at all; so a decode step runs on one thread and
the few operations that are worth more say so themselves.
"""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import TypeVar

import torch

T = TypeVar("T")
A = TypeVar("A")

THREADED_CACHE = 1 << 18
"""Elements of a layer's keys from which attention is worth more than one thread."""


@contextmanager
def torch_threads(count: int) -> Iterator[None]:
    """Run the block with `count` threads of torch."""
    before = torch.get_num_threads()
    if before == count:
        yield
        return
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def side_by_side(threads: int, work: Callable[[A], T], items: Sequence[A]) -> list[T]:
    """`work` of every item, on as many threads of a pool: for operations that release the interpreter's lock and
    use one thread themselves."""
    inference = torch.is_inference_mode_enabled()

    def one(item: A) -> T:
        with torch.inference_mode(inference):
            return work(item)

    return list(_pool(threads).map(one, items))


@cache
def _pool(threads: int) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(threads, thread_name_prefix="oddrank")
