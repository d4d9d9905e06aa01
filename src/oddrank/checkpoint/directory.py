"""Which files of a model directory hold its weights, and which may be touched at all.

Names inside a checkpoint are data that somebody else wrote, so a file is opened only where its real path lies
in the directory. The one exception is the Hugging Face hub's cache, whose snapshots are links to blobs of the
same repository.
"""

import os
import re
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from oddrank.checkpoint.header import Header, read_header, show, why
from oddrank.checkpoint.jsonfile import read_file
from oddrank.errors import OddrankError
from oddrank.words import counted

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

_SHARD = re.compile(r"model.*\.safetensors")
_NUMBERED = re.compile(r"(.*)-(\d+)-of-(\d+)\.safetensors")
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
_GGUF = (".gguf", ".ggml")
_WEIGHTS = (".safetensors", *_PICKLED, *_GGUF, ".h5", ".msgpack", ".onnx", ".onnx_data", ".npz", ".tflite")
_BOOKKEEPING = (".safetensors.index.json", ".bin.index.json", ".partial", ".incomplete", ".lock")
_NOT_CARRIED = {".git", ".cache", "__pycache__", ".ipynb_checkpoints"}


class Directory:
    """A model directory on disk, which a checkpoint is read from.

    root: its real path. kind: what errors call it. File names are relative, with forward slashes.
    """

    kind = "The model directory"

    def __init__(self, path: Path) -> None:
        """OddrankError where `path` is no readable directory."""
        self.root = model_directory(path)

    @property
    def name(self) -> str:
        """The model's name: the directory's, or the repository's for a snapshot in the hub's cache."""
        cached = _hub_repository(self.root)
        at_top = cached is not None and self.root.parent.parent == cached
        return cached.name.rpartition("--")[2] if cached is not None and at_top else self.root.name

    def names(self) -> list[str]:
        """Names at the top of the directory, sorted."""
        return list_directory(self.root)

    def holds(self, name: str) -> bool:
        """Is there something of this name? True for a name that `path` refuses."""
        return ".." in name or "\0" in name or os.path.lexists(self.root / name)

    def path(self, name: str, named_by: str = kind) -> Path:
        """The real path of a file. OddrankError for a name that is missing or leads outside."""
        return inside(self.root, name, named_by)

    def read(self, name: str) -> bytes:
        """A whole file of at most MAX_JSON bytes."""
        return read_file(self.path(name))

    def headers(
        self, shards: Iterable[str], named_by: str, weight_map: Mapping[str, str] | None = None
    ) -> dict[str, Header]:
        """The headers of these weight files, in order. `named_by` says who names them."""
        real = {shard: self.path(shard, named_by) for shard in shards}
        return {shard: read_header(path, shard) for shard, path in real.items()}

    def others(self, weights: frozenset[str]) -> tuple[str, ...]:
        """Every file that holds no weights: see `carried_files`."""
        return carried_files(self.root, weights)


def model_directory(path: Path) -> Path:
    """The directory `path`, with no link left in it. OddrankError where it is not a readable directory."""
    shown = show(str(path))
    try:
        real = Path(os.path.realpath(path, strict=True))
        mode = real.stat().st_mode
    except (FileNotFoundError, NotADirectoryError):
        raise OddrankError(
            f"There is no {shown}. Give the path of a model directory, or the id of a model of the Hugging Face hub "
            f"(owner/name)."
        ) from None
    except OSError as error:
        raise OddrankError(f"{shown} cannot be read: {why(error)}.") from None
    except ValueError as error:
        raise OddrankError(f"{shown} is not a path ({error}).") from None
    if not stat.S_ISDIR(mode):
        raise OddrankError(
            f"{shown} is a file, not a model directory. Give the directory that holds config.json and "
            f"the .safetensors files, here perhaps {show(str(path.parent))}."
        )
    return real


def list_directory(root: Path) -> list[str]:
    """Names in the directory, sorted."""
    try:
        return sorted(os.listdir(root))
    except OSError as error:
        raise OddrankError(f"{show(str(root))} cannot be read: {why(error)}.") from None


def inside(root: Path, name: str, source: str) -> Path:
    """The real path of the file `name` of the directory `root` (itself a real path).

    `source` says who names the file. OddrankError where the name is absolute, climbs out, does not exist or
    is not a regular file, or where its links lead out of the directory (blobs of the same hub cache are
    allowed).
    """
    parts = name.split("/")
    if not name or name.startswith("/") or ".." in parts or "\0" in name or "\\" in name:
        raise OddrankError(
            f"{source} names the file {show(name)}, which lies outside the model directory {root}. Only "
            f"files "
            f"of the directory itself are read: correct the name."
        )
    path = root / name
    try:
        real = Path(os.path.realpath(path, strict=True))
        mode = real.stat().st_mode
    except FileNotFoundError:
        raise OddrankError(f"{source} names the file {show(name)}, which is missing from {root}.") from None
    except (OSError, ValueError) as error:
        reason = why(error) if isinstance(error, OSError) else str(error)
        raise OddrankError(f"{source} names the file {show(name)} of {root}, which cannot be read: {reason}.") from None
    if not real.is_relative_to(root) and not _is_hub_blob(root, path, real):
        raise OddrankError(
            f"{source} names the file {show(name)}, a link that leads outside the model directory {root}, to "
            f"{real}. "
            f"Put the file itself, or a hard link to it, in the directory."
        )
    if not stat.S_ISREG(mode):
        raise OddrankError(f"{source} names {show(name)} of {root}, which is not a regular file.")
    return real


