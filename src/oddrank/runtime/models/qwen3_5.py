"""Qwen3.5 / 3.6 / 3.8, dense: three gated delta nets to one layer of gated attention, and a gated MLP.

Gated delta net: Yang et al., 2024, arXiv 2412.06464. Gated attention: Qiu et al., 2025, arXiv 2505.06708. Layer norms
and the norms of query and key heads multiply by 1 + weight.
"""

from typing import Any, ClassVar

import torch
from torch import Tensor

from oddrank.checkpoint.config import ConfigView
from oddrank.families.gated_delta import LINEAR, DeltaNet, layers_of
from oddrank.runtime.cache import KVCache, States
from oddrank.runtime.layers.attention import Attention, HeadMap, RotaryAttention
from oddrank.runtime.layers.delta_rule import GatedDeltaRule
from oddrank.runtime.layers.kernels import Rows
from oddrank.runtime.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from oddrank.runtime.layers.rotary import Rotary
from oddrank.runtime.models.build import Build
from oddrank.runtime.models.config import Defaults, ModelConfig
from oddrank.runtime.models.llama import FeedForward, GatedMLP, Llama, Mixer
from oddrank.runtime.parallel.partial import Partial
from oddrank.runtime.step import Step


class HybridConfig(ModelConfig, frozen=True):
    """linear: per layer, whether it is a gated delta net. key_width, value_width, kernel: of those."""

    linear: tuple[bool, ...]
    key_width: int
    value_width: int
    kernel: int

    @classmethod
    def values(cls, view: ConfigView, defaults: Defaults) -> dict[str, Any]:
        found, net = super().values(view, defaults), DeltaNet.of(view)
        linear = layers_of(view)[LINEAR]
        return found | {
            "linear": tuple(i in linear for i in range(found["layers"])),
            "key_width": net.k_width,
            "value_width": net.v_width,
            "kernel": net.kernel,
        }


class GatedAttention(Mixer):
    """Grouped-query attention whose q_proj gives each head [query | gate]; sigmoid(gate) scales the head's output."""

    def __init__(self, b: Build, c: HybridConfig, layer: int) -> None:
        at, dtype, d = f"{b.prefix}layers.{layer}.self_attn", b.precision.activations, c.head_dim
        self.q_heads, self.kv_heads, self.dim = b.slice.count("q_heads"), b.slice.count("kv_heads"), d
        q, kv = self.q_heads * d, self.kv_heads * d
        self.split = [2 * q, 2 * kv]
        self.qkv_proj = MergedColumnParallelLinear(
            b.weights, [Rows(f"{at}.q_proj", 2 * q), Rows(f"{at}.k_proj", kv), Rows(f"{at}.v_proj", kv)], c.hidden,
            bias=c.attention_bias, dtype=dtype,
        )  # fmt: skip
        self.o_proj = RowParallelLinear(
            b.weights, f"{at}.o_proj", c.hidden, q, b.group,
            bias_owner=b.owns(f"{at}.o_proj.bias", c.attention_bias), dtype=dtype,
        )  # fmt: skip
        heads = HeadMap(b.slice.partner("q_heads"), self.kv_heads, b.group.device)
        self.attention = RotaryAttention(
            Attention(heads, c.linear[:layer].count(False), d**-0.5),
            b.norm(f"{at}.q_norm", d), b.norm(f"{at}.k_norm", d),
        )  # fmt: skip

    def __call__(self, x: Tensor, rotary: Rotary, step: Step, cache: KVCache) -> Partial:
        q_gate, kv = torch.split_with_sizes(self.qkv_proj(x), self.split, -1)
        q, gate = q_gate.view(len(x), self.q_heads, 2, self.dim).unbind(2)
        kv = kv.view(len(x), 2 * self.kv_heads, self.dim)
        return self.o_proj(self.attention(q, kv, rotary, step, cache, gate))


class GatedDeltaNet(Mixer):
    """Linear attention with a state per value head. Value slot i reads the key slot that the plan names, whichever."""

    def __init__(self, b: Build, c: HybridConfig, layer: int) -> None:
        at, dtype = f"{b.prefix}layers.{layer}.linear_attn", b.precision.activations
        self.k_heads, self.v_heads = b.slice.count("gdn_k_heads"), b.slice.count("gdn_v_heads")
        self.rule = GatedDeltaRule(
            at, b.slice.partner("gdn_v_heads"), self.k_heads, (c.key_width, c.value_width), c.kernel, c.eps, dtype,
            b.group.device,
        )  # fmt: skip
        v = self.v_heads * c.value_width
        self.split = [self.rule.channels, v, self.v_heads, self.v_heads]
        rows = zip(("qkv", "z", "b", "a"), self.split, strict=True)
        self.in_proj = MergedColumnParallelLinear(
            b.weights, [Rows(f"{at}.in_proj_{name}", n) for name, n in rows], c.hidden, bias=False, dtype=dtype
        )
        self.out_proj = RowParallelLinear(
            b.weights, f"{at}.out_proj", c.hidden, v, b.group, bias_owner=None, dtype=dtype
        )
        self.layer = c.linear[:layer].count(True)

    def __call__(self, x: Tensor, rotary: Rotary, step: Step, cache: KVCache) -> Partial:
        if not self.v_heads:
            return self.out_proj(x.new_empty(len(x), 0))
        assert cache.states is not None
        qkv, z, b, a = torch.split_with_sizes(self.in_proj(x), self.split, -1)
        inputs, memory = cache.states.inputs[self.layer], cache.states.memory[self.layer]
        return self.out_proj(self.rule(qkv, z, b, a, step, inputs, memory))


class Qwen3_5(Llama):  # noqa: N801 (its name)
    DEFAULTS: ClassVar[Defaults] = Defaults(max_positions=32768, head_dim=256, partial_rotary=0.25, norm_offset=True)
    CONFIG: ClassVar[type[ModelConfig]] = HybridConfig
    WITHOUT: ClassVar[tuple[str, ...]] = ("MTP", "vision")

    def attention(self, b: Build, layer: int) -> Mixer:
        c = b.config
        assert isinstance(c, HybridConfig)
        return (GatedDeltaNet if c.linear[layer] else GatedAttention)(b, c, layer)

    def mlp(self, b: Build, layer: int) -> FeedForward:
        return GatedMLP(b, f"{b.prefix}layers.{layer}.mlp", bias=False)

    def new_cache(self, slots: int) -> KVCache:
        """Keys and values of the attention layers, states of the gated delta nets."""
        c, device = self.config, self.group.device
        assert isinstance(c, HybridConfig)
        nets = [layer.self_attn for layer in self.layers if isinstance(layer.self_attn, GatedDeltaNet)]
        states = None
        if nets:
            states = States(
                len(nets), slots, (c.kernel - 1, nets[0].rule.channels), self.precision.activations,
                (nets[0].v_heads, c.key_width, c.value_width), device,
            )  # fmt: skip
        full = c.layers - len(nets)
        return KVCache(full, slots, self.kv_heads, c.head_dim, self.precision.cache, device, states)
