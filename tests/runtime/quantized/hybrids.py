"""Tiny hybrid models for the runtime: float64 weights in memory, plans of every kind, transformers' logits.

Inside transformers every cast to fp32 goes to float64, except for the rotary angles: those are fp32 constants of the
model, in transformers as in the runtime.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import torch
from hybrid import tiny
from hybrid.random_plans import equal_plan, ragged_plan
from layout.shapes import Config
from proof.tiny import F64, Memory, Weights
from safetensors.numpy import save_file

from oddrank.layout.plan import Plan
from oddrank.layout.solver import Request
from oddrank.planner import Subject, plan_subject
from oddrank.runtime.models import Llama
from oddrank.runtime.parallel import Group, LocalGroup
from oddrank.runtime.precision import Precision
from oddrank.runtime.worker import load_rank

FULL, LINEAR = tiny.FULL, tiny.LINEAR
FAMILIES = tiny.FAMILIES


class InMemory(Memory):
    """A checkpoint as the runtime's loader sees one."""

    def __init__(self, weights: Weights, config: Config) -> None:
        super().__init__(weights)
        self.config, self.tensors = config, dict.fromkeys(weights)

    def release(self, names: Sequence[str]) -> None:
        pass


class Hybrid(NamedTuple):
    config: Config
    weights: Weights
    subject: Subject

    @property
    def vocab(self) -> int:
        return int(tiny.text_of(self.config)["vocab_size"])

    def tokens(self, count: int, seed: int = 0) -> list[int]:
        return np.random.default_rng([seed, 7]).integers(0, self.vocab, count).tolist()  # type: ignore[no-any-return]

    def on_ranks(self, plan: Plan, work: Callable[[Llama], Any], dtype: str = "fp64") -> list[Any]:
        """work(the rank's model) as every rank, in lockstep."""
        checkpoint: Any = InMemory(self.weights, self.config)

        def rank(group: Group) -> Any:
            return work(load_rank(plan, checkpoint, group, Precision.of(dtype))[0])

        with torch.inference_mode():
            return LocalGroup.run(plan.tp, rank)

    def save(self, path: Path) -> Path:
        path.mkdir()
        save_file({n: np.ascontiguousarray(w) for n, w in self.weights.items()}, path / "model.safetensors")
        (path / "config.json").write_text(json.dumps(self.config))
        return path


@cache
def hybrid(family: str, *, seed: int = 0, stacked: bool = True, mtp: bool = False, **options: Any) -> Hybrid:
    """Four layers of both kinds, heads that no small number of ranks divides, odd widths."""
    heads = tiny.Heads(6, 3, 5, 10) if family == "qwen3_5" else tiny.Heads(6, 2, 4, 8)
    made = {"layers": (LINEAR, FULL, LINEAR, FULL), "head_dim": 8, "mlp": 13, "shared": 11, "experts": (5, 2)}
    config = tiny.config(family, heads, **{**made, **options}, mtp=int(mtp))
    weights = tiny.random_weights(
        tiny.tensor_shapes(config, stacked=stacked, mtp=mtp), np.random.default_rng([seed, len(family)])
    )
    return Hybrid(config, weights, tiny.tiny_subject(config, weights))


@contextmanager
def fp32_angles(config: Config, count: int) -> Iterator[None]:
    """transformers' rotary embedding of the first `count` positions as it is without any redirected cast."""
    family = "qwen3_5_moe" if tiny.is_moe(config) else "qwen3_5"
    name, _, text = tiny._CLASSES[family]
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    cls = getattr(module, f"{name}TextRotaryEmbedding")
    made = cls(text.from_dict(tiny.text_of(config)))
    tables = made(torch.zeros((), dtype=torch.float64), torch.arange(count)[None])
    with mock.patch.object(cls, "forward", lambda self, x, position_ids: tables):
        yield


def reference(m: Hybrid, tokens: Sequence[int]) -> F64:
    """transformers' logits [tokens, vocab]."""
    with fp32_angles(m.config, len(tokens)):
        return tiny.transformers_logits(m.config, m.weights, list(tokens))


def distance(a: Any, b: Any) -> float:
    """Largest difference over the largest magnitude of `b`."""
    a, b = (x.numpy() if isinstance(x, torch.Tensor) else x for x in (a, b))
    return float(np.abs(a - b).max() / np.abs(b).max())


# -- plans -------------------------------------------------------------------------------------------------------------


def solved(m: Hybrid, tp: int) -> Plan:
    """The solver's own: ragged where nothing divides."""
    return plan_subject(m.subject, Request(tp=tp)).plan


def weighted(m: Hybrid, tp: int) -> Plan:
    return plan_subject(m.subject, Request(tp=tp, shares=tuple(range(tp + 1, 1, -1)))).plan


def scattered(m: Hybrid, tp: int) -> Plan:
    """Units anywhere, copies and dummies anywhere, any map, ranks that may hold nothing real of an axis."""
    return ragged_plan(m.subject, np.random.default_rng([tp, 3]), tp)


def padded(m: Hybrid, tp: int) -> Plan:
    return equal_plan(m.subject, np.random.default_rng([tp, 4]), tp)


PLANS = {"solved": solved, "weighted": weighted, "scattered": scattered, "padded": padded}
