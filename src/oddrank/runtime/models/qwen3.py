"""Qwen3 (Yang et al., 2025, arXiv 2505.09388): every query and key head is normalised before it is rotated."""

from typing import ClassVar

from oddrank.runtime.models.build import Build
from oddrank.runtime.models.config import Defaults
from oddrank.runtime.models.llama import FeedForward, GatedMLP, Llama, SelfAttention


class Qwen3(Llama):
    DEFAULTS: ClassVar[Defaults] = Defaults(max_positions=32768, head_dim=128, sliding="some")

    def attention(self, b: Build, layer: int) -> SelfAttention:
        bias = b.config.attention_bias
        return SelfAttention(b, layer, qkv_bias=bias, o_bias=bias, qk_norm=True)

    def mlp(self, b: Build, layer: int) -> FeedForward:
        return GatedMLP(b, f"{b.prefix}layers.{layer}.mlp", bias=False)
