"""Files for the checkpoint tests, written by the safetensors library or byte by byte."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import TensorSpec, serialize_file


def safetensors_bytes(header: Any, data: bytes = b"") -> bytes:
    """A file of this header (JSON bytes, or an object to encode) and this data, well-formed or not."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + data


def entry(dtype: str, shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def library_file(path: Path, tensors: dict[str, tuple[str, list[int], bytes]], /, **metadata: str) -> None:
    """Let the safetensors library write (dtype as it spells it, shape, bytes) under each name."""
    keep = {name: np.frombuffer(data, np.uint8) for name, (_, _, data) in tensors.items()}
    specs = {
        name: TensorSpec(dtype=dtype, shape=shape, data_ptr=keep[name].ctypes.data, data_len=len(data))
        for name, (dtype, shape, data) in tensors.items()
    }
    serialize_file(specs, path, metadata or None)


def model(path: Path, shards: dict[str, list[str]], index: bool = True, config: Any = None) -> Path:
    """A model directory whose shards hold these F32 tensors of shape [2, 3]; values count up from 0."""
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "llama"} if config is None else config))
    value = 0
    weight_map = {}
    for shard, names in shards.items():
        tensors = {}
        for name in names:
            tensors[name] = ("float32", [2, 3], np.arange(value, value + 6, dtype=np.float32).tobytes())
            weight_map[name] = shard
            value += 6
        library_file(path / shard, tensors, format="pt")
    if index:
        write_index(path, weight_map)
    return path


def write_index(path: Path, weight_map: Any) -> None:
    text = json.dumps({"metadata": {"total_size": 0}, "weight_map": weight_map})
    (path / "model.safetensors.index.json").write_text(text)
