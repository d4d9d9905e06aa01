"""How a compiled operation is called: by one pointer to its arguments, so that a call can be remembered and made again.

Every operation is `void oddrank_NAME(const NAME_arguments *)` in C++ and one function of this package in Python, which
makes the outputs, fills the structure and hands both to `call`. Arguments are pointers and sizes: what changes from one
step to the next (positions, lengths) is read through a pointer, so the same call does the next one's work.
"""

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Protocol


class Recorder(Protocol):
    """Whoever remembers the calls that are made."""

    def add(self, function: Any, arguments: ctypes.Structure, kept: tuple[object, ...]) -> None:
        """function: of the library. kept: what the pointers point into."""
        ...

    def refuse(self, what: str) -> None:
        """Something was done that is no call, so that the calls alone would not do it again."""
        ...


_recorder: ContextVar[Recorder | None] = ContextVar("recorder", default=None)


def call(function: Any, arguments: ctypes.Structure, *kept: object) -> None:
    """Make a call now, and tell the recorder, if there is one."""
    function(ctypes.addressof(arguments))
    recorder = _recorder.get()
    if recorder is not None:
        recorder.add(function, arguments, kept)


def not_a_call(what: str) -> None:
    """Tell the recorder, if there is one, that something happens that it cannot remember."""
    recorder = _recorder.get()
    if recorder is not None:
        recorder.refuse(what)


@contextmanager
def recorded(recorder: Recorder) -> Iterator[None]:
    """Calls inside are told to `recorder`, too."""
    before = _recorder.set(recorder)
    try:
        yield
    finally:
        _recorder.reset(before)
