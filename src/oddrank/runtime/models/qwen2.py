"""Qwen2 (Yang et al., 2024, arXiv 2407.10671): Llama with a bias on q, k and v, and none elsewhere."""

from typing import ClassVar

from oddrank.runtime.models.build import Build
from oddrank.runtime.models.config import Defaults
from oddrank.runtime.models.llama import GatedMLP, Llama, SelfAttention


class Qwen2(Llama):
    DEFAULTS: ClassVar[Defaults] = Defaults(max_positions=32768, sliding="some")

    def attention(self, b: Build, layer: int) -> SelfAttention:
        return SelfAttention(b, layer, qkv_bias=True, o_bias=False)

    def mlp(self, b: Build, layer: int) -> GatedMLP:
        return GatedMLP(b, f"{b.prefix}layers.{layer}.mlp", bias=False)
