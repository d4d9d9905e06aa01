"""A model, in a directory or on the hub: its config, where its tensors lie, and a read-only view of each."""

import mmap
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import numpy as np

from oddrank.checkpoint.directory import CONFIG, INDEX, Directory, shard_names
from oddrank.checkpoint.dtypes import STORAGE, storage_shape
from oddrank.checkpoint.header import Header, TensorInfo, show, why
from oddrank.checkpoint.hub import find
from oddrank.checkpoint.jsonfile import parse_index, parse_object
from oddrank.errors import OddrankError

if TYPE_CHECKING:
    from oddrank.checkpoint.repository import Repository


class Checkpoint:
    """A checkpoint on disk or on the hub. `open` reads its config and headers only; weights are mapped when `array`
    asks for them.

    path:     the directory, as a real path; of a model on the hub its id, which only names it.
    name:     what the model is called: its directory, or its id without the owner.
    config:   config.json as it is (see config.ConfigView for typed access).
    tensors:  every stored tensor by name, in the order of the files and of the bytes within each.
    files:    the weight files' names relative to path, in order.
    metadata: each weight file's __metadata__.
    """

    def __init__(
        self,
        source: "Directory | Repository",
        config: dict[str, Any],
        tensors: dict[str, TensorInfo],
        sizes: dict[str, int],
        metadata: dict[str, dict[str, str]],
        has_index: bool,
    ) -> None:
        self.path = source.root
        self.name = source.name
        self.config = config
        self.tensors = tensors
        self.files = tuple(sizes)
        self.metadata = metadata
        self.has_index = has_index
        self._source = source
        self._sizes = sizes
        self._maps: dict[str, mmap.mmap] = {}

    @classmethod
    def open(cls, model: str | os.PathLike[str]) -> "Checkpoint":
        """Read the config and the headers of a model directory, or of a model of the hub: `owner/name`, optionally
        with `@revision`, where there is no such directory.

        The weights are model.safetensors.index.json's files, or model.safetensors, or every
        model-*.safetensors. OddrankError where anything is missing, malformed, contradictory, outside the
        directory, or not to be had from the hub.
        """
        if not os.fspath(model):
            raise OddrankError("The model's path is empty. Give the path of a model directory.")
        source = find(model)
        root, names = source.root, source.names()
        if CONFIG not in names:
            # A directory of GGUF files has neither; its weights are the more useful complaint.
            if INDEX not in names:
                shard_names(root, names)
            raise OddrankError(f"{root} has no {CONFIG}, so it is not a model directory in transformers' form.")
        config = parse_object(source.read(CONFIG), root / CONFIG)
        weight_map: dict[str, str] | None = None
        if INDEX in names:
            weight_map = parse_index(source.read(INDEX), root / INDEX)
            shards = sorted(set(weight_map.values()))
            _refuse_ambiguity(root, names, shards)
            named_by = INDEX
        else:
            shards = shard_names(root, names)
            named_by = source.kind
        _refuse_missing(source, shards, named_by)
        headers = source.headers(shards, named_by, weight_map)

        tensors: dict[str, TensorInfo] = {}
        sizes: dict[str, int] = {}
        metadata: dict[str, dict[str, str]] = {}
        for shard, header in headers.items():
            metadata[shard] = header.metadata
            sizes[shard] = header.tensors[-1].end if header.tensors else header.size
            before = len(tensors)
            tensors.update({info.name: info for info in header.tensors})
            if len(tensors) != before + len(header.tensors):
                _refuse_repeated(root, headers, shard)
        if weight_map is not None:
            _compare(root, weight_map, tensors)
        if not tensors:
            raise OddrankError(f"{root} holds no tensor in its {len(headers)} .safetensors files.")
        return cls(source, config, tensors, sizes, metadata, weight_map is not None)

    def fetched(self) -> "Checkpoint":
        """The same checkpoint with its weights at hand: itself, or for a model on the hub its snapshot in the hub's
        cache, downloaded as far as it is not there. OddrankError where that fails."""
        return self if isinstance(self._source, Directory) else Checkpoint.open(self._source.fetch(self.files))

    def info(self, name: str) -> TensorInfo:
        """Where the tensor lies. OddrankError for a name that is not in the checkpoint."""
        try:
            return self.tensors[name]
        except KeyError:
            raise OddrankError(f"{self.path} has no tensor {show(name)} among its {len(self.tensors)}.") from None

    def array(self, name: str) -> "np.ndarray[Any, np.dtype[np.unsignedinteger]]":
        """The stored tensor: a read-only view of the mapped file, in STORAGE[dtype], of dtypes.storage_shape.

        Nothing is read until the elements are. The view keeps its file mapped.
        """
        info = self.info(name)
        dtype, shape = STORAGE[info.dtype], storage_shape(info.dtype, info.shape)
        if info.start == info.end:
            empty = np.empty(shape, dtype)
            empty.flags.writeable = False
            return empty
        return np.frombuffer(self.raw(name), dtype).reshape(shape)

    def raw(self, name: str) -> memoryview:
        """The stored tensor's bytes: a read-only view of the mapped file.

        On the hub small tensors are read by a request each; OddrankError for larger ones.
        """
        info = self.info(name)
        if info.start == info.end:
            return memoryview(b"")
        if not isinstance(self._source, Directory):
            return memoryview(self._source.stored(info))
        return memoryview(self._map(info.file))[info.start : info.end]

    def location(self, file: str) -> Path:
        """The real path of a weight file. OddrankError where it is on the hub."""
        return self._source.path(file, INDEX if self.has_index else self._source.kind)

    def release(self, names: Iterable[str] | None = None) -> None:
        """Drop the mapped pages of these tensors (of every file if None) from this process's memory.

        Views stay valid: a page read again is mapped again, usually from the page cache.
        """
        if names is None:
            for mapping in self._maps.values():
                mapping.madvise(mmap.MADV_DONTNEED)
            return
        page = mmap.PAGESIZE
        for name in names:
            info = self.info(name)
            mapped = self._maps.get(info.file)
            # The pages that the tensor shares with its neighbours stay.
            start, end = -(-info.start // page) * page, info.end // page * page
            if mapped is not None and start < end:
                mapped.madvise(mmap.MADV_DONTNEED, start, end - start)

    def close(self) -> None:
        """Unmap the files. A file that a view still points into is unmapped when the last such view is
        gone."""
        maps, self._maps = self._maps, {}
        for mapping in maps.values():
            try:
                mapping.close()
            except BufferError:
                continue

    def __enter__(self) -> "Checkpoint":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def other_files(self) -> tuple[str, ...]:
        """Every file of the directory that holds no weights (tokenizer, templates, licence, config.json,
        ...).

        Names relative to `path`. Weights in other formats, shard indexes and bookkeeping of git and download
        tools are left out. Open them through `other_file`.
        """
        return self._source.others(frozenset(self.files))

    def other_file(self, name: str) -> Path:
        """The real path of a file of the directory. OddrankError where it is missing, leads outside, or is on the
        hub."""
        return self._source.path(name)

    def other_object(self, name: str) -> dict[str, Any] | None:
        """The JSON object in a file beside the weights; None where there is no such file."""
        return parse_object(self._source.read(name), self.path / name) if name in self.other_files() else None

    def _map(self, file: str) -> mmap.mmap:
        mapped = self._maps.get(file)
        if mapped is None:
            path = self.location(file)
            try:
                with open(path, "rb") as stream:
                    size = os.fstat(stream.fileno()).st_size
                    if size != self._sizes[file]:
                        # Reading past the end of a mapped file kills the process.
                        raise OddrankError(
                            f"{path} has {size} bytes now and had {self._sizes[file]} when its header was "
                            f"read: "
                            f"something is writing to it. Wait until the checkpoint is complete."
                        )
                    mapped = mmap.mmap(stream.fileno(), 0, prot=mmap.PROT_READ, flags=mmap.MAP_SHARED)
            except OSError as error:
                raise OddrankError(f"{path} cannot be mapped: {why(error)}.") from None
            self._maps[file] = mapped
        return mapped


def _refuse_missing(source: "Directory | Repository", shards: list[str], named_by: str) -> None:
    """The missing shards are reported together."""
    missing = [shard for shard in shards if not source.holds(shard)]
    if missing:
        raise OddrankError(
            f"{named_by} names {len(shards)} weight files and {len(missing)} of them are missing from {source.root}: "
            f"{', '.join(show(m) for m in missing[:3])}{', ...' if len(missing) > 3 else ''}. Download the "
            f"model again."
        )
    for shard in shards:
        if not shard.endswith(".safetensors"):
            raise OddrankError(
                f"{named_by} of {source.root} names {show(shard)} as a weight file; only .safetensors files are read."
            )


def _refuse_ambiguity(root: Path, names: list[str], shards: list[str]) -> None:
    if "model.safetensors" in names and "model.safetensors" not in shards:
        raise OddrankError(
            f"{root} holds model.safetensors and a {INDEX} that does not name it: transformers would read "
            f"the "
            f"one and vLLM the other. Remove the one that is not the model."
        )


def _refuse_repeated(root: Path, headers: Mapping[str, Header], last: str) -> None:
    """Find the earlier shard of a tensor that `last` stores again: `open` has already overwritten its entry."""
    repeated = {info.name for info in headers[last].tensors}
    for shard, header in headers.items():
        for info in header.tensors:
            if shard != last and info.name in repeated:
                raise OddrankError(
                    f"Tensor {show(info.name)} is stored twice in {root}: in {show(shard)} and in "
                    f"{show(last)}. Which of "
                    f"them is meant cannot be known: download the model again, or remove the shard that does "
                    f"not belong."
                )


def _compare(root: Path, weight_map: dict[str, str], tensors: dict[str, TensorInfo]) -> None:
    """The index and the shards must name the same tensors in the same files."""
    remedy = f"Download the model again; if the shards are right, remove {INDEX}."
    for name, shard in weight_map.items():
        info = tensors.get(name)
        if info is None:
            raise OddrankError(
                f"{INDEX} of {root} places tensor {show(name)} in {show(shard)}, which does not hold it. {remedy}"
            )
        if info.file != shard:
            raise OddrankError(
                f"{INDEX} of {root} places tensor {show(name)} in {show(shard)}, but it is in "
                f"{show(info.file)}. {remedy}"
            )
    if len(weight_map) != len(tensors):
        extra = next(name for name in tensors if name not in weight_map)
        raise OddrankError(
            f"{show(tensors[extra].file)} of {root} holds tensor {show(extra)}, which {INDEX} does not name "
            f"({len(tensors) - len(weight_map)} such tensors). {remedy}"
        )
