"""Qwen3.5 / 3.6 MoE: the hybrid decoder with a mixture of experts and a gated shared expert in every layer."""

from __future__ import annotations

from oddrank.checkpoint.config import ConfigView
from oddrank.families.base import Family
from oddrank.families.hybrid import PREFIXES, hybrid
from oddrank.geometry import Model


def build(c: ConfigView, prefix: str) -> Model:
    return hybrid(c, prefix, "qwen3_5_moe", experts=True)


FAMILY = Family("qwen3_5_moe", ("qwen3_5_moe", "qwen3_5_moe_text"), build, prefixes=PREFIXES)