def _hub_repository(root: Path) -> Path | None:
    """The repository of the hub's cache that `root` is a snapshot of (or a folder of one), if it is."""
    for folder in (root, *root.parents):
        repository = folder.parent.parent
        if folder.parent.name == "snapshots" and repository.name.startswith("models--"):
            return repository
    return None


def _is_hub_blob(root: Path, path: Path, real: Path) -> bool:
    """Is `path` the hub's link to a blob of its own repository?

    The blob may itself be a link, to the store that the repositories of a cache share (huggingface_hub 2).
    """
    repository = _hub_repository(root)
    if repository is None:
        return False
    blobs = repository / "blobs"
    if real.parent == blobs:
        return True
    target = Path(os.path.normpath(path.parent / os.readlink(path))) if path.is_symlink() else path
    return target.parent == blobs and real.parent.parent == repository.parent / "blobs"


def shard_names(root: Path, names: list[str]) -> list[str]:
    """The weight files of a directory that has no index, by their names. OddrankError where none or some are
    missing."""
    shards = [name for name in names if _SHARD.fullmatch(name)]
    if not shards:
        raise _no_weights(root, names)
    if SINGLE in shards:
        if len(shards) > 1:
            raise OddrankError(
                f"{root} holds both {SINGLE} and {show(next(s for s in shards if s != SINGLE))}, and no "
                f"{INDEX} that "
                f"says which of them are the model. Keep one of the two sets."
            )
        return shards
    totals: dict[tuple[str, int], set[int]] = {}
    for shard in shards:
        match = _NUMBERED.fullmatch(shard)
        if match is None:
            continue
        totals.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    if len(totals) > 1:
        sets = " and ".join(f"{show(stem)} of {total}" for stem, total in sorted(totals))
        raise OddrankError(f"{root} has no {INDEX} and mixes shards of different sets ({sets}). Keep one set.")
    for (_, total), numbers in totals.items():
        present = sum(1 for number in numbers if 1 <= number <= total)
        if present < total:
            # A number in a file name can be anything: look only as far as the missing one must lie.
            first = next(n for n in range(1, len(numbers) + 2) if n not in numbers)
            raise OddrankError(
                f"{root} has {present} of {total} shards: number {first} is the first of {total - present} "
                f"missing. "
                f"Download the model again."
            )
    return shards


def _no_weights(root: Path, names: list[str]) -> OddrankError:
    def some(found: list[str]) -> str:
        return f"{show(found[0])}" + (f" and {len(found) - 1} more" if len(found) > 1 else "")

    other = [n for n in names if n.endswith(".safetensors")]
    if other:
        return OddrankError(
            f"{root} has no {SINGLE}, no model-*.safetensors and no {INDEX}, but {some(other)}. If that is "
            f"the whole "
            f"model in transformers' naming, rename it to {SINGLE}."
        )
    gguf = [n for n in names if n.endswith(_GGUF)]
    if gguf:
        return OddrankError(
            f"{root} holds GGUF files ({some(gguf)}) and no .safetensors. oddrank reads safetensors: "
            f"download the "
            f"model's original repository, or convert with transformers: "
            f"AutoModelForCausalLM.from_pretrained(DIR, gguf_file=FILE).save_pretrained(OUT)."
        )
    pickled = [n for n in names if n.endswith(_PICKLED)]
    if pickled:
        return OddrankError(
            f"{root} holds PyTorch pickle files ({some(pickled)}) and no .safetensors. oddrank reads "
            f"safetensors only, "
            f"as a pickle can run code. Convert it with transformers: "
            f"AutoModelForCausalLM.from_pretrained(DIR, dtype='auto').save_pretrained(OUT)."
        )
    return OddrankError(
        f"{root} holds no .safetensors file ({counted(len(names), 'other file')}). Give a model directory, complete "
        "with weights."
    )


def carried_files(root: Path, weights: frozenset[str]) -> tuple[str, ...]:
    """Every file below `root` that holds no weights, as sorted relative names with forward slashes.

    Left out are weights in any format, shard indexes, and the bookkeeping of git and of download tools.
    OddrankError for a link that leads outside the directory.
    """
    found: list[str] = []

    def fail(error: OSError) -> None:
        raise OddrankError(f"{show(str(error.filename))} cannot be read: {why(error)}.") from None

    for folder, folders, files in os.walk(root, onerror=fail):
        folders[:] = sorted(f for f in folders if f not in _NOT_CARRIED and not f.endswith(".partial"))
        for folder_name in list(folders):
            if os.path.islink(os.path.join(folder, folder_name)):
                raise OddrankError(
                    f"{show(os.path.join(folder, folder_name))} is a link to a directory. Put the directory "
                    f"itself in the "
                    f"model directory, or remove the link."
                )
        for file in files:
            name = os.path.relpath(os.path.join(folder, file), root)
            if name in weights or not is_carried(name):
                continue
            inside(root, name, "The model directory")
            found.append(name)
    return tuple(sorted(found))


def is_carried(name: str) -> bool:
    """Does a file of this name belong to the model without holding weights in some format?"""
    *folders, file = name.split("/")
    if any(f in _NOT_CARRIED or f.endswith(".partial") for f in folders):
        return False
    return not file.endswith((*_WEIGHTS, *_BOOKKEEPING))
