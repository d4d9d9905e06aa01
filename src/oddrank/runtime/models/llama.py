"""Llama (Touvron et al., 2023, arXiv 2302.13971), and the blocks that its relatives are made of.

Every half of a block ends in one `Partial` and one reduce.
"""

from typing import ClassVar

import torch
from torch import Tensor

from oddrank.runtime.cache import KVCache
from oddrank.runtime.layers.attention import Attention, HeadMap, RotaryAttention
from oddrank.runtime.layers.gated import GatedUnit
from oddrank.runtime.layers.kernels import Rows
from oddrank.runtime.layers.linear import MergedColumnParallelLinear, RowParallelLinear
from oddrank.runtime.layers.module import Module, Parameter
from oddrank.runtime.layers.residual import Residual
from oddrank.runtime.layers.rotary import Rotary, RotaryEmbedding
from oddrank.runtime.layers.vocab import ParallelLMHead, VocabParallelEmbedding
from oddrank.runtime.models.build import Build
from oddrank.runtime.models.config import Defaults, ModelConfig
from oddrank.runtime.parallel.partial import Partial
from oddrank.runtime.step import Step


class Mixer(Module):
    """What mixes tokens in a block: attention, or something in its place."""

    def __call__(self, x: Tensor, rotary: Rotary, step: Step, cache: KVCache) -> Partial:
        raise NotImplementedError


class FeedForward(Module):
    """What works on every token by itself in a block."""

    def __call__(self, x: Tensor) -> Partial:
        raise NotImplementedError


class SelfAttention(Mixer):
    """Grouped-query attention; biases, per-head norms and a sink a query head where a family has them."""

    def __init__(
        self, b: Build, layer: int, *, qkv_bias: bool, o_bias: bool, qk_norm: bool = False, sinks: bool = False
    ) -> None:
        c, dtype, at = b.config, b.precision.activations, f"{b.prefix}layers.{layer}.self_attn"
        self.q_heads, self.kv_heads, self.dim = b.slice.count("q_heads"), b.slice.count("kv_heads"), c.head_dim
        self._split, self._all_heads = [self.q_heads, 2 * self.kv_heads], self.q_heads + 2 * self.kv_heads
        q, kv = self.q_heads * c.head_dim, self.kv_heads * c.head_dim
        parts = [Rows(f"{at}.q_proj", q), Rows(f"{at}.k_proj", kv), Rows(f"{at}.v_proj", kv)]
        self.qkv_proj = MergedColumnParallelLinear(b.weights, parts, c.hidden, bias=qkv_bias, dtype=dtype)
        self.o_proj = RowParallelLinear(
            b.weights, f"{at}.o_proj", c.hidden, q, b.group,
            bias_owner=b.owns(f"{at}.o_proj.bias", o_bias), dtype=dtype,
        )  # fmt: skip
        heads = HeadMap(b.slice.partner("q_heads"), self.kv_heads, b.group.device)
        self.attention = RotaryAttention(
            Attention(heads, layer, c.head_dim**-0.5, c.windows[layer]),
            b.norm(f"{at}.q_norm", c.head_dim) if qk_norm else None,
            b.norm(f"{at}.k_norm", c.head_dim) if qk_norm else None,
            Parameter([(f"{at}.sinks", self.q_heads)], (), dtype) if sinks else None,
        )

    def __call__(self, x: Tensor, rotary: Rotary, step: Step, cache: KVCache) -> Partial:
        heads = self.qkv_proj(x).view(len(x), self._all_heads, self.dim)
        q, kv = torch.split_with_sizes(heads, self._split, 1)
        return self.o_proj(self.attention(q, kv, rotary, step, cache))


class GatedMLP(FeedForward):
    """down(act(gate(x)) * up(x)). times: channels to each element of the axis."""

    def __init__(self, b: Build, at: str, *, bias: bool, axis: str = "mlp", times: int = 1) -> None:
        c, dtype, width = b.config, b.precision.activations, times * b.slice.count(axis)
        parts = [Rows(f"{at}.gate_proj", width), Rows(f"{at}.up_proj", width)]
        self.gate_up_proj = MergedColumnParallelLinear(b.weights, parts, c.hidden, bias=bias, dtype=dtype)
        self.down_proj = RowParallelLinear(
            b.weights, f"{at}.down_proj", c.hidden, width, b.group,
            bias_owner=b.owns(f"{at}.down_proj.bias", bias), dtype=dtype,
        )  # fmt: skip
        self.act = GatedUnit(c.activation)

    def __call__(self, x: Tensor) -> Partial:
        return self.down_proj(self.act(self.gate_up_proj(x)))


