"""The plan's virtual checkpoint written to disk: streamed tensor by tensor, resumable, and there only when complete.

Stored tensors keep their files and names. Unchanged ones are written from the mapped source; the others are built a
few megabytes at a time in one buffer, so memory does not grow with the model.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from oddrank import __version__
from oddrank.checkpoint import STORAGE, AtomicDirectory, Checkpoint, FileRecord, SafetensorsWriter, by_alignment
from oddrank.checkpoint.directory import INDEX
from oddrank.checkpoint.dtypes import nbytes
from oddrank.errors import OddrankError
from oddrank.layout.plan import Plan
from oddrank.transform.config import virtual_config
from oddrank.transform.recipe import Recipe, apply_rows, recipes

CHUNK = 8 << 20
"""Bytes of a changed tensor built at a time."""

RECORD = "oddrank.json"

Progress = Callable[[int], None]
"""Called with the number of bytes just written."""


class Padded(msgspec.Struct, frozen=True):
    """What was written. resumed: weight files an earlier, interrupted run had finished."""

    path: str
    files: tuple[FileRecord, ...]
    bytes_written: int
    tensors: int
    changed: int
    resumed: int


def output_bytes(plan: Plan, checkpoint: Checkpoint) -> int:
    """Bytes of tensors the virtual checkpoint has."""
    made = recipes(plan, plan.virtual())
    return sum(_size(made.get(name), info.dtype, info.shape) for name, info in checkpoint.tensors.items())


def pad(
    plan: Plan,
    checkpoint: Checkpoint,
    out: str | os.PathLike[str],
    *,
    restart: bool = False,
    progress: Progress | None = None,
) -> Padded:
    """Write the virtual checkpoint of a proven `plan` for `checkpoint` into the new directory `out`.

    Raises OddrankError where `out` exists, the disk is full, the plan has no virtual checkpoint, or an unfinished run
    of another plan is in the way (`restart` throws that one away).
    """
    if not plan.executor_facts().equal_ranks:
        raise OddrankError(
            f"a plan for the {plan.executor} executor may give its ranks different sizes, which no single checkpoint "
            "on disk can express; plan with --executor vllm to write one."
        )
    if not os.fspath(out):
        raise OddrankError("the output directory's name is empty.")
    unreadable = [name for name in checkpoint.other_files() if not _is_utf8(name)]
    if unreadable:
        raise OddrankError(
            f"{checkpoint.path} holds a file whose name is no text ({unreadable[0]!r}), which cannot be recorded. "
            "Rename it or remove it."
        )
    target = Path(os.path.realpath(out))
    if target.is_relative_to(checkpoint.path) or checkpoint.path.is_relative_to(target):
        raise OddrankError(
            f"{out} and the model {checkpoint.path} lie inside each other; write to a directory outside the model's."
        )
    config = virtual_config(plan, checkpoint.config)
    made = recipes(plan, plan.virtual())
    by_file: dict[str, list[str]] = {file: [] for file in checkpoint.files}
    for name, info in checkpoint.tensors.items():
        by_file[info.file].append(name)
    records: list[FileRecord] = []
    resumed = written = 0
    with AtomicDirectory(out, fingerprint(plan, checkpoint), restart) as directory:
        done = {file for file in by_file if file in directory.finished}
        left = [n for file, names in by_file.items() if file not in done for n in names]
        directory.require_space(sum(_tensor_size(made, checkpoint, n) for n in left))
        for file, names in by_file.items():
            record = directory.done(file)
            if record is not None:
                resumed += 1
                if progress is not None:
                    progress(sum(_tensor_size(made, checkpoint, n) for n in names))
            else:
                record = _write_file(directory, file, names, made, checkpoint, progress)
                written += record.size
            records.append(record)
        for name, data in _small_files(plan, checkpoint, config, made, by_file):
            records.append(directory.done(name) or directory.write_bytes(name, data))
        for name in checkpoint.other_files():
            if name not in ("config.json", RECORD):
                records.append(directory.done(name) or directory.copy(name, checkpoint.other_file(name)))
        note = {"oddrank": __version__, "source": checkpoint.name, "files": records, "plan": plan}
        directory.write_bytes(RECORD, msgspec.json.format(msgspec.json.encode(note), indent=1))
        path = directory.finish()
    changed = sum(not r.unchanged for r in made.values())
    return Padded(str(path), tuple(records), written, len(checkpoint.tensors), changed, resumed)


def _is_utf8(name: str) -> bool:
    try:
        name.encode()
    except UnicodeEncodeError:
        return False
    return True


def fingerprint(plan: Plan, checkpoint: Checkpoint) -> str:
    """What a result is made from: the plan, and the source's files by name, size and time of change."""
    digest = hashlib.sha256(plan.to_json())
    carried = [(name, checkpoint.other_file(name)) for name in checkpoint.other_files()]
    for file, path in [*((f, checkpoint.location(f)) for f in checkpoint.files), *carried]:
        status = path.stat()
        digest.update(f"{file}\0{status.st_size}\0{status.st_mtime_ns}\0".encode())
    return digest.hexdigest()


