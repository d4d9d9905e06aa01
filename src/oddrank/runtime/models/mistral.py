"""Mistral (Jiang et al., 2023, arXiv 2310.06825): Llama without biases, with sliding-window attention."""

from typing import ClassVar

from oddrank.runtime.models.build import Build
from oddrank.runtime.models.config import Defaults
from oddrank.runtime.models.llama import FeedForward, GatedMLP, Llama, SelfAttention


class Mistral(Llama):
    DEFAULTS: ClassVar[Defaults] = Defaults(max_positions=131072, sliding="all")

    def attention(self, b: Build, layer: int) -> SelfAttention:
        return SelfAttention(b, layer, qkv_bias=False, o_bias=False)

    def mlp(self, b: Build, layer: int) -> FeedForward:
        return GatedMLP(b, f"{b.prefix}layers.{layer}.mlp", bias=False)
