"""Qwen3.5 / 3.6 MoE: the hybrid decoder with routed experts and a gated shared expert in every layer."""

from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from oddrank.checkpoint.config import ConfigView
from oddrank.errors import OddrankError
from oddrank.families.experts import Experts as ExpertSizes
from oddrank.runtime.experts import Experts
from oddrank.runtime.layers.gated import activation
from oddrank.runtime.layers.kernels import Rows
from oddrank.runtime.layers.module import Module
from oddrank.runtime.layers.routing import most_probable
from oddrank.runtime.models.build import Build
from oddrank.runtime.models.config import Defaults, ModelConfig
from oddrank.runtime.models.llama import FeedForward, GatedMLP
from oddrank.runtime.models.qwen3_5 import HybridConfig, Qwen3_5
from oddrank.runtime.parallel.partial import Partial


class MoEConfig(HybridConfig, frozen=True):
    """experts: of a layer. chosen: by each token."""

    experts: int
    chosen: int

    @classmethod
    def values(cls, view: ConfigView, defaults: Defaults) -> dict[str, Any]:
        sizes = ExpertSizes.of(view)
        return super().values(view, defaults) | {"experts": sizes.count, "chosen": sizes.chosen}


class Router(Module):
    """Each token's experts, by softmax over all of them, and their probabilities, made to sum to one. The same on every
    rank."""

    def __init__(self, b: Build, c: MoEConfig, name: str) -> None:
        held = b.slice.source("experts")
        if not np.array_equal(held, np.arange(c.experts)):
            raise OddrankError(
                f"{name}: this rank's plan has {len(held)} experts, and the router chooses among the model's "
                f"{c.experts}, in order. Experts are cut inside, never left out, added or moved."
            )
        self.weight = b.exact_weights.linear([Rows(name, c.experts)], c.hidden)
        self.chosen = c.chosen

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [tokens, hidden] -> weights [tokens, chosen] in fp32 or wider, ids int64 [tokens, chosen]."""
        return most_probable(self.weight(x), self.chosen)


class SharedExpert(GatedMLP):
    """An expert for every token, scaled by sigmoid(gate(x)). The scale goes in before down_proj, which is linear, so
    that what comes out is still a term of the sum."""

    def __init__(self, b: Build, at: str) -> None:
        super().__init__(b, f"{at}.shared_expert", bias=False, axis="shared")
        self.gate = b.exact_weights.linear([Rows(f"{at}.shared_expert_gate", 1)], b.config.hidden)

    def __call__(self, x: Tensor) -> Partial:
        return self.down_proj(self.act(self.gate_up_proj(x), self.gate(x)))


class SparseMoE(FeedForward):
    """Routed experts and the shared one: two terms of one sum over the ranks."""

    def __init__(self, b: Build, c: MoEConfig, at: str) -> None:
        self.group = b.group
        self.router = Router(b, c, f"{at}.gate")
        self.experts = Experts(
            b.slice, f"{at}.experts", experts=c.experts, hidden=c.hidden, width=b.slice.count("moe"),
            activation=activation(c.activation), weights=b.precision.weights, share=b.experts,
        )  # fmt: skip
        self.shared_expert = SharedExpert(b, at)

    def __call__(self, x: Tensor) -> Partial:
        weights, ids = self.router(x)
        return Partial(self.experts(x, weights, ids), self.group) + self.shared_expert(x)


class Qwen3_5MoE(Qwen3_5):  # noqa: N801 (its name)
    CONFIG: ClassVar[type[ModelConfig]] = MoEConfig

    def mlp(self, b: Build, layer: int) -> FeedForward:
        assert isinstance(b.config, MoEConfig)
        return SparseMoE(b, b.config, f"{b.prefix}layers.{layer}.mlp")
