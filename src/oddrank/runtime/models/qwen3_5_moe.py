"""Qwen3.5 / 3.6 MoE: the hybrid decoder with routed experts and a gated shared expert in every layer."""

from typing import Any, ClassVar

from torch import Tensor

from oddrank.checkpoint.config import ConfigView
from oddrank.families.experts import Experts as ExpertSizes
from oddrank.runtime.layers.kernels import Rows
from oddrank.runtime.models.build import Build
from oddrank.runtime.models.config import Defaults, ModelConfig
from oddrank.runtime.models.llama import FeedForward, GatedMLP
from oddrank.runtime.models.mixtral import Router, SparseMoE
from oddrank.runtime.models.qwen3_5 import HybridConfig, Qwen3_5
from oddrank.runtime.parallel.partial import Partial


class Qwen3_5MoEConfig(HybridConfig, frozen=True):  # noqa: N801 (its name)
    sizes: ExpertSizes

    @classmethod
    def values(cls, view: ConfigView, defaults: Defaults) -> dict[str, Any]:
        return super().values(view, defaults) | {"sizes": ExpertSizes.of(view)}


class SharedExpert(GatedMLP):
    """An expert for every token, scaled by sigmoid(gate(x)). The scale goes in before down_proj, which is linear, so
    that what comes out is still a term of the sum."""

    def __init__(self, b: Build, at: str) -> None:
        super().__init__(b, f"{at}.shared_expert", bias=False, axis="shared")
        self.gate = b.exact_weights.linear([Rows(f"{at}.shared_expert_gate", 1)], b.config.hidden)

    def __call__(self, x: Tensor) -> Partial:
        return self.down_proj(self.act(self.gate_up_proj(x), self.gate(x)))


class Qwen3_5MoE(Qwen3_5):  # noqa: N801 (its name)
    CONFIG: ClassVar[type[ModelConfig]] = Qwen3_5MoEConfig

    def mlp(self, b: Build, layer: int) -> FeedForward:
        assert isinstance(b.config, Qwen3_5MoEConfig)
        at, sizes = f"{b.prefix}layers.{layer}.mlp", b.config.sizes
        return SparseMoE(b, at, Router(b, f"{at}.gate", sizes), sizes, SharedExpert(b, at))
