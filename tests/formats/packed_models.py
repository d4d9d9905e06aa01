"""Small models on disk whose projections are stored in a packing, and what their matrices decode to."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from formats.codec import F64, Raw, numbers
from formats.integers import Packed, skewed, stored
from layout.shapes import config, tensor_table
from safetensors.torch import save_file

from oddrank.checkpoint import Checkpoint

TORCH = {"I8": torch.int8, "I32": torch.int32, "I64": torch.int64, "F16": torch.float16, "F32": torch.float32,
         "BF16": torch.bfloat16, "U8": torch.uint8, "F8_E4M3": torch.float8_e4m3fn}  # fmt: skip

Parts = dict[str, Raw]
Change = Callable[[str, Parts], Parts]


def model_config(packing: Packed, **shape: Any) -> dict[str, Any]:
    """8 query heads over 4 KV heads of 128, 1152 channels: nine groups of 128."""
    usual: dict[str, Any] = {"q": 8, "kv": 4, "head_dim": 128, "hidden": 128, "mlp": 1152, "layers": 1, "vocab": 192}
    return config("llama", **usual | shape, quantization_config=packing.config)


def tensor(raw: Raw) -> torch.Tensor:
    words = np.ascontiguousarray(raw.words).reshape(raw.words.shape)
    return torch.from_numpy(words.view(f"i{words.dtype.itemsize}").copy()).view(TORCH[raw.dtype])


def write(
    folder: Path, packing: Packed, *, change: Change = lambda name, parts: parts, said: Any = None, **shape: Any
) -> Checkpoint:
    """change: of a layer's stored tensors, by its name. said: the quantization_config, if not the packing's."""
    c = model_config(packing, **shape)
    if said is not None:
        c["quantization_config"] = said
    rng = np.random.default_rng(7)
    tensors: dict[str, torch.Tensor] = {}
    for seed, (name, (_, size)) in enumerate(tensor_table(c).items()):
        if name.endswith("_proj.weight"):
            base = name.removesuffix(".weight")
            parts = change(base, stored(packing, skewed(*size, seed)))
            tensors |= {base + suffix: tensor(raw) for suffix, raw in parts.items()}
        else:
            tensors[name] = torch.from_numpy(rng.standard_normal(size, dtype=np.float32)).bfloat16()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(c))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return Checkpoint.open(folder)


def matrices(names: list[str]) -> dict[str, list[str]]:
    """Dense name -> the suffixes of what is stored of it ("" where it is stored under its dense name)."""
    found: dict[str, list[str]] = {}
    for name in names:
        base, _, leaf = name.rpartition(".")
        if base.endswith("_proj"):
            found.setdefault(f"{base}.weight", []).append(f".{leaf}")
        else:
            found[name] = [""]
    return found


def decoded(packing: Packed, parts: Parts) -> F64:
    return numbers(parts[""]) if "" in parts else packing.decode(parts)


def parts_of(read: Callable[[str], Raw], dense: str, suffixes: list[str]) -> Parts:
    return {s: read(dense.removesuffix(".weight") + s if s else dense) for s in suffixes}
