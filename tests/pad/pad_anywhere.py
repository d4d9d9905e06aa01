"""`oddrank pad` killed at random moments, or with a disk that fails at any of its calls: `python pad_anywhere.py
MODEL SCRATCH kill|full SEED COUNT`. Each run is a fork of this process, so that nothing is imported twice. Prints what
happened as JSON; the first thing that is wrong ends it with an AssertionError.

After every run that was stopped: no directory of the result's name, or the whole result; and the same command again
gives, byte for byte, what an undisturbed run gives.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import os
import shutil
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from oddrank.cli import group
from oddrank.cli import main as oddrank

OPTIONS = ("--tp", "3", "--layout", "pad")
CALLS = ("open", "write", "pwrite", "fsync", "mkdir", "rename", "unlink")
"""What of `os` a run makes changes with."""

Tree = dict[str, str]


def tree(path: Path) -> Tree:
    """Every file's SHA-256."""
    return {
        str(f.relative_to(path)): hashlib.sha256(f.read_bytes()).hexdigest()
        for f in sorted(path.rglob("*"))
        if f.is_file()
    }


def start(model: Path, out: Path, said: Path, before: Callable[[], None] = lambda: None) -> int:
    """A process that runs `oddrank pad`; what it prints goes to `said`."""
    process = os.fork()
    if process:
        return process
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        fd = os.open(said, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(fd, 1)
        os.dup2(fd, 2)
        sys.argv[:] = ["oddrank", "pad", str(model), str(out), *OPTIONS]
        before()
        oddrank()
        os._exit(0)
    except SystemExit as end:
        sys.stdout.flush()
        os._exit(end.code if isinstance(end.code, int) else 1)
    except BaseException as error:
        os.write(2, f"not foreseen: {type(error).__name__}: {error}".encode())
        os._exit(99)


def ended(process: int) -> int:
    """The exit code; -9 for a process that was killed."""
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


class Runs:
    def __init__(self, model: Path, scratch: Path, rng: Random) -> None:
        self.model, self.rng = model, rng
        self.out, self.said = scratch / "out" / "padded", scratch / "said"
        self.partial = self.out.parent / ".padded.partial"
        self.seen: Counter[str] = Counter()
        made_before = scratch / "before"
        with contextlib.redirect_stdout(io.StringIO()):  # in this process: what it imports, every fork has
            group.main(["pad", str(model), str(made_before), *OPTIONS], standalone_mode=False)
        took = []
        for _ in range(5):
            self.fresh()
            begun = time.monotonic()
            assert ended(start(model, self.out, self.said)) == 0, self.said.read_text()
            took.append(time.monotonic() - begun)
        self.took = min(took)
        self.whole = tree(self.out)
        assert self.whole == tree(made_before)

    def fresh(self) -> None:
        shutil.rmtree(self.out.parent, ignore_errors=True)
        self.out.parent.mkdir()

    def look(self) -> str:
        """What a run that was stopped has left."""
        if self.out.exists():
            assert tree(self.out) == self.whole, "looks finished and is not"
            return "complete"
        if not self.partial.exists():
            return "nothing"
        journal = self.partial / "journal"
        finished = journal.read_bytes().count(b"\n") - 1 if journal.exists() else 0
        return "some files" if finished > 0 else "no file"

    def again(self) -> None:
        """The same command, undisturbed."""
        if self.out.exists():
            assert ended(start(self.model, self.out, self.said)) == 2 and "exists" in self.said.read_text()
            assert tree(self.out) == self.whole
            shutil.rmtree(self.out)
        assert ended(start(self.model, self.out, self.said)) == 0, self.said.read_text()
        assert tree(self.out) == self.whole, "resumed to something else"
        assert os.listdir(self.out.parent) == [self.out.name], os.listdir(self.out.parent)

    def killed(self) -> None:
        """Killed once to three times, then left alone."""
        self.fresh()
        for _ in range(self.rng.choice([1, 1, 1, 2, 3])):
            process = start(self.model, self.out, self.said)
            time.sleep(self.rng.uniform(0, 1.05 * self.took))
            os.kill(process, signal.SIGKILL)
            code = ended(process)
            assert code in (0, -signal.SIGKILL), (code, self.said.read_text())
            left = self.look()
            assert code or left == "complete"
            self.seen["not in time" if code == 0 else left] += 1
            if left == "complete":
                break
        self.again()

    def failing(self, number: int, code: int, short: bool = False, once: bool = False) -> bool:
        """The call `number` of CALLS fails with `code`, and unless `once` every later one of its kind; short: a write
        takes half of its bytes before. False where there are fewer calls."""
        self.fresh()
        process = start(self.model, self.out, self.said, lambda: fail_at(number, code, short, once))
        end, said, left = ended(process), self.said.read_text(), self.look()
        if end == 0:
            assert left == "complete"
            self.seen["did not need it" if "FAILED" in said else "beyond the last"] += 1
            self.again()
            return "FAILED" in said
        name = said.partition("FAILED ")[2].partition("\n")[0]
        error = said.partition("\n")[2] if name else said
        assert end == 2 and error.startswith("oddrank: ") and error.count("\n") == 1, (end, name, said)
        assert os.strerror(code) in error, (name, error)
        self.seen[f"{name}: {left}"] += 1
        self.again()
        return True


def fail_at(number: int, code: int, short: bool, once: bool) -> None:
    """Replace CALLS so that the one of this number fails."""
    made, left = 0, 1 if once else 1 << 30
    failing = ""

    def replace(name: str, real: Callable[..., Any]) -> None:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal made, failing, left
            changes = name != "open" or args[1] & (os.O_CREAT | os.O_WRONLY)
            if changes and not failing:
                made += 1
                if made == number:
                    failing = name
                    real_write(1, f"FAILED {name}\n".encode())
                    if short and name in ("write", "pwrite") and len(args[1]) > 1:
                        return real(args[0], args[1][: len(args[1]) // 2], *args[2:])
            if changes and failing == name and left:
                left -= 1
                raise OSError(code, os.strerror(code), *[a for a in args[:1] if isinstance(a, (str, os.PathLike))])
            return real(*args, **kwargs)

        setattr(os, name, call)

    real_write = os.write
    for name in CALLS:
        replace(name, getattr(os, name))


def main() -> None:
    model, scratch, what, seed, count = Path(sys.argv[1]), Path(sys.argv[2]), *sys.argv[3:6]
    rng = Random(f"{what} {seed}")
    runs = Runs(model, scratch, rng)
    begun = time.monotonic()
    if what == "kill":
        for number in range(int(count)):
            try:
                runs.killed()
            except AssertionError as error:
                raise AssertionError(f"kill {number} of seed {seed}: {error}") from error
    else:
        last = 1
        while runs.failing(last, errno.ENOSPC):  # every call would take minutes: the last first, roughly
            last *= 2
        numbers = sorted(rng.sample(range(1, last), min(int(count), last - 1)))
        for number in numbers:
            code = rng.choice([errno.ENOSPC, errno.ENOSPC, errno.EDQUOT, errno.EIO])
            how = {"short": rng.random() < 0.5, "once": rng.random() < 0.5}
            try:
                runs.failing(number, code, **how)
            except AssertionError as error:
                raise AssertionError(f"call {number}, {errno.errorcode[code]}, {how}: {error}") from error
    print(json.dumps({"took_s": round(runs.took, 3), "all_s": round(time.monotonic() - begun, 1), **runs.seen}))


if __name__ == "__main__":
    main()
