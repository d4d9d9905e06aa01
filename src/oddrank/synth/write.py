"""Write a release: its files, their index and the configs; with values, or sparse with headers only."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from oddrank.checkpoint import STORAGE, AtomicDirectory, by_alignment
from oddrank.checkpoint.dtypes import nbytes
from oddrank.checkpoint.writer import Entry, header_bytes
from oddrank.errors import OddrankError
from oddrank.synth import schemes
from oddrank.synth.configs import config
from oddrank.synth.numbers import Words, to_bf16
from oddrank.synth.quantization import hf_quant_config
from oddrank.synth.release import Release, Stored
from oddrank.synth.schemes import Scheme
from oddrank.synth.tokenizer import tokenizer_files
from oddrank.synth.values import MATRICES, bound, matrix_rows, matrix_shape, vector

INDEX = "model.safetensors.index.json"
FILE_SIZE = 1 << 30
"""Bytes a numbered file holds at most, unless one tensor alone is larger."""

METADATA = {"format": "pt"}

Files = dict[str, list[Stored]]


def files_of(release: Release, shards: int | None = None) -> Files:
    """File name -> what it holds, in order.

    By default as the format's releases do: a file per layer and one each for the MTP layer and the rest, or numbered
    files of at most FILE_SIZE. shards: that many numbered files of about the same size.
    """
    stored = list(release.stored())
    if shards is None and release.recipe.layer_files and release.family.startswith("qwen3_5"):
        by_layer: Files = {}
        for s in stored:
            by_layer.setdefault(f"{s.logical.file}.safetensors", []).append(s)
        return by_layer
    sizes = [sum(nbytes(p.dtype, p.shape) for p in s.parts) for s in stored]
    if shards is not None and not 1 <= shards <= len(stored):
        raise OddrankError(f"{len(stored)} tensors cannot be spread over {shards} files.")
    groups: list[list[Stored]] = [[]]
    room = FILE_SIZE if shards is None else -(-sum(sizes) // shards)
    used = 0
    for left, (s, size) in enumerate(zip(stored, sizes, strict=True)):
        todo = 0 if shards is None else shards - len(groups)
        # a new file where this tensor does not fit, or where every file still to come needs one of those left
        if groups[-1] and ((used + size > room and (shards is None or todo)) or len(stored) - left == todo):
            groups.append([])
            used = 0
        groups[-1].append(s)
        used += size
    if len(groups) == 1:
        return {"model.safetensors": groups[0]}
    return {f"model-{i + 1:05}-of-{len(groups):05}.safetensors": g for i, g in enumerate(groups)}


def entries(stored: Iterable[Stored]) -> list[Entry]:
    """A file's tensors as the safetensors library orders them: the widest numbers first, then by name."""
    return by_alignment(sorted((s.base + p.suffix, p.dtype, p.shape) for s in stored for p in s.parts))


def encode(stored: Stored, seed: int) -> dict[str, Words]:
    """Stored words by name, in STORAGE dtypes and stored shapes."""
    logical, scheme = stored.logical, stored.scheme
    if scheme is None and logical.kind not in MATRICES:
        return {stored.base: to_bf16(vector(logical, seed))}
    if scheme is None:
        scheme = schemes.DENSE
    limit = bound(logical, seed)
    names = stored.names()
    if logical.kind == "bank" and scheme is not schemes.DENSE:
        return _encode_bank(stored, scheme, seed)
    out = {n: np.empty(p.shape, STORAGE[p.dtype]) for n, p in zip(names, stored.parts, strict=True)}
    for name, whole in zip(names, scheme.constants(*matrix_shape(logical), limit), strict=True):
        if whole is not None:
            out[name][...] = whole
    dense = scheme is schemes.DENSE
    for start, rows in matrix_rows(logical, seed):
        for name, part, encoded in zip(names, stored.parts, scheme.encode(rows, limit), strict=True):
            if encoded is None:
                continue
            target = out[name].reshape(matrix_shape(logical)) if dense else out[name]
            first = start // max(part.by_row, 1)
            np.moveaxis(target, part.rows, 0)[first : first + encoded.shape[part.rows]] = np.moveaxis(
                encoded, part.rows, 0
            )
    return out


