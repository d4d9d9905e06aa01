"""The compiled library, through ctypes."""

import ctypes
import hashlib
import logging
import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

_FILE = Path(__file__).with_name("_kernels.so")

CHOICE = "ODDRANK_KERNELS"
"""Environment variable: "torch" for no kernels of ours, or the name of a level (see `Library.levels`)."""

FORMATS = ("bf16", "f16", "e4m3", "nvfp4", "mxfp4", "int4", "int8", "int8 with zeros", "mxfp8")
"""In the order of abi.h."""

_SAMPLES = {
    "bf16": (16, 0, 0),
    "f16": (16, 0, 0),
    "e4m3": (8, 128, 3),
    "nvfp4": (4, 16, 18),
    "mxfp4": (4, 32, 9),
    "int4": (4, 32, 36),
    "int8": (8, 32, 36),
    "int8 with zeros": (8, 32, 72),
    "mxfp8": (8, 32, 9),
}
"""Of a small matrix of 288 columns: bits of a value, columns of a scale, `scale_row`."""

log = logging.getLogger(__name__)


def digest_of_sources() -> str | None:
    """Of the C++ files beside this one, as setup.py has it; None where they are not installed."""
    files = sorted(p for p in _FILE.parent.iterdir() if p.suffix in (".cpp", ".h"))
    digest = hashlib.sha256()
    for path in files:
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest() if files else None


class Matrix(ctypes.Structure):
    """abi.h's Matrix."""

    _fields_ = (
        ("values", ctypes.c_void_p),
        ("scales", ctypes.c_void_p),
        ("n", ctypes.c_int64),
        ("k", ctypes.c_int64),
        ("row_bytes", ctypes.c_int64),
        ("scale_row", ctypes.c_int64),
        ("block_n", ctypes.c_int64),
        ("block_k", ctypes.c_int64),
        ("factor", ctypes.c_float),
        ("format", ctypes.c_int32),
        ("exact", ctypes.c_int32),
        ("unused", ctypes.c_int32),
        ("order", ctypes.c_void_p),
    )


class LinearArguments(ctypes.Structure):
    """linear.cpp's."""

    _fields_ = (
        ("parts", ctypes.c_void_p),
        ("count", ctypes.c_int64),
        ("x", ctypes.c_void_p),
        ("m", ctypes.c_int64),
        ("x_stride", ctypes.c_int64),
        ("bias", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("y_stride", ctypes.c_int64),
        ("threads", ctypes.c_int32),
    )


_POINTER, _INT = ctypes.c_void_p, ctypes.c_int32
_FUNCTIONS = {
    "sources": (ctypes.c_char_p, ()),
    "levels": (_INT, ()),
    "level_name": (ctypes.c_char_p, (_INT,)),
    "level_runs": (_INT, (_INT,)),
    "use": (_INT, (_INT,)),
    "operations_agree": (_INT, ()),
}


class Library:
    """levels: what it was compiled for, from the plainest on. runs: those that this CPU runs and that compute rightly.
    level: the one in use."""

    def __init__(self, file: Path) -> None:
        """OSError or AttributeError where the file is not the library of these sources: arguments of another layout
        would be read as what they are not."""
        found = ctypes.CDLL(str(file))
        for name, (result, arguments) in _FUNCTIONS.items():
            function = getattr(found, f"oddrank_{name}")
            function.restype, function.argtypes = result, arguments
        sources = digest_of_sources()
        if sources is not None and found.oddrank_sources().decode() != sources:
            raise OSError(f"{file} was compiled from other sources than these; install oddrank again")
        self._found = found
        self._operations: dict[str, Any] = {}
        self._use = found.oddrank_use
        self.levels = [found.oddrank_level_name(i).decode() for i in range(found.oddrank_levels())]
        able = [name for i, name in enumerate(self.levels) if found.oddrank_level_runs(i)]
        self.runs = [name for name in able if name == self.levels[0] or self._computes(name)]
        if wrong := sorted({*able} - {*self.runs}):
            log.warning("kernels for %s compute wrongly on this CPU and are not used", ", ".join(wrong))
        self.level = ""
        self.use(self.runs[-1])

    def operation(self, name: str) -> Any:
        """The function `oddrank_NAME`, which takes a pointer to its arguments (see calls.py)."""
        function = self._operations.get(name)
        if function is None:
            function = getattr(self._found, f"oddrank_{name}")
            function.restype, function.argtypes = None, (_POINTER,)
            self._operations[name] = function
        return function

    def function(self, name: str, result: Any, *arguments: Any) -> Any:
        """The function `oddrank_NAME`, which is no operation, with its types of ctypes."""
        function = getattr(self._found, f"oddrank_{name}")
        function.restype, function.argtypes = result, arguments
        return function

    def use(self, level: str) -> None:
        """Compute with a level from now on, in all threads. ValueError where it does not run here."""
        if level not in self.runs:
            raise ValueError(f"kernels for {level} do not run here; {', '.join(self.runs)} do")
        self._use(self.levels.index(level))
        self.level = level

    def _computes(self, level: str) -> bool:
        """Whether a level gives what the plainest gives: its operations, and a small matrix of each format."""
        self._use(self.levels.index(level))
        return bool(self._found.oddrank_operations_agree()) and all(
            np.allclose(self._sample(level, form, exact), self._sample(self.levels[0], form, 1), rtol=1e-4, atol=atol)
            for form in range(len(FORMATS))
            for exact, atol in ((0, 0.05), (1, 1e-3))
        )

    def _sample(self, level: str, form: int, exact: int) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        n, k, m = 5, 288, 2
        bits, block, scale_row = _SAMPLES[FORMATS[form]]
        draw = np.random.default_rng(form)
        values = draw.integers(0, 0x3C if bits == 16 else 0x7F, (n, 2 * k), np.uint8)
        words = draw.uniform(0.5, 2, n * k).astype(np.float32).view(np.uint32)
        if form == FORMATS.index("int4"):
            words = words & ~np.uint32(255) | draw.integers(0, 17, n * k, np.uint32)
        elif form == FORMATS.index("int8 with zeros"):
            words[1::2] = draw.integers(0, 129, n * k // 2, np.uint32) * 0x800001
        scales = np.full(n * k, 0x7E, np.uint8) if FORMATS[form].startswith(("nv", "mx")) else words
        x = draw.uniform(-1, 1, (m, k)).astype(np.float32)
        matrix = Matrix(
            values.ctypes.data, scales.ctypes.data, n, k, bits * k // 8, scale_row, 1, block, 0.01, form, exact
        )
        self._use(self.levels.index(level))
        found = []
        for rows in (x, x[:1]):
            y = np.empty((len(rows), n), np.float32)
            at = rows.ctypes.data, len(rows), k
            arguments = LinearArguments(ctypes.addressof(matrix), 1, *at, None, y.ctypes.data, n, 1)
            self.operation("linear")(ctypes.addressof(arguments))
            found.append(y)
        return np.concatenate(found)


@cache
def library() -> Library | None:
    """The library, with the best level of this CPU in use; None, said once, where there is none to use."""
    choice = os.environ.get(CHOICE, "")
    if choice == "torch":
        return None
    try:
        found = Library(_FILE)
    except (OSError, AttributeError) as error:
        log.warning("the compiled CPU kernels are missing, torch computes instead, more slowly (%s)", error)
        return None
    if choice:
        found.use(choice)
    return found
