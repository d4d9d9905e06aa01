"""Models for the benchmarks of the runtime: engines in this process, and large checkpoints of random words."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np

from oddrank.checkpoint import Checkpoint
from oddrank.planner import make_plan
from oddrank.runtime.engine import Engine
from oddrank.runtime.parallel import SoloGroup
from oddrank.runtime.precision import Precision
from oddrank.runtime.worker import load_rank
from oddrank.synth import Release, write_headers

BLOCK = 8 << 20
"""Words repeated: more than any part of a matrix that a cache holds, and nothing here depends on their values."""


def engine(model: Path) -> Engine:
    """The model on one rank, in this process, with torch's threads, in bf16."""
    with Checkpoint.open(model) as checkpoint:
        made, _ = load_rank(make_plan(model, 1).plan, checkpoint, SoloGroup(), Precision.of("bf16"))
    return Engine(made)


def products(model: Path) -> int:
    """Multiplications with weights that a token of a prompt costs: the elements of the matrices of a bf16 checkpoint
    without embedding and head."""
    with Checkpoint.open(model) as checkpoint:
        found = [info for name, info in checkpoint.tensors.items() if "embed_tokens" not in name]
        return sum(math.prod(i.shape) for i in found if len(i.shape) == 2 and "lm_head" not in i.name)


def write_random(release: Release, path: Path) -> None:
    """The release with random words of every number type: weights near 0.02, none that is not finite. Much faster than
    `write_checkpoint`, which rounds real numbers."""
    write_headers(release, path)
    draw = np.random.default_rng(0)
    noise = draw.standard_normal(BLOCK // 2, np.float32) * np.float32(0.02)
    bf16 = (noise.view(np.uint32) >> 16).astype(np.uint16)
    codes = draw.integers(0, 256, BLOCK, np.uint8)
    codes[codes & 127 == 127] = 3  # not NaN
    words = {"BF16": bf16.view(np.uint8), "F8_E4M3": codes, "U8": draw.integers(0, 256, BLOCK, np.uint8)}
    with Checkpoint.open(path) as checkpoint:
        places = [(checkpoint.location(info.file), info) for info in checkpoint.tensors.values()]
    for file, info in places:
        size, name = info.end - info.start, info.name
        if name.endswith(("weight_scale_inv", "weight_scale")) and info.dtype == "BF16":
            block = np.full(2, 0x391E, np.uint16).view(np.uint8)  # 1.5e-4: codes are about 130
        elif name.endswith("weight_scale") and info.dtype == "F8_E4M3":
            block = draw.integers(40, 72, 1 << 16, np.uint8)
        elif name.endswith("weight_scale") and info.dtype == "U8":
            block = draw.integers(118, 122, 1 << 16, np.uint8)
        elif info.dtype == "F32":
            block = np.full(1, 0.01 if name.endswith("_2") else 1.5e-4, np.float32).view(np.uint8)
        else:
            block = words[info.dtype]
        with open(file, "r+b") as stream:
            stream.seek(info.start)
            whole = memoryview(np.tile(block, -(-min(size, BLOCK) // len(block))))
            left = size
            while left:
                left -= stream.write(whole[: min(left, len(whole))])
