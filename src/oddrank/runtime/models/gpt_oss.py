"""gpt-oss (OpenAI, 2025, arXiv 2508.10925): attention with a sink a query head and, in turn, windows; experts with
biases and a clamped unit of their own."""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from oddrank.checkpoint.config import ConfigView
from oddrank.families.experts import Experts as ExpertSizes
from oddrank.runtime.models.build import Build
from oddrank.runtime.models.config import Defaults, ModelConfig
from oddrank.runtime.models.llama import FeedForward, Llama, SelfAttention
from oddrank.runtime.models.mixtral import Router, SparseMoE

_SCALING = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip
"""Of a config that says nothing of rotary parameters."""


@dataclass(frozen=True)
class ClampedUnit:
    """gate * sigmoid(alpha * gate) * (up + 1) of [..., gate, up, gate, up, ...], each at most `limit`, up at least
    -limit. A channel whose gate is zero stays silent."""

    alpha: float
    limit: float

    def __call__(self, both: Tensor) -> Tensor:
        gate, up = both[..., ::2].clamp(max=self.limit), both[..., 1::2].clamp(-self.limit, self.limit)
        out: Tensor = gate * torch.sigmoid(self.alpha * gate) * (up + 1)
        return out


class GptOssConfig(ModelConfig, frozen=True):
    sizes: ExpertSizes
    unit: ClampedUnit

    @classmethod
    def values(cls, view: ConfigView, defaults: Defaults) -> dict[str, Any]:
        if "rope_parameters" not in view and "rope_scaling" not in view:
            view = ConfigView({**view.data, "rope_scaling": _SCALING}, view.file, view.prefix)
        return super().values(view, defaults) | {
            "attention_bias": view.get_bool("attention_bias", True),
            "sizes": ExpertSizes.of(view, count=("num_local_experts", "num_experts"), width="intermediate_size"),
            "unit": ClampedUnit(view.get_float("swiglu_alpha", 1.702), view.get_float("swiglu_limit", 7.0)),
        }


class GptOss(Llama):
    DEFAULTS: ClassVar[Defaults] = Defaults(
        max_positions=131072, head_dim=64, sliding="alternate", window=128, theta=150000.0, eps=1e-5
    )
    CONFIG: ClassVar[type[ModelConfig]] = GptOssConfig

    def attention(self, b: Build, layer: int) -> SelfAttention:
        bias = b.config.attention_bias
        return SelfAttention(b, layer, qkv_bias=bias, o_bias=bias, sinks=True)

    def mlp(self, b: Build, layer: int) -> FeedForward:
        c, at = b.config, f"{b.prefix}layers.{layer}.mlp"
        assert isinstance(c, GptOssConfig)
        router = Router(b, f"{at}.router", c.sizes, bias=True)
        return SparseMoE(b, at, router, c.sizes, unit=c.unit, biased=True)
