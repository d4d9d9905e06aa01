"""A model of the Hugging Face hub: in the hub's cache, over HTTP, or fetched.

What a plan needs of it is config.json, the index and the headers: a request each, and one for the list of files. Only
`fetch` downloads weights, and only it writes to the cache.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from huggingface_hub import constants, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from oddrank.checkpoint.directory import CONFIG, INDEX, Directory, is_carried, shard_names
from oddrank.checkpoint.header import Header, TensorInfo, header_length, parse_header, read_header, show, whole_header
from oddrank.checkpoint.hub import HubModel
from oddrank.checkpoint.jsonfile import parse_index, read_file
from oddrank.checkpoint.remote import Remote
from oddrank.errors import OddrankError
from oddrank.words import counted

PARALLEL = 32
"""Requests at a time."""

FIRST = 1 << 20
"""Bytes asked for of a weight file without an index, in the hope that its header is among them."""

MAX_STORED = 1 << 20
"""Bytes of a tensor that is read over HTTP: what the planner looks into (a permutation of columns, say), no weights."""

BESIDE = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "LICENSE*", "README.md")
"""What is fetched beside the weights: configs, tokenizers, templates."""


def open_repository(model: HubModel) -> Directory | Repository:
    """The model's snapshot in the hub's cache where all its weights are there, without a request; else over HTTP.

    OddrankError where it is in neither, or HF_HUB_OFFLINE forbids to ask.
    """
    snapshot = _snapshot(model)
    lacking = [CONFIG] if snapshot is None else _lacking(snapshot)
    if snapshot is not None and not lacking:
        return Directory(snapshot)
    if constants.HF_HUB_OFFLINE:
        raise _offline(model, snapshot, lacking)
    return Repository(model, snapshot)


class Repository:
    """A model of the hub at one commit, which a checkpoint is read from as from a `Directory`.

    Files that the hub's cache has are read there.
    """

    kind = "The repository"

    def __init__(self, model: HubModel, snapshot: Path | None) -> None:
        """snapshot: the model's folder in the hub's cache, whose commit is read. OddrankError where the hub does not
        have it."""
        self.root = Path(str(model))
        self.name = model.repo.partition("/")[2]
        self._remote = Remote(model)
        self._model = model
        self._snapshot = snapshot
        listing = self._remote.listing(model.revision if snapshot is None else snapshot.name)
        self._commit = listing.sha
        self._files = frozenset(file.rfilename for file in listing.siblings)

    def names(self) -> list[str]:
        """Names at the top of the repository, sorted."""
        return sorted(name for name in self._files if "/" not in name)

    def holds(self, name: str) -> bool:
        """Is there a file of this name?"""
        return name in self._files

    def path(self, name: str, named_by: str = kind) -> Path:
        """The file in the hub's cache. OddrankError where it is only on the hub."""
        found = self._cached(name)
        if found is None:
            raise OddrankError(f"{show(name)} of {self.root} is on the hub, and only its headers have been read.")
        return found

    def read(self, name: str) -> bytes:
        """A whole file of at most MAX_JSON bytes."""
        found = self._cached(name)
        return self._remote.whole(self._url(name)) if found is None else read_file(found)

    def headers(
        self, shards: Sequence[str], named_by: str, weight_map: Mapping[str, str] | None = None
    ) -> dict[str, Header]:
        """The headers of these weight files, in order, read in parallel.

        weight_map: each tensor's file, from which the length of a header is foreseen. One request a file; another
        where its header is longer than foreseen.
        """
        # the longest entry of a header: 47 bytes of syntax, a dtype, a shape, and two offsets
        foreseen = dict.fromkeys(shards, FIRST if weight_map is None else 1 << 14)
        for tensor, shard in (weight_map or {}).items():
            foreseen[shard] += len(tensor) + 128
        pool = ThreadPoolExecutor(min(PARALLEL, len(shards)))
        try:
            return dict(zip(shards, pool.map(self._header, shards, foreseen.values()), strict=True))
        finally:
            pool.shutdown(cancel_futures=True)

    def others(self, weights: frozenset[str]) -> tuple[str, ...]:
        """Every file that holds no weights."""
        return tuple(sorted(name for name in self._files - weights if is_carried(name)))

    def stored(self, info: TensorInfo) -> bytes:
        """The bytes of a tensor of at most MAX_STORED bytes; OddrankError for a larger one."""
        found = self._cached(info.file)
        if found is None and info.nbytes > MAX_STORED:
            raise OddrankError(
                f"Tensor {show(info.name)} of {self.root} has {info.nbytes} bytes, and its file is on the hub, of "
                f"which tensors of up to {MAX_STORED} bytes are read. Fetch the model first: Checkpoint.fetched(), or "
                f"hf download {self._model.repo}."
            )
        if found is not None:
            with open(found, "rb") as file:
                file.seek(info.start)
                data = file.read(info.nbytes)
        else:
            with self._remote.part(self._url(info.file), info.start, info.end) as answer:
                data = answer.take(info.nbytes)
        if len(data) != info.nbytes:
            name = show(info.name)
            raise OddrankError(f"Tensor {name} of {self.root} ended after {len(data)} of {info.nbytes} bytes.")
        return data

    def fetch(self, shards: Sequence[str]) -> Path:
        """The model's folder in the hub's cache, with these weight files and what belongs to them downloaded."""
        revision = self._model.revision if self._snapshot is None else self._commit
        folder = download(self._model, revision, (*shards, *BESIDE))
        if folder.name != self._commit:
            raise OddrankError(f"{self._model} was changed on the hub while it was read. Run the same command again.")
        return folder

    def _header(self, shard: str, foreseen: int) -> Header:
        """The header of one weight file."""
        found, shown = self._cached(shard), self.root / shard
        if found is not None:
            return read_header(found, shard)
        with self._remote.part(self._url(shard), 0, 8 + foreseen) as first:
            length = header_length(first.take(8), first.size, shown)
            raw = first.take(length)
        if len(raw) < length and first.partial:
            with self._remote.part(first.url, 8 + len(raw), 8 + length) as rest:
                if (rest.size, rest.etag) != (first.size, first.etag):
                    raise OddrankError(f"{shown} changed while its header was read. Run the same command again.")
                raw += rest.take(length - len(raw))
        return parse_header(whole_header(raw, length, shown), first.size, shown, shard)

    def _cached(self, name: str) -> Path | None:
        if self._snapshot is None or name not in self._files or not os.path.exists(self._snapshot / name):
            return None
        return Directory(self._snapshot).path(name)

    def _url(self, name: str) -> str:
        return hf_hub_url(self._model.repo, name, revision=self._commit)


