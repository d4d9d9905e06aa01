"""Tiny releases with values, each written once for the tests of this folder."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors import safe_open

from oddrank.checkpoint import Checkpoint
from oddrank.layout.plan import Plan
from oddrank.planner import Planned, make_plan
from oddrank.synth import PUBLISHED, describe_release, write_checkpoint

EVERY = [(family, fmt) for family, formats in PUBLISHED.items() for fmt in formats]
_HOME = TemporaryDirectory(prefix="oddrank-releases-")


@cache
def checkpoint(family: str, fmt: str, **options: Any) -> Checkpoint:
    """Vision towers come with the MoE; two shards where the format has no files of its own per layer."""
    vision = family == "qwen3_5_moe"
    release = describe_release(family, fmt, size="tiny", vision=vision, **options)
    name = "-".join([family, fmt, *(f"{k}{v}" for k, v in options.items())])
    return Checkpoint.open(write_checkpoint(release, Path(_HOME.name) / name))


@cache
def planned(family: str, fmt: str, tp: int, executor: str = "vllm") -> Planned:
    return make_plan(checkpoint(family, fmt).path, tp, executor=executor)


def plan(family: str, fmt: str, tp: int, executor: str = "vllm") -> Plan:
    return planned(family, fmt, tp, executor).plan


def as_torch(model: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    """As an engine iterates: through the safetensors library, in torch's dtypes."""
    for file in model.files:
        with safe_open(str(model.path / file), framework="pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - it is no dict
                yield name, opened.get_tensor(name)


def as_numpy(model: Checkpoint) -> Iterator[tuple[str, Any]]:
    """Raw words in numpy arrays."""
    for name in model.tensors:
        yield name, model.array(name)


def words_of(tensor: Any) -> bytes:
    if isinstance(tensor, torch.Tensor):
        return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    return bytes(tensor.tobytes())