def _encode_bank(stored: Stored, scheme: Scheme, seed: int) -> dict[str, Words]:
    """Stacked experts [E, K, N], each encoded as [N, K]."""
    experts, k, n = stored.logical.shape
    whole = np.concatenate([rows for _, rows in matrix_rows(stored.logical, seed)]).reshape(experts, k, n)
    made = [scheme.encode(np.ascontiguousarray(expert.T), 0.0) for expert in whole]
    words = [np.stack([w for w in part if w is not None]) for part in zip(*made, strict=True)]
    return dict(zip(stored.names(), words, strict=True))


def write_checkpoint(
    release: Release, out: str | os.PathLike[str], *, shards: int | None = None, restart: bool = False
) -> Path:
    """Write the release with its values and a tokenizer; returns the directory. An interrupted run continues where it
    was."""
    files = files_of(release, shards)
    made_from = msgspec.json.encode((release.family, release.format, release.size, release.wrapped, release.seed))
    with AtomicDirectory(out, f"synth {made_from.decode()} {shards}", restart=restart) as directory:
        directory.require_space(_size(files))
        for name, text in {**_documents(release, files), **_tokenizer(release)}.items():
            if directory.done(name) is None:
                directory.write_bytes(name, text)
        for name, held in files.items():
            if directory.done(name) is not None:
                continue
            words = {n: w for s in held for n, w in encode(s, release.seed).items()}
            with directory.safetensors(name, entries(held), METADATA) as writer:
                for tensor, _, _ in entries(held):
                    writer.write(tensor, np.ascontiguousarray(words.pop(tensor)))
        return directory.finish()


def write_headers(release: Release, out: str | os.PathLike[str], *, shards: int | None = None) -> Path:
    """Write the release as sparse files: whole headers and the right sizes, all weights a hole that reads as zero.

    OddrankError where `out` exists and is not an empty directory.
    """
    final = Path(os.path.realpath(out))
    if final.exists() and (not final.is_dir() or any(final.iterdir())):
        raise OddrankError(f"{final} exists and is not an empty directory. Remove it, or choose another name.")
    files = files_of(release, shards)
    partial = final.parent / f".{final.name}.partial"
    if partial.exists():
        raise OddrankError(f"{partial} is in the way, left by an interrupted run. Remove it.")
    partial.mkdir(parents=True)
    try:
        for name, text in _documents(release, files).items():
            (partial / name).write_bytes(text)
        for name, held in files.items():
            listed = entries(held)
            header = header_bytes(listed, METADATA)
            with open(partial / name, "wb") as stream:
                stream.write(header)
                stream.truncate(len(header) + sum(nbytes(dtype, shape) for _, dtype, shape in listed))
        os.rename(partial, final)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    return final


def parameters(release: Release) -> int:
    """Logical elements, scales not counted."""
    return sum(math.prod(t.shape) for t in release.logical())


def _documents(release: Release, files: Files) -> dict[str, bytes]:
    """The files that hold no weights."""
    found = {"config.json": _json(config(release))}
    own = hf_quant_config(release)
    if own is not None:
        found["hf_quant_config.json"] = _json(own)
    if list(files) != ["model.safetensors"]:
        where = {n: file for file, held in files.items() for s in held for n in s.names()}
        found[INDEX] = _json({"metadata": {"total_size": _size(files)}, "weight_map": dict(sorted(where.items()))})
    return found


def _tokenizer(release: Release) -> dict[str, bytes]:
    """Of a model with values, which can be run; one that is read as a drafter has its target's."""
    made = config(release)
    told = {**made, **made.get("text_config", {})}
    keys = ("bos_token", "eos_token")
    special = {key: told[f"{key}_id"] for key in keys if isinstance(told.get(f"{key}_id"), int)}
    return {} if release.family == "dflash" else tokenizer_files(release.size.vocab, special)


def _size(files: Files) -> int:
    return sum(nbytes(p.dtype, p.shape) for held in files.values() for s in held for p in s.parts)


def _json(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2) + "\n").encode()
