"""A model directory in memory, so that it can be mutated before it is written: JSON documents as values, weight files
as headers over holes, links. The originals are tiny releases of every family and format."""

from __future__ import annotations

import copy
import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oddrank.checkpoint.header import read_header
from oddrank.synth import describe_release, write_headers
from oddrank.synth.release import PUBLISHED

CONFIG, INDEX = "config.json", "model.safetensors.index.json"
MOST = 1 << 43
"""Bytes of the longest hole that is written."""

RAW: dict[str, str] = {
    f"<<{number}>>": text
    for number, text in enumerate(
        ["NaN", "Infinity", "-Infinity", "1e999", "-0.0", "1" * 30, "1" * 5000, '"\\ud800"', "01", "1.0", "1e3", "tru"]
    )
}
"""A string in a document -> the JSON, or what is none, that is written in its place."""


@dataclass
class Shard:
    """A weight file. entries: name and entry in the header's order, names possibly twice. data: bytes after the header.
    length: what the first 8 bytes say, None for the truth. metadata: None for no such key."""

    entries: list[tuple[str, Any]]
    metadata: Any
    data: int
    length: int | None = None

    def lay(self) -> None:
        """Give every tensor the offsets that its dtype and shape imply."""
        at = 0
        for _, entry in self.entries:
            size = BITS[entry["dtype"]]
            for n in entry["shape"]:
                size *= n
            entry["data_offsets"] = [at, at + size // 8]
            at += size // 8
        self.data = at

    def header(self) -> bytes:
        items = [f"{json.dumps(name)}:{dump(entry)}" for name, entry in self.entries]
        if self.metadata is not None:
            items.insert(0, f'"__metadata__":{dump(self.metadata)}')
        return ("{" + ",".join(items) + "}").encode()


@dataclass
class Model:
    """documents: JSON values by file. shards: weight files. links: name -> target, with {outside} for a directory that
    holds the unmutated original. edits: (file, where, bytes there, instead) in the written file; whole: file -> its
    bytes whatever else is said of it. sizes: file -> length it is cut or stretched to. pipes: named pipes.
    hub: it lies in the hub's cache, as a snapshot of links."""

    name: str
    documents: dict[str, Any]
    shards: dict[str, Shard]
    links: dict[str, str] = field(default_factory=dict)
    edits: list[tuple[str, float, int, bytes]] = field(default_factory=list)
    whole: dict[str, bytes] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    pipes: list[str] = field(default_factory=list)
    hub: bool = False

    def copy(self) -> Model:
        return copy.deepcopy(self)

    def names(self) -> list[str]:
        return [*self.documents, *self.shards]


BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4, "I16": 16, "U16": 16, "F16": 16,
        "BF16": 16, "I32": 32, "U32": 32, "F32": 32, "F64": 64, "I64": 64, "U64": 64}  # fmt: skip


def dump(value: Any) -> str:
    text = json.dumps(value)
    for mark, raw in RAW.items():
        text = text.replace(f'"{mark}"', raw)
    return text


def originals(folder: Path) -> list[Model]:
    """Every family in every format it comes in, in one file and in three."""
    found = []
    for family, formats in PUBLISHED.items():
        for fmt in formats:
            for shards in (None, 3):
                vision = family.startswith("qwen3_5") and shards == 3
                release = describe_release(family, fmt, size="tiny", layers=2, experts=2, vocab=64, vision=vision)
                name = f"{family}-{fmt}-{shards or 1}"
                path = write_headers(release, folder / name, shards=shards)
                found.append(read(path, name))
    return found


def read(path: Path, name: str) -> Model:
    model = Model(name, {}, {})
    for file in sorted(os.listdir(path)):
        if file.endswith(".json"):
            model.documents[file] = json.loads((path / file).read_bytes())
            continue
        header = read_header(path / file)
        base = header.size
        entries = [
            (t.name, {"dtype": t.dtype, "shape": list(t.shape), "data_offsets": [t.start - base, t.end - base]})
            for t in header.tensors
        ]
        model.shards[file] = Shard(entries, header.metadata, os.path.getsize(path / file) - header.size)
    return model


def write(model: Model, root: Path, outside: Path) -> Path:
    """Write the model below the empty directory `root`; returns the model directory. `outside`: what links lead to."""
    folder = root / "model"
    blobs = folder
    if model.hub:
        folder = root / "models--a--b" / "snapshots" / ("0" * 40)
        blobs = root / "models--a--b" / "blobs"
        blobs.mkdir(parents=True)
    folder.mkdir(parents=True)
    for number, name in enumerate(model.names()):
        place = folder / name
        if not _inside(name) or os.path.lexists(place):
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        target = place
        if model.hub:
            target = blobs / f"{number:064}"
            place.symlink_to(os.path.relpath(target, place.parent))
        _write_file(model, name, target)
    for name, to in model.links.items():
        place = folder / name
        if os.path.lexists(place):
            place.unlink()
        place.symlink_to(to.format(outside=outside))
    for name in model.pipes:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)
    return folder


def _inside(name: str) -> bool:
    return bool(name) and not name.startswith("/") and ".." not in name and "\0" not in name and len(name) < 200


def _write_file(model: Model, name: str, target: Path) -> None:
    shard = model.shards.get(name)
    if name in model.whole:
        raw, hole = model.whole[name], 0
    elif shard is None:
        raw, hole = dump(model.documents[name]).encode(), 0
    else:
        header = shard.header()
        length = len(header) if shard.length is None else shard.length
        raw, hole = (length % 2**64).to_bytes(8, "little") + header, min(max(shard.data, 0), MOST)
    for file, where, count, instead in model.edits:
        if file == name:
            at = int(where * len(raw))
            raw = raw[:at] + instead + raw[at + count :]
    with open(target, "wb") as stream:
        stream.write(raw)
        stream.truncate(len(raw) + hole)
        if name in model.sizes:
            stream.truncate(min(model.sizes[name], len(raw) + hole + 100))
