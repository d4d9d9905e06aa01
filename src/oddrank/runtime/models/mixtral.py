"""Mixtral (Jiang et al., 2024, arXiv 2401.04088): Mistral with experts in place of the MLP, and what other mixtures of
experts are made of."""

from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from oddrank.checkpoint.config import ConfigView
from oddrank.errors import OddrankError
from oddrank.families.experts import NAMED, NUMBERED
from oddrank.families.experts import Experts as ExpertSizes
from oddrank.runtime.experts import Experts
from oddrank.runtime.experts.kernel import Activation
from oddrank.runtime.layers.gated import activation
from oddrank.runtime.layers.kernels import Rows
from oddrank.runtime.layers.module import Module, Parameter
from oddrank.runtime.layers.routing import most_probable
from oddrank.runtime.layers.stored import StoredFormat
from oddrank.runtime.models.build import Build
from oddrank.runtime.models.config import Defaults, ModelConfig
from oddrank.runtime.models.llama import FeedForward
from oddrank.runtime.models.mistral import Mistral
from oddrank.runtime.parallel.partial import Partial


class Router(Module):
    """Each token's experts, by softmax over all of them, and their probabilities, where `normed` made to sum to one.
    The same on every rank."""

    def __init__(
        self, b: Build, name: str, sizes: ExpertSizes, *, normed: bool = True, bias: bool = False,
        weights: StoredFormat | None = None,
    ) -> None:  # fmt: skip
        """weights: how the matrix is held, if not as `exact_weights`."""
        held = b.slice.source("experts")
        if not np.array_equal(held, np.arange(sizes.count)):
            raise OddrankError(
                f"{name}: this rank's plan has {len(held)} experts, and the router chooses among the model's "
                f"{sizes.count}, in order. Experts are cut inside, never left out, added or moved."
            )
        self.weight = (weights or b.exact_weights).linear([Rows(name, sizes.count)], b.config.hidden)
        self.bias = Parameter([(f"{name}.bias", sizes.count)], (), b.precision.activations) if bias else None
        self.chosen, self.normed = sizes.chosen, normed

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x [tokens, hidden] -> weights [tokens, chosen] in fp32 or wider, ids int64 [tokens, chosen]."""
        scores = self.weight(x, None if self.bias is None else self.bias.data)
        return most_probable(scores, self.chosen, normed=self.normed)


class SparseMoE(FeedForward):
    """Routed experts and, where a model has one, the expert for every token: terms of one sum over the ranks."""

    def __init__(
        self, b: Build, at: str, router: Router, sizes: ExpertSizes, shared: FeedForward | None = None, *,
        names: tuple[str, str, str] = NAMED, unit: Activation | None = None, biased: bool = False,
    ) -> None:  # fmt: skip
        """names: of an expert's gate, up and down projection, where they are stored one by one. unit: in place of
        act(gate) * up. biased: every expert has biases."""
        self.group, self.router = b.group, router
        self.experts = Experts(
            b.slice, f"{at}.experts", experts=sizes.count, hidden=b.config.hidden, width=b.slice.count("moe"),
            activation=activation(b.config.activation), weights=b.precision.weights, share=b.experts, names=names,
            unit=unit, adds_bias=b.owns(f"{at}.experts.down_proj_bias", biased),
        )  # fmt: skip
        self.shared_expert = shared

    def __call__(self, x: Tensor) -> Partial:
        weights, ids = self.router(x)
        routed = Partial(self.experts(x, weights, ids), self.group)
        return routed if self.shared_expert is None else routed + self.shared_expert(x)


class MixtralConfig(ModelConfig, frozen=True):
    sizes: ExpertSizes

    @classmethod
    def values(cls, view: ConfigView, defaults: Defaults) -> dict[str, Any]:
        sizes = ExpertSizes.of(view, count=("num_local_experts", "num_experts"), width="intermediate_size")
        return super().values(view, defaults) | {"sizes": sizes}


class Mixtral(Mistral):
    DEFAULTS: ClassVar[Defaults] = Defaults(max_positions=131072, sliding="all", window=None, theta=1e6, eps=1e-5)
    CONFIG: ClassVar[type[ModelConfig]] = MixtralConfig

    def mlp(self, b: Build, layer: int) -> FeedForward:
        assert isinstance(b.config, MixtralConfig)
        at, sizes = f"{b.prefix}layers.{layer}.block_sparse_moe", b.config.sizes
        return SparseMoE(b, at, Router(b, f"{at}.gate", sizes), sizes, names=NUMBERED)