class Block(Module):
    def __init__(self, b: Build, layer: int, attention: Mixer, mlp: FeedForward) -> None:
        at = f"{b.prefix}layers.{layer}"
        self.input_layernorm = b.norm(f"{at}.input_layernorm", b.config.hidden)
        self.self_attn = attention
        self.post_attention_layernorm = b.norm(f"{at}.post_attention_layernorm", b.config.hidden)
        self.mlp = mlp

    def __call__(self, h: Residual, rotary: Rotary, step: Step, cache: KVCache) -> Residual:
        h += self.self_attn(h.normed(self.input_layernorm), rotary, step, cache).reduce()
        h += self.mlp(h.normed(self.post_attention_layernorm)).reduce()
        return h


class Llama(Module):
    """A decoder: embedding, blocks, norm, head. A family that differs overrides `attention` or `mlp`."""

    DEFAULTS: ClassVar[Defaults] = Defaults(max_positions=2048)
    CONFIG: ClassVar[type[ModelConfig]] = ModelConfig
    WITHOUT: ClassVar[tuple[str, ...]] = ()
    """Optional parts of a checkpoint that the model does not run."""

    def __init__(self, b: Build) -> None:
        c = b.config
        self.config, self.group, self.precision = c, b.group, b.precision
        self.kv_heads = b.slice.count("kv_heads")
        self.embed_tokens = VocabParallelEmbedding(
            b.weights, f"{b.prefix}embed_tokens", b.slice.source("vocab"), c.hidden, b.group, b.precision
        )
        self.layers = [Block(b, i, self.attention(b, i), self.mlp(b, i)) for i in range(c.layers)]
        self.norm = b.norm(f"{b.prefix}norm", c.hidden)
        self.lm_head = ParallelLMHead(
            b.weights, "lm_head", b.slice.source("vocab"), c.hidden, c.vocab, b.group, b.precision,
            tied=self.embed_tokens if c.tied else None,
        )  # fmt: skip
        self.rotary = RotaryEmbedding(c.rope, c.rotary, c.max_positions, b.precision.activations, b.group.device)

    def attention(self, b: Build, layer: int) -> Mixer:
        return SelfAttention(b, layer, qkv_bias=b.config.attention_bias, o_bias=b.config.attention_bias)

    def mlp(self, b: Build, layer: int) -> FeedForward:
        return GatedMLP(b, f"{b.prefix}layers.{layer}.mlp", bias=b.config.mlp_bias)

    def new_cache(self, slots: int) -> KVCache:
        """An empty cache for `slots` sequences at a time."""
        c = self.config
        return KVCache(c.layers, slots, self.kv_heads, c.head_dim, self.precision.cache, self.group.device)

    def __call__(self, step: Step, cache: KVCache) -> Tensor:
        """The step's tokens through every block, and into the cache: hidden states [tokens, hidden], normed."""
        cache.begin(step)
        return self.run_blocks(self.embed(step.tokens), step, cache)

    def embed(self, tokens: Tensor) -> Tensor:
        """int64 [tokens] -> hidden states [tokens, hidden]."""
        return self.embed_tokens(tokens).reduce()

    def run_blocks(self, hidden: Tensor, step: Step, cache: KVCache) -> Tensor:
        """`embed`'s hidden states, which are overwritten, through every block; the cache has begun the step."""
        rotary = self.rotary(step.positions, step.sequences)
        h = Residual(hidden)
        for layer in self.layers:
            h = layer(h, rotary, step, cache)
        return h.normed(self.norm)

    def logits(self, hidden: Tensor) -> Tensor:
        """[tokens, hidden] -> [tokens, vocab], the same on every rank."""
        return self.lm_head(hidden)


@torch.inference_mode()
def full_logits(model: Llama, tokens: list[int]) -> Tensor:
    """Logits at every position of one sequence, [tokens, vocab], in one step."""
    cache = model.new_cache(1)
    return model.logits(model(Step.of([(0, tokens, 0)], model.group.device), cache))
