"""Mutated model directories, loaded and planned in this process: `python fuzz_run.py --seed S --first N --count M`.

A case must end in an OddrankError of one paragraph or in a proven plan; no other exception, no hang, nothing read
outside the model directory. Prints one JSON object: what became of the cases, and each failure with the command that
repeats it. Case N of a seed is the same in any run. --plant NAME breaks oddrank first, to see that it is noticed.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import gc
import io
import json
import os
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import click
import numpy as np
from fuzz_model import originals, write
from fuzz_mutations import mutate

import oddrank
from oddrank.checkpoint import Checkpoint
from oddrank.cli import group
from oddrank.errors import CheckFailedError, OddrankError
from oddrank.layout.plan import Plan
from oddrank.layout.proof import require
from oddrank.planner import Planned, make_plan
from oddrank.report import describe
from oddrank.transform.config import virtual_config
from oddrank.transform.pad import pad
from oddrank.transform.recipe import recipes

CPU_LIMIT, WALL_LIMIT = 10.0, 60.0
"""Seconds of one case. A case takes milliseconds."""

MEMORY = 3 << 30
"""Bytes of address space beyond what the process has at the start."""

CODE = (Path(oddrank.__file__).parent, Path(sys.prefix), Path(sys.base_prefix))
"""Where modules and their data lie, which may be read at first use."""

CONSTRAINTS = ["gqa", "kv_bytes", "block", "q_heads", "kv_heads", "mlp", "moe_multiple", "vocab", "mlp_multiple", "x"]
AMOUNTS = [0, 1, 2, 3, 4, 6, 9, 16, 32, 64, 99, 128, 256, 1000, 2**14, 2**24, 2**40]
FOLDERS = ["model", "m.o-d_e l", "[red]", "é", "x" * 200, "a\nb", "{0}%s", os.fsdecode(b"\xff")]
"""What a model directory is called."""


class Hung(BaseException):
    """The case took longer than a case may."""


class Watch:
    """Files that are opened and directories that are listed, while a case runs, outside of `inside`."""

    def __init__(self) -> None:
        self.inside: tuple[str, ...] | None = None
        self.outside: list[str] = []
        sys.addaudithook(self._see)

    def _see(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.inside is None or event not in ("open", "os.listdir", "os.scandir") or isinstance(arguments[0], int):
            return
        inside, self.inside = self.inside, None  # what is asked here is not the case's doing
        try:
            path = os.path.realpath(os.fsdecode(arguments[0] if arguments[0] is not None else "."))
            if not any(path == root or path.startswith(root + "/") for root in inside):
                self.outside.append(f"{event} {path}")
        finally:
            self.inside = inside

    @contextlib.contextmanager
    def only(self, *roots: Path) -> Iterator[None]:
        self.inside, self.outside = tuple(os.path.realpath(r) for r in roots), []
        try:
            yield
        finally:
            self.inside = None


class Fuzz:
    """The cases of one seed. stats: what became of them."""

    def __init__(self, seed: int, scratch: Path, patience: tuple[float, float]) -> None:
        self.seed, self.patience = seed, patience
        self.told: list[list[str]] = []
        self.models = originals(scratch / "originals")
        self.outside = {m.name: scratch / "originals" / m.name for m in self.models}
        self.root = scratch / "case"
        self.watch = Watch()
        self.stats: Counter[str] = Counter()
        self.failures: list[dict[str, Any]] = []
        self.times: list[float] = []
        self.slowest = (0.0, "")
        for hurry in (signal.SIGPROF, signal.SIGALRM):
            signal.signal(hurry, self._hung)

    @staticmethod
    def _hung(*_: object) -> None:
        raise Hung

    def warm(self) -> None:
        """Everything that is imported or cached at first use, so that no case is charged with it."""
        for model in self.models[::17]:
            write(model, self.root, self.root)
            out = self.root / "padded" if "bf16" in model.name else None  # holes are no scale groups
            for executor in ("runtime", "vllm"):
                made = make_plan(self.root / "model", 2, executor=executor)
                self._proven(Checkpoint.open(self.root / "model"), made, out)
            shutil.rmtree(self.root)
        write(self.models[0], self.root, self.root)
        for arguments in self._commands(self.root / "model", 3, "vllm", self.root / "page.html"):
            self._command(arguments)
        shutil.rmtree(self.root)

    def case(self, number: int) -> None:
        rng = Random(f"{self.seed}:{number}")
        model = rng.choice(self.models).copy()
        model.hub = rng.random() < 0.1
        done = [model.name, *mutate(rng, model, self.models)]
        folder = write(model, self.root, self.outside[model.name])
        if not model.hub and rng.random() < 0.05:
            folder = folder.rename(self.root / rng.choice(FOLDERS))
        allowed = self.root / "models--a--b" if model.hub else folder
        start = time.process_time()
        try:
            with self.watch.only(allowed, self.root / "out", *CODE), _limits(*self.patience):
                self.stats[self._outcome(rng, folder, done)] += 1
            if self.watch.outside:
                raise AssertionError(f"outside the model directory: {', '.join(self.watch.outside[:3])}")
        except (Exception, Hung) as error:
            self.stats["failed"] += 1
            self.failures.append(
                {
                    "error": f"{type(error).__name__}: {error}"[:500],
                    "mutations": done,
                    "repeat": f"{Path(__file__).name} --seed {self.seed} --first {number} --count 1",
                    "trace": traceback.format_exc()[-2500:],
                }
            )
        self.told.append(done)
        spent = time.process_time() - start
        self.times.append(spent)
        if spent > self.slowest[0]:
            self.slowest = (spent, f"case {number}: {done}")
        shutil.rmtree(self.root, ignore_errors=True)

    def _outcome(self, rng: Random, folder: Path, done: list[str]) -> str:
        tp, executor = rng.choice([1, 2, 2, 3, 3, 4, 5, 6, 7, 8]), rng.choice(["runtime", "vllm"])
        try:
            if rng.random() < 0.15:
                arguments = rng.choice(self._commands(folder, tp, executor, self.root / "out" / "page.html"))
                done.append(" ".join(a for a in arguments if "/" not in a))
                self._command(arguments)
                return "commands"
            options: dict[str, Any] = {}
            if rng.random() < 0.1:
                options["constraints"] = {rng.choice(CONSTRAINTS): rng.choice(AMOUNTS)}
            if rng.random() < 0.1:
                options["layout"] = rng.choice(["pad", "replicate", "ragged"])
            if executor == "runtime" and rng.random() < 0.1:
                options["rank_memory"] = [rng.choice([1, 8, 16, 24, 80]) for _ in range(tp)]
            done.append(f"tp {tp} {executor} {options}")
            checkpoint = Checkpoint.open(folder)
            made = make_plan(checkpoint, tp, executor=executor, **options)
            self._proven(checkpoint, made, self.root / "out" / "padded" if rng.random() < 0.05 else None)
        except OddrankError as error:
            _one_paragraph(str(error))
            return "refused"
        return "proven"

    def _proven(self, checkpoint: Checkpoint, made: Planned, out: Path | None) -> None:
        """The plan is proven, says the same when it is read back, and every way of carrying it out knows what to do."""
        plan = made.plan
        assert len(made.checks) == 7 and not made.census.problems
        again = Plan.from_json(plan.to_json())
        assert again == plan
        require(again, made.census)
        json.dumps(describe(made.solution, made.census, made.checks))
        for axis in plan.model.axes:  # every part of a sum once, by itself
            if axis.summed and axis.kind != "experts":
                held = np.concatenate([plan.layout(axis.name).slots(r) for r in range(plan.tp)])
                assert sorted(held[held >= 0]) == list(range(axis.count)), axis.name
        if plan.executor_facts().equal_ranks:
            virtual_config(plan, checkpoint.config)
            assert recipes(plan, plan.virtual()).keys() <= checkpoint.tensors.keys()
            if out is not None and sum(t.nbytes for t in checkpoint.tensors.values()) < 1 << 26:
                out.parent.mkdir(exist_ok=True)
                pad(plan, checkpoint, out)
                assert make_plan(out, 1, executor="vllm").plan.is_identity()
                shutil.rmtree(out)
        for rank in range(plan.tp):
            recipes(plan, plan.slots(rank))

    @staticmethod
    def _commands(folder: Path, tp: int, executor: str, page: Path) -> list[list[str]]:
        page.parent.mkdir(exist_ok=True)
        asked = [str(folder), "--tp", str(tp), "--executor", executor]
        return [["plan", *asked], ["plan", *asked, "--json"], ["plan", str(folder), "--tp", "1-4"], ["check", *asked],
                ["check", *asked, "--list"], ["plan", *asked, "--html", str(page)], ["plan", *asked, "--memory", "24"],
                ["plan", *asked, "--drafter", str(folder)]]  # fmt: skip

    @staticmethod
    def _command(arguments: list[str]) -> None:
        said = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                group.main(arguments, standalone_mode=False)
            except CheckFailedError:
                return
            except click.ClickException as error:
                raise AssertionError(f"wrong use: {error.format_message()}") from None


def _one_paragraph(said: str) -> None:
    """What the command line may print."""
    assert said.isprintable() and said.strip() == said and 20 < len(said) < 6000, f"badly said: {said!a:.1000}"


@contextlib.contextmanager
def _limits(cpu: float, wall: float) -> Iterator[None]:
    faulthandler.dump_traceback_later(2 * WALL_LIMIT, exit=True)  # where Python itself does not get to a signal
    signal.setitimer(signal.ITIMER_PROF, cpu)
    signal.setitimer(signal.ITIMER_REAL, wall)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.setitimer(signal.ITIMER_REAL, 0)
        faulthandler.cancel_dump_traceback_later()


def resident() -> int:
    """Bytes of memory this process holds."""
    gc.collect()
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=8)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--plant", help="a fault of fuzz_planted.py")
    parser.add_argument("--enough", type=int, help="this many failures, and wait only a second for a case")
    parser.add_argument("--tell", action="store_true", help="what was done in every case")
    given = parser.parse_args()
    patience = (2.0, 1.0) if given.enough else (CPU_LIMIT, WALL_LIMIT)
    with tempfile.TemporaryDirectory(prefix="oddrank-fuzz-") as scratch:
        os.chdir(scratch)
        fuzz = Fuzz(given.seed, Path(os.path.realpath(scratch)), patience)
        fuzz.warm()
        if given.plant:
            from fuzz_planted import PLANTED

            PLANTED[given.plant]()
        resource.setrlimit(resource.RLIMIT_AS, (address_space() + MEMORY,) * 2)
        held = []
        for number in range(given.first, given.first + given.count):
            if (number - given.first) % max(1, given.count // 20) == 0:
                held.append(resident())
            fuzz.case(number)
            if len(fuzz.failures) == given.enough:
                break
        held.append(resident())
    times = sorted(fuzz.times)
    print(
        json.dumps(
            {
                "seed": given.seed,
                "cases": len(times),
                **fuzz.stats,
                "cpu_ms_mean": round(1000 * sum(times) / len(times), 2),
                "cpu_ms_p99": round(1000 * times[len(times) * 99 // 100], 1),
                "slowest_s": round(fuzz.slowest[0], 3),
                "slowest": fuzz.slowest[1],
                "resident_mib": [round(h / 2**20, 1) for h in held],
                "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10,
                "failures": fuzz.failures,
                **({"told": fuzz.told} if given.tell else {}),
            }
        )
    )


if __name__ == "__main__":
    main()
