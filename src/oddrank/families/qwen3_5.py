"""Qwen3.5 / 3.6 / 3.8 dense: three gated delta net layers to one of gated attention, and a gated MLP."""

from __future__ import annotations

from oddrank.checkpoint.config import ConfigView
from oddrank.families.base import Family
from oddrank.families.hybrid import PREFIXES, hybrid
from oddrank.geometry import Model


def build(c: ConfigView, prefix: str) -> Model:
    return hybrid(c, prefix, "qwen3_5", experts=False)


FAMILY = Family("qwen3_5", ("qwen3_5", "qwen3_5_text"), build, prefixes=PREFIXES)
