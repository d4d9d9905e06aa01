"""Read a JSON object from a file that somebody else wrote: config.json, the shard index."""

import json
import os
import stat
from pathlib import Path
from typing import Any

import msgspec

from oddrank.checkpoint.header import why
from oddrank.errors import OddrankError

MAX_JSON = 256 * 1024 * 1024
"""Bytes; an index of 124,000 tensors has 11 MB."""

MAX_DEPTH = 64
"""Objects within objects: far above any real config and far below Python's recursion limit."""


def read_file(path: Path, limit: int = MAX_JSON) -> bytes:
    """The bytes of a regular file of at most `limit` bytes. OddrankError for anything else."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except FileNotFoundError:
        raise OddrankError(f"{path} does not exist.") from None
    except OSError as error:
        raise OddrankError(f"{path} cannot be read: {why(error)}.") from None
    try:
        with os.fdopen(fd, "rb") as stream:
            status = os.fstat(fd)
            if not stat.S_ISREG(status.st_mode):
                raise OddrankError(f"{path} is not a regular file.")
            if status.st_size > limit:
                raise OddrankError(
                    f"{path} has {status.st_size} bytes, above the {limit} that are read of such a file."
                )
            return stream.read(limit + 1)
    except OSError as error:
        raise OddrankError(f"{path} cannot be read: {why(error)}.") from None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in the file, as `parse_object` takes it. OddrankError for a file that is unreadable, too."""
    return parse_object(read_file(path), path)


def parse_object(raw: bytes, path: Path) -> dict[str, Any]:
    """The JSON object that these bytes are. NaN and Infinity, which Python's json writes, are accepted.

    `path` is only named in errors. OddrankError for what is not JSON, not an object, or nested more than MAX_DEPTH
    deep.
    """
    value: Any
    try:
        value = msgspec.json.decode(raw)
    except RecursionError:
        raise OddrankError(f"{path} is nested too deeply: more than {MAX_DEPTH} objects within objects.") from None
    except (msgspec.MsgspecError, ValueError) as first:
        try:
            value = json.loads(raw.decode("utf-8"))
        except RecursionError:
            raise OddrankError(f"{path} is nested too deeply: more than {MAX_DEPTH} objects within objects.") from None
        except ValueError:
            reason = str(first).replace("\n", " ")
            raise OddrankError(f"{path} is not valid JSON ({reason}). Download it again or correct it.") from None
    if not isinstance(value, dict):
        raise OddrankError(f"{path} holds a JSON {_kind(value)} where an object is expected.")
    _check(value, path)
    return value


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def parse_index(raw: bytes, path: Path) -> dict[str, str]:
    """Each tensor's file, of a shard index. `path` is only named in errors. OddrankError for anything else."""
    try:
        index = msgspec.json.decode(raw, type=_Index)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else str(error).replace("\n", " ")
        raise OddrankError(
            f"{path} is not a shard index: a JSON object whose weight_map gives each tensor's file ({reason}). "
            f"Download it again, or remove it: the shards can be read without it."
        ) from None
    if not index.weight_map:
        raise OddrankError(f"{path} names no tensor. Download it again, or remove it.")
    return index.weight_map


def _check(value: Any, path: Path) -> None:
    """Refuse what a later pass over the value would stumble on: great depth, strings that are not Unicode."""
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise OddrankError(f"{path} is nested too deeply: more than {MAX_DEPTH} objects within objects.")
        inner: list[Any] = []
        for item in level:
            parts: list[Any] = [*item.keys(), *item.values()] if isinstance(item, dict) else item
            for part in parts:
                if isinstance(part, (dict, list)):
                    inner.append(part)
                elif isinstance(part, str) and not part.isascii():
                    try:
                        part.encode()
                    except UnicodeEncodeError:
                        raise OddrankError(f"{path} holds a string that is not valid Unicode: {part[:80]!a}.") from None
        level = inner


def _kind(value: Any) -> str:
    if value is None:
        return "null"
    names = {bool: "boolean", int: "number", float: "number", str: "string", list: "array"}
    return names.get(type(value), type(value).__name__)
