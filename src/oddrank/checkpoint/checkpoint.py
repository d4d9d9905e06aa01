"""A model directory: its config, where its tensors lie, and a read-only view of each."""

import mmap
import os
from collections.abc import Iterable
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import numpy as np

from oddrank.checkpoint.directory import (
    INDEX,
    carried_files,
    inside,
    list_directory,
    model_directory,
    shard_names,
)
from oddrank.checkpoint.dtypes import STORAGE, storage_shape
from oddrank.checkpoint.header import TensorInfo, read_header, show, why
from oddrank.checkpoint.jsonfile import read_file, read_object
from oddrank.errors import OddrankError

CONFIG = "config.json"


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class Checkpoint:
    """A checkpoint on disk. `open` reads its config and headers only; weights are mapped when `array` asks
    for them.

    path:     the directory, as a real path.
    config:   config.json as it is (see config.ConfigView for typed access).
    tensors:  every stored tensor by name, in the order of the files and of the bytes within each.
    files:    the weight files' names relative to path, in order.
    metadata: each weight file's __metadata__.
    """

    def __init__(
        self,
        path: Path,
        config: dict[str, Any],
        tensors: dict[str, TensorInfo],
        real: dict[str, Path],
        sizes: dict[str, int],
        metadata: dict[str, dict[str, str]],
        has_index: bool,
    ) -> None:
        self.path = path
        self.config = config
        self.tensors = tensors
        self.files = tuple(real)
        self.metadata = metadata
        self.has_index = has_index
        self._real = real
        self._sizes = sizes
        self._maps: dict[str, mmap.mmap] = {}

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> "Checkpoint":
        """Read the config and the headers of the model directory `path`.

        The weights are model.safetensors.index.json's files, or model.safetensors, or every
        model-*.safetensors. OddrankError where anything is missing, malformed, contradictory or outside the
        directory.
        """
        if not os.fspath(path):
            raise OddrankError("The model's path is empty. Give the path of a model directory.")
        root = model_directory(Path(path))
        names = list_directory(root)
        if CONFIG not in names:
            # A directory of GGUF files has neither; its weights are the more useful complaint.
            if INDEX not in names:
                shard_names(root, names)
            raise OddrankError(f"{root} has no {CONFIG}, so it is not a model directory in transformers' form.")
        config = read_object(inside(root, CONFIG, "The model directory"))
        weight_map: dict[str, str] | None = None
        if INDEX in names:
            weight_map = _read_index(inside(root, INDEX, "The model directory"))
            shards = sorted(set(weight_map.values()))
            _refuse_ambiguity(root, names, shards)
            source = INDEX
        else:
            shards = shard_names(root, names)
            source = "The model directory"
        real = _locate(root, shards, source)

        tensors: dict[str, TensorInfo] = {}
        sizes: dict[str, int] = {}
        metadata: dict[str, dict[str, str]] = {}
        for shard, file in real.items():
            header = read_header(file, shard)
            metadata[shard] = header.metadata
            sizes[shard] = header.tensors[-1].end if header.tensors else header.size
            before = len(tensors)
            tensors.update({info.name: info for info in header.tensors})
            if len(tensors) != before + len(header.tensors):
                _refuse_repeated(root, real, header.tensors)
        if weight_map is not None:
            _compare(root, weight_map, tensors)
        if not tensors:
            raise OddrankError(f"{root} holds no tensor in its {len(real)} .safetensors files.")
        return cls(root, config, tensors, real, sizes, metadata, weight_map is not None)

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
        dtype = STORAGE[info.dtype]
        shape = storage_shape(info.dtype, info.shape)
        if info.start == info.end:
            empty = np.empty(shape, dtype)
            empty.flags.writeable = False
            return empty
        count = (info.end - info.start) // dtype.itemsize
        return np.frombuffer(self._map(info.file), dtype, count, info.start).reshape(shape)

    def raw(self, name: str) -> memoryview:
        """The stored tensor's bytes: a read-only view of the mapped file."""
        info = self.info(name)
        if info.start == info.end:
            return memoryview(b"")
        return memoryview(self._map(info.file))[info.start : info.end]

    def location(self, file: str) -> Path:
        """The real path of a weight file."""
        return self._real[file]

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
        return carried_files(self.path, frozenset(self.files))

    def other_file(self, name: str) -> Path:
        """The real path of a file of the directory. OddrankError where it is missing or leads outside."""
        return inside(self.path, name, "The model directory")

    def _map(self, file: str) -> mmap.mmap:
        mapped = self._maps.get(file)
        if mapped is None:
            path = self._real[file]
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


def _read_index(path: Path) -> dict[str, str]:
    try:
        index = msgspec.json.decode(read_file(path), type=_Index)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error).replace("\n", " ")
        raise OddrankError(
            f"{path} is not a shard index: a JSON object whose weight_map gives each tensor's file "
            f"({reason}). "
            f"Download it again, or remove it: the shards can be read without it."
        ) from None
    if not index.weight_map:
        raise OddrankError(f"{path} names no tensor. Download it again, or remove it.")
    return index.weight_map


def _locate(root: Path, shards: list[str], source: str) -> dict[str, Path]:
    """Every shard's real path; the missing ones are reported together."""
    missing = [s for s in shards if ".." not in s and "\0" not in s and not os.path.lexists(root / s)]
    if missing:
        raise OddrankError(
            f"{source} names {len(shards)} weight files and {len(missing)} of them are missing from {root}: "
            f"{', '.join(show(m) for m in missing[:3])}{', ...' if len(missing) > 3 else ''}. Download the "
            f"model again."
        )
    for shard in shards:
        if not shard.endswith(".safetensors"):
            raise OddrankError(
                f"{source} of {root} names {show(shard)} as a weight file; only .safetensors files are read."
            )
    return {shard: inside(root, shard, source) for shard in shards}


def _refuse_ambiguity(root: Path, names: list[str], shards: list[str]) -> None:
    if "model.safetensors" in names and "model.safetensors" not in shards:
        raise OddrankError(
            f"{root} holds model.safetensors and an {INDEX} that does not name it: transformers would read "
            f"the "
            f"one and vLLM the other. Remove the one that is not the model."
        )


def _refuse_repeated(root: Path, real: dict[str, Path], tensors: tuple[TensorInfo, ...]) -> None:
    """Find the earlier shard of a tensor that is stored twice: `open` has already overwritten its entry."""
    last = tensors[0].file
    for shard, file in real.items():
        if shard == last:
            break
        names = {info.name for info in read_header(file, shard).tensors}
        for info in tensors:
            if info.name in names:
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
