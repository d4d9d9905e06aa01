"""Seed-OSS (ByteDance Seed, 2025): Llama with a switch each for the biases of q, k and v, of o, and of the MLP."""

from typing import Any, ClassVar

from oddrank.checkpoint.config import ConfigView
from oddrank.runtime.models.build import Build
from oddrank.runtime.models.config import Defaults, ModelConfig
from oddrank.runtime.models.llama import Llama, SelfAttention


class SeedOssConfig(ModelConfig, frozen=True):
    attention_out_bias: bool

    @classmethod
    def values(cls, view: ConfigView, defaults: Defaults) -> dict[str, Any]:
        return super().values(view, defaults) | {
            "attention_bias": view.get_bool("attention_bias", True),
            "attention_out_bias": view.get_bool("attention_out_bias", False),
        }


class SeedOss(Llama):
    DEFAULTS: ClassVar[Defaults] = Defaults(max_positions=524288, head_dim=128)
    CONFIG: ClassVar[type[ModelConfig]] = SeedOssConfig

    def attention(self, b: Build, layer: int) -> SelfAttention:
        c = b.config
        assert isinstance(c, SeedOssConfig)
        return SelfAttention(b, layer, qkv_bias=c.attention_bias, o_bias=c.attention_out_bias)
