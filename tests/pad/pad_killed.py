"""`oddrank ...`, in a process that dies or stops at a chosen moment. `python pad_killed.py MOMENT COUNT ARGUMENT ...`.

MOMENT is one of MOMENTS, reached for the COUNT-th time; "hold" waits there instead of dying.
"""

import os
import shutil
import signal
import sys
from collections.abc import Callable
from typing import Any

from oddrank.checkpoint.atomic import AtomicDirectory
from oddrank.checkpoint.hashedfile import HashedFile
from oddrank.cli import main

MOMENTS: dict[str, tuple[Any, str, bool]] = {
    "writing": (HashedFile, "write", False),
    "synced": (HashedFile, "finish", True),
    "recorded": (AtomicDirectory, "_record", True),
    "finishing": (AtomicDirectory, "finish", False),
    "named": (shutil, "rmtree", False),
    "hold": (HashedFile, "write", False),
}
"""Name -> (where, function, whether it runs first)."""


def hook(moment: str, count: int) -> None:
    where, name, after = MOMENTS[moment]
    real: Callable[..., Any] = getattr(where, name)
    seen = 0

    def stop() -> None:
        nonlocal seen
        seen += 1
        if seen < count:
            return
        if moment == "hold":
            print("holding", flush=True)
            sys.stdin.read()
        os.kill(os.getpid(), signal.SIGKILL)

    def hooked(*args: Any, **kwargs: Any) -> Any:
        if not after:
            stop()
        result = real(*args, **kwargs)
        if after:
            stop()
        return result

    setattr(where, name, hooked)


if __name__ == "__main__":
    hook(sys.argv[1], int(sys.argv[2]))
    sys.argv[:] = ["oddrank", *sys.argv[3:]]
    main()
