"""Sleeping on a word of shared memory until another process changes it: Linux futexes through ctypes."""

import ctypes
import errno
import platform
import sys

_SYSCALL = {"x86_64": 202, "aarch64": 98}.get(platform.machine()) if sys.platform == "linux" else None
_WAIT, _WAKE = 0, 1  # without FUTEX_PRIVATE_FLAG: the word is shared between processes
_EVERYONE = 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = [("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long)]


_libc = ctypes.CDLL(None, use_errno=True)
_syscall = _libc.syscall
_syscall.restype = ctypes.c_long
_syscall.argtypes = [
    ctypes.c_long,
    ctypes.c_void_p,
    ctypes.c_int,
    ctypes.c_uint32,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_uint32,
]

AVAILABLE = _SYSCALL is not None


def timespec(seconds: float) -> ctypes.Structure:
    """A time-out for `wait`, made once and used often."""
    return _Timespec(int(seconds), int(seconds % 1 * 1e9))


def wait(address: int, expected: int, timeout: ctypes.Structure) -> bool:
    """Sleep while the 32-bit word at `address` is `expected`; False if `timeout` passed meanwhile.

    True may also mean a signal or a spurious wake: look at the word again. Releases the interpreter lock.
    """
    if _syscall(_SYSCALL, address, _WAIT, expected, ctypes.byref(timeout), None, 0) == 0:
        return True
    return ctypes.get_errno() != errno.ETIMEDOUT


def wake(address: int) -> None:
    """Wake every process that sleeps on the word at `address`."""
    _syscall(_SYSCALL, address, _WAKE, _EVERYONE, None, None, 0)
