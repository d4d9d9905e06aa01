"""Seeded values of logical tensors: sane for their kind, the same in every format and file layout.

A tensor's values depend on the seed and its name only. Matrices are normal with standard deviation 1 / sqrt(K) times a
gain per 64 rows and one per 32 columns, so that scale blocks differ and a misplaced scale shows.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator

import numpy as np

from oddrank.synth.numbers import Floats
from oddrank.synth.schemes import BLOCK
from oddrank.synth.tables import Logical

CHUNK = 4 << 20
"""Elements made at a time, rounded to whole scale blocks of rows."""

_CUT = 4.0
"""Standard deviations at which normal numbers are cut, so that a tensor's bound is known before its values are."""

_SPREAD = 1.0
"""Gains are 2^u with u uniform in -1..1."""

_POWER = math.sqrt((4**_SPREAD - 4**-_SPREAD) / (2 * _SPREAD * math.log(4)))
"""Root mean square of one gain."""

MATRICES = frozenset(
    (
        "attention", "delta_net", "delta_net_gate", "mlp", "shared", "expert", "stacked", "bank", "router",
        "shared_gate", "lm_head", "embedding", "mtp_fc", "draft_fc", "kernel_projection", "selector", "projection",
        "vision",
    )
)  # fmt: skip


def matrix_shape(logical: Logical) -> tuple[int, int]:
    """A tensor as rows x columns: its last dimension, or, of a convolution over patches, all but the first."""
    if logical.kind == "vision" and len(logical.shape) > 2:
        return logical.shape[0], math.prod(logical.shape[1:])
    return math.prod(logical.shape[:-1]), logical.shape[-1]


def _generator(seed: int, name: str) -> np.random.Generator:
    return np.random.default_rng([seed, zlib.crc32(name.encode())])


def _deviation(logical: Logical, rng: np.random.Generator) -> float:
    """Standard deviation of a matrix: each has its own, so that scales per tensor differ."""
    own = float(2 ** rng.uniform(-0.25, 0.25))
    return own if logical.kind == "embedding" else own / math.sqrt(matrix_shape(logical)[1])


def bound(logical: Logical, seed: int) -> float:
    """What no magnitude of a matrix exceeds (of one that is not stacked)."""
    deviation = _deviation(logical, _generator(seed, logical.name))
    return _CUT * deviation * (2**_SPREAD / _POWER) ** 2


def matrix_rows(logical: Logical, seed: int) -> Iterator[tuple[int, Floats]]:
    """(first row, float32 rows) of a matrix, from the first to the last."""
    if logical.kind == "stacked":
        yield from _stacked_rows(logical, seed)
        return
    n, k = matrix_shape(logical)
    rng = _generator(seed, logical.name)
    deviation = _deviation(logical, rng)
    row_gain = np.repeat(2 ** rng.uniform(-_SPREAD, _SPREAD, -(-n // 64)), 64)[:n] / _POWER
    column_gain = np.repeat(2 ** rng.uniform(-_SPREAD, _SPREAD, -(-k // 32)), 32)[:k] / _POWER
    rows = (row_gain * deviation).astype(np.float32)[:, None]
    columns = column_gain.astype(np.float32)
    step = max(1, CHUNK // (k * BLOCK)) * BLOCK
    for start in range(0, n, step):
        x = rng.standard_normal((min(step, n - start), k), dtype=np.float32)
        np.clip(x, -_CUT, _CUT, out=x)
        x *= columns
        x *= rows[start : start + step]
        yield start, x


def _stacked_rows(logical: Logical, seed: int) -> Iterator[tuple[int, Floats]]:
    """Experts in one tensor [E, N, K] have the values they have one by one; gate_up_proj is each gate over its up."""
    experts, n, k = logical.shape
    base, _, name = logical.name.rpartition(".")
    names = ("gate_proj", "up_proj") if name == "gate_up_proj" else (name,)
    start = 0
    for expert in range(experts):
        for part in names:
            one = Logical(f"{base}.{expert}.{part}.weight", (n // len(names), k), "expert", logical.file)
            for offset, rows in matrix_rows(one, seed):
                yield start + offset, rows
            start += n // len(names)


def vector(logical: Logical, seed: int) -> Floats:
    """float32 values of what is not a matrix."""
    rng = _generator(seed, logical.name)
    shape = logical.shape
    match logical.kind:
        case "shifted_norm":  # stored as the difference from 1
            values = 0.1 * rng.standard_normal(shape)
        case "norm" | "gated_norm":
            values = 1 + 0.1 * rng.standard_normal(shape)
        case "bias":
            values = 0.1 * rng.standard_normal(shape)
        case "A_log":
            values = np.log(rng.uniform(1, 16, shape))
        case "dt_bias":
            values = rng.uniform(-5, 1, shape)
        case "conv" | "kernel":
            values = rng.standard_normal(shape) / 2
        case _:
            raise KeyError(logical.kind)
    return values.astype(np.float32)