def _write_file(
    directory: AtomicDirectory,
    file: str,
    names: list[str],
    made: dict[str, Recipe],
    checkpoint: Checkpoint,
    progress: Progress | None,
) -> FileRecord:
    entries = []
    for name in names:
        info, recipe = checkpoint.tensors[name], made.get(name)
        entries.append((name, info.dtype, info.shape if recipe is None else recipe.shape))
    entries = by_alignment(entries)
    with directory.safetensors(file, entries, checkpoint.metadata[file]) as writer:
        for name, _, _ in entries:
            _write_tensor(writer, name, made.get(name), checkpoint, progress)
            checkpoint.release([name])
    return directory.finished[file]


def _write_tensor(
    writer: SafetensorsWriter, name: str, recipe: Recipe | None, checkpoint: Checkpoint, progress: Progress | None
) -> None:
    if recipe is None or recipe.unchanged:
        raw = checkpoint.raw(name)
        for start in range(0, len(raw), CHUNK):
            piece = raw[start : start + CHUNK]
            writer.write(name, piece)
            if progress is not None:
                progress(len(piece))
        return
    source, beside = checkpoint.array(name), recipe.beside(name)
    points = None if beside is None else checkpoint.array(beside)
    row = max(1, int(np.prod(recipe.shape[1:], dtype=np.int64)) * STORAGE[recipe.dtype].itemsize)
    rows = max(1, CHUNK // row)
    buffer = np.empty((min(rows, recipe.shape[0]), *recipe.shape[1:]), dtype=STORAGE[recipe.dtype])
    for start in range(0, recipe.shape[0], rows):
        part = buffer[: min(rows, recipe.shape[0] - start)]
        apply_rows(recipe, source, start, part, points)
        writer.write(name, part)
        if progress is not None:
            progress(part.nbytes)


def _small_files(
    plan: Plan, checkpoint: Checkpoint, config: dict[str, Any], made: dict[str, Recipe], by_file: dict[str, list[str]]
) -> list[tuple[str, bytes]]:
    """config.json, and the index where the source has one."""
    files = [("config.json", msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n")]
    if checkpoint.has_index:
        total = sum(_tensor_size(made, checkpoint, n) for n in checkpoint.tensors)
        index = {
            "metadata": {"total_size": total},
            "weight_map": {n: file for file, names in by_file.items() for n in sorted(names)},
        }
        files.append((INDEX, msgspec.json.format(msgspec.json.encode(index), indent=2) + b"\n"))
    return files


def _tensor_size(made: dict[str, Recipe], checkpoint: Checkpoint, name: str) -> int:
    info = checkpoint.tensors[name]
    return _size(made.get(name), info.dtype, info.shape)


def _size(recipe: Recipe | None, dtype: str, shape: tuple[int, ...]) -> int:
    return nbytes(dtype, shape if recipe is None else recipe.shape)


def read_record(path: Path) -> Plan:
    """The plan a padded directory was written from. Raises OddrankError where there is none."""
    try:
        raw = (path / RECORD).read_bytes()
        note = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    except (OSError, msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise OddrankError(f"{path} was not written by oddrank pad: {RECORD} cannot be read ({error}).") from None
    if "plan" not in note:
        raise OddrankError(f"{path / RECORD} holds no plan.")
    return Plan.from_json(bytes(note["plan"]))
