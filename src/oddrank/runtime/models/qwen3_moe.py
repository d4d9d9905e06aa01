"""Qwen3 MoE (Yang et al., 2025, arXiv 2505.09388): Qwen3 with experts in place of the MLP of all layers but some."""

from typing import Any, ClassVar

from oddrank.checkpoint.config import ConfigView
from oddrank.families.experts import Experts as ExpertSizes
from oddrank.families.experts import sparse_layers
from oddrank.runtime.models.build import Build
from oddrank.runtime.models.config import Defaults, ModelConfig
from oddrank.runtime.models.llama import FeedForward
from oddrank.runtime.models.mixtral import Router, SparseMoE
from oddrank.runtime.models.qwen3 import Qwen3


class Qwen3MoEConfig(ModelConfig, frozen=True):
    """sparse: the layers with experts. normed: whether a token's weights are made to sum to one."""

    sizes: ExpertSizes
    sparse: tuple[int, ...]
    normed: bool

    @classmethod
    def values(cls, view: ConfigView, defaults: Defaults) -> dict[str, Any]:
        _, sparse = sparse_layers(view)
        return super().values(view, defaults) | {
            "sizes": ExpertSizes.of(view),
            "sparse": sparse,
            "normed": view.get_bool("norm_topk_prob", False),
        }


class Qwen3MoE(Qwen3):
    DEFAULTS: ClassVar[Defaults] = Defaults(max_positions=32768, sliding="asked")
    CONFIG: ClassVar[type[ModelConfig]] = Qwen3MoEConfig

    def mlp(self, b: Build, layer: int) -> FeedForward:
        c, at = b.config, f"{b.prefix}layers.{layer}.mlp"
        assert isinstance(c, Qwen3MoEConfig)
        if layer not in c.sparse:
            return super().mlp(b, layer)
        return SparseMoE(b, at, Router(b, f"{at}.gate", c.sizes, normed=c.normed), c.sizes)
