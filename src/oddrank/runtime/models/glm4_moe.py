"""GLM-4.5 (2025, arXiv 2508.06471), 4.6 and 4.7: half of each head is rotated; after some dense layers, experts that
are chosen as in DeepSeek-V3, beside one for every token."""

from typing import Any, ClassVar

from torch import Tensor

from oddrank.checkpoint.config import ConfigView
from oddrank.families.experts import Experts as ExpertSizes
from oddrank.runtime.layers.module import Parameter
from oddrank.runtime.layers.routing import best_of_groups
from oddrank.runtime.models.build import Build
from oddrank.runtime.models.config import Defaults, ModelConfig
from oddrank.runtime.models.llama import FeedForward, GatedMLP, Llama, SelfAttention
from oddrank.runtime.models.mixtral import Router, SparseMoE


class Glm4MoEConfig(ModelConfig, frozen=True):
    """dense: layers before the first with experts. shared: the width of the expert for every token, in those of the
    routed ones. groups, kept_groups, normed, scale: see `best_of_groups`."""

    sizes: ExpertSizes
    qk_norm: bool
    dense: int
    shared: int
    groups: int
    kept_groups: int
    normed: bool
    scale: float

    @classmethod
    def values(cls, view: ConfigView, defaults: Defaults) -> dict[str, Any]:
        sizes = ExpertSizes.of(view, count=("n_routed_experts", "num_local_experts"))
        groups = view.get_int("n_group", 1)
        if sizes.count % groups:
            raise view.error("n_group", f"a divisor of {sizes.count} experts", groups)
        return super().values(view, defaults) | {
            "sizes": sizes,
            "qk_norm": view.get_bool("use_qk_norm", False),
            "dense": view.get_int("first_k_dense_replace", 1, low=0),
            "shared": view.get_int("n_shared_experts", 1, low=0),
            "groups": groups,
            "kept_groups": view.get_int("topk_group", 1, high=groups),
            "normed": view.get_bool("norm_topk_prob", True),
            "scale": view.get_float("routed_scaling_factor", 1.0),
        }


class GroupRouter(Router):
    """`best_of_groups`, in fp32 or wider: the correction is small beside the chances, and it decides."""

    def __init__(self, b: Build, name: str, c: Glm4MoEConfig) -> None:
        super().__init__(b, name, c.sizes, normed=c.normed, weights=b.wide_weights)
        self.config, self.dtype = c, b.wide
        self.correction = Parameter([(f"{name}.e_score_correction_bias", c.sizes.count)], (), b.wide)

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        c = self.config
        return best_of_groups(
            self.weight(x.to(self.dtype)), c.sizes.chosen, correction=self.correction.data, groups=c.groups,
            kept=c.kept_groups, normed=c.normed, scale=c.scale,
        )  # fmt: skip


class Glm4MoE(Llama):
    DEFAULTS: ClassVar[Defaults] = Defaults(max_positions=131072, partial_rotary=0.5, eps=1e-5)
    CONFIG: ClassVar[type[ModelConfig]] = Glm4MoEConfig
    WITHOUT: ClassVar[tuple[str, ...]] = ("MTP", "MTP vocabulary")

    def attention(self, b: Build, layer: int) -> SelfAttention:
        assert isinstance(b.config, Glm4MoEConfig)
        return SelfAttention(b, layer, qkv_bias=b.config.attention_bias, o_bias=False, qk_norm=b.config.qk_norm)

    def mlp(self, b: Build, layer: int) -> FeedForward:
        c, at = b.config, f"{b.prefix}layers.{layer}.mlp"
        assert isinstance(c, Glm4MoEConfig)
        if layer < c.dense:
            return GatedMLP(b, at, bias=False)
        shared = GatedMLP(b, f"{at}.shared_experts", bias=False, axis="moe", times=c.shared) if c.shared else None
        return SparseMoE(b, at, GroupRouter(b, f"{at}.gate", c), c.sizes, shared)