def download(model: HubModel, revision: str, patterns: Sequence[str], cache: str | None = None) -> Path:
    """Fetch the files that match into the hub's cache (the one of the environment, or `cache`): the snapshot's folder.

    Shows huggingface_hub's progress. Without a network what is in the cache is taken. OddrankError where it cannot be
    fetched.
    """
    from huggingface_hub import snapshot_download

    try:
        with Remote(model).explained(constants.ENDPOINT):
            folder = snapshot_download(model.repo, revision=revision, cache_dir=cache, allow_patterns=list(patterns))
    except (LocalEntryNotFoundError, HFValidationError, RuntimeError) as error:
        raise OddrankError(f"{model} cannot be fetched from the hub: {' '.join(str(error).split())[:400]}") from None
    return Path(folder)


def _snapshot(model: HubModel) -> Path | None:
    """The folder of the hub's cache that holds the model's config, if there is one."""
    found = try_to_load_from_cache(model.repo, CONFIG, revision=model.revision)
    return Path(found).parent if isinstance(found, str) else None


def _lacking(snapshot: Path) -> list[str]:
    """Weight files that are not in the snapshot."""
    folder = Directory(snapshot)
    names = folder.names()
    if INDEX in names:
        shards = set(parse_index(folder.read(INDEX), snapshot / INDEX).values())
        return sorted(shard for shard in shards if not os.path.exists(snapshot / shard))
    try:
        shard_names(snapshot, names)
    except OddrankError:
        return [INDEX]
    return []


def _offline(model: HubModel, snapshot: Path | None, lacking: list[str]) -> OddrankError:
    where = f"There is no directory {model} here, and HF_HUB_OFFLINE forbids to ask the hub for it. "
    remedy = f"Unset HF_HUB_OFFLINE, or download it first: hf download {model.repo}"
    if model.revision != "main":
        remedy += f" --revision {model.revision}"
    if snapshot is None:
        return OddrankError(f"{where}The hub's cache ({constants.HF_HUB_CACHE}) does not hold it. {remedy}.")
    some = ", ".join(map(show, lacking[:3])) + (", ..." if len(lacking) > 3 else "")
    missing = counted(len(lacking), "file")
    return OddrankError(f"{where}Its snapshot in the hub's cache lacks {missing}: {some}. {remedy}.")
