"""Mistral: llama's tensors without biases; a sliding window over the keys where the config gives one."""

from __future__ import annotations

from oddrank.checkpoint.config import ConfigView
from oddrank.families.base import Family
from oddrank.families.decoder import dense_decoder
from oddrank.geometry import Model


def build(c: ConfigView, prefix: str) -> Model:
    return dense_decoder(c, prefix, family="mistral", kv_heads=8)


FAMILY = Family("mistral", ("mistral",), build)
