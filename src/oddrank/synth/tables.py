"""Tensor tables: the name and shape of every logical tensor of a model, in its dense names.

Written out from the published checkpoints, and on purpose not from oddrank.families: comparing the two is what a
coverage test does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import NamedTuple

from oddrank.synth.sizes import Dense, Drafter, Hybrid

Shape = tuple[int, ...]


class Logical(NamedTuple):
    """name: its dense name. kind: what it is, which decides its values and, in a quantized release, its storage.
    file: where releases with a file per layer keep it."""

    name: str
    shape: Shape
    kind: str
    file: str


def hybrid_table(
    size: Hybrid, *, wrapped: bool, stacked: bool, mtp_stacked: bool, vision: bool, interleaved: bool = False
) -> Iterator[Logical]:
    """Qwen3.5 / 3.6 / 3.8, dense or MoE, and Qwen3-Next, with its MTP layer.

    wrapped: inside a vision-language model. stacked, mtp_stacked: a layer's experts in two tensors, or each by itself.
    interleaved: the projections of a delta net in two tensors, key head by key head.
    """
    at = "model.language_model" if wrapped else "model"
    h = size.hidden
    yield Logical(f"{at}.embed_tokens.weight", (size.vocab, h), "embedding", "outside")
    for i in range(size.layers):
        full = (i + 1) % 4 == 0
        if full:
            yield from _gated_attention(size, f"{at}.layers.{i}", f"layers-{i}")
        else:
            yield from _delta_net(size, f"{at}.layers.{i}", f"layers-{i}", interleaved)
        yield from _feed_forward(size, f"{at}.layers.{i}", f"layers-{i}", stacked)
    yield Logical(f"{at}.norm.weight", (h,), "shifted_norm", "outside")
    if not size.tied:
        yield Logical("lm_head.weight", (size.vocab, h), "lm_head", "outside")
    yield Logical("mtp.fc.weight", (h, 2 * h), "mtp_fc", "mtp")
    yield from _gated_attention(size, "mtp.layers.0", "mtp")
    yield from _feed_forward(size, "mtp.layers.0", "mtp", mtp_stacked)
    for norm in ("norm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"):
        yield Logical(f"mtp.{norm}.weight", (h,), "shifted_norm", "mtp")
    if vision:
        yield from _vision(size)


def _gated_attention(size: Hybrid, at: str, file: str) -> Iterator[Logical]:
    h, d = size.hidden, size.head_dim
    q, kv = size.q_heads * d, size.kv_heads * d
    yield Logical(f"{at}.self_attn.q_proj.weight", (2 * q, h), "attention", file)
    yield Logical(f"{at}.self_attn.k_proj.weight", (kv, h), "attention", file)
    yield Logical(f"{at}.self_attn.v_proj.weight", (kv, h), "attention", file)
    yield Logical(f"{at}.self_attn.o_proj.weight", (h, q), "attention", file)
    yield Logical(f"{at}.self_attn.q_norm.weight", (d,), "shifted_norm", file)
    yield Logical(f"{at}.self_attn.k_norm.weight", (d,), "shifted_norm", file)


def _delta_net(size: Hybrid, at: str, file: str, interleaved: bool) -> Iterator[Logical]:
    h, d = size.hidden, size.gdn_width
    k, v, heads = size.gdn_k_heads * d, size.gdn_v_heads * d, size.gdn_v_heads
    if interleaved:
        yield Logical(f"{at}.linear_attn.in_proj_qkvz.weight", (k + k + v + v, h), "delta_net", file)
        yield Logical(f"{at}.linear_attn.in_proj_ba.weight", (heads + heads, h), "delta_net_gate", file)
    else:
        yield Logical(f"{at}.linear_attn.in_proj_qkv.weight", (k + k + v, h), "delta_net", file)
        yield Logical(f"{at}.linear_attn.in_proj_z.weight", (v, h), "delta_net", file)
        yield Logical(f"{at}.linear_attn.in_proj_b.weight", (heads, h), "delta_net_gate", file)
        yield Logical(f"{at}.linear_attn.in_proj_a.weight", (heads, h), "delta_net_gate", file)
    yield Logical(f"{at}.linear_attn.conv1d.weight", (k + k + v, 1, 4), "conv", file)
    yield Logical(f"{at}.linear_attn.A_log", (heads,), "A_log", file)
    yield Logical(f"{at}.linear_attn.dt_bias", (heads,), "dt_bias", file)
    yield Logical(f"{at}.linear_attn.norm.weight", (d,), "gated_norm", file)
    yield Logical(f"{at}.linear_attn.out_proj.weight", (h, v), "delta_net", file)


def _feed_forward(size: Hybrid, at: str, file: str, stacked: bool) -> Iterator[Logical]:
    h = size.hidden
    if size.mlp is not None:
        yield from gated_mlp(f"{at}.mlp", size.mlp, h, "mlp", file)
    else:
        yield Logical(f"{at}.mlp.gate.weight", (size.experts, h), "router", file)
        yield Logical(f"{at}.mlp.shared_expert_gate.weight", (1, h), "shared_gate", file)
        yield from gated_mlp(f"{at}.mlp.shared_expert", size.shared, h, "shared", file)
        if stacked:
            yield Logical(f"{at}.mlp.experts.gate_up_proj", (size.experts, 2 * size.moe, h), "stacked", file)
            yield Logical(f"{at}.mlp.experts.down_proj", (size.experts, h, size.moe), "stacked", file)
        else:
            for e in range(size.experts):
                yield from gated_mlp(f"{at}.mlp.experts.{e}", size.moe, h, "expert", file)
    yield Logical(f"{at}.input_layernorm.weight", (h,), "shifted_norm", file)
    yield Logical(f"{at}.post_attention_layernorm.weight", (h,), "shifted_norm", file)


def gated_mlp(
    at: str,
    width: int,
    h: int,
    kind: str,
    file: str,
    names: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Iterator[Logical]:
    gate, up, down = names
    yield Logical(f"{at}.{gate}.weight", (width, h), kind, file)
    yield Logical(f"{at}.{up}.weight", (width, h), kind, file)
    yield Logical(f"{at}.{down}.weight", (h, width), kind, file)


def _vision(size: Hybrid) -> Iterator[Logical]:
    tower = size.vision
    h, mlp, merged, at = tower.hidden, tower.mlp, 4 * tower.hidden, "model.visual"

    def linear(name: str, shape: Shape) -> Iterator[Logical]:
        yield Logical(f"{at}.{name}.weight", shape, "vision", "outside")
        yield Logical(f"{at}.{name}.bias", (shape[0],), "bias", "outside")

    def norm(name: str) -> Iterator[Logical]:
        yield Logical(f"{at}.{name}.weight", (h,), "norm", "outside")
        yield Logical(f"{at}.{name}.bias", (h,), "bias", "outside")

    yield from linear("patch_embed.proj", (h, 3, 2, 16, 16))
    yield Logical(f"{at}.pos_embed.weight", (2304, h), "vision", "outside")
    for b in range(tower.depth):
        yield from norm(f"blocks.{b}.norm1")
        yield from norm(f"blocks.{b}.norm2")
        yield from linear(f"blocks.{b}.attn.qkv", (3 * h, h))
        yield from linear(f"blocks.{b}.attn.proj", (h, h))
        yield from linear(f"blocks.{b}.mlp.linear_fc1", (mlp, h))
        yield from linear(f"blocks.{b}.mlp.linear_fc2", (h, mlp))
    yield from norm("merger.norm")
    yield from linear("merger.linear_fc1", (merged, merged))
    yield from linear("merger.linear_fc2", (size.hidden, merged))


def dense_table(
    size: Dense, *, qkv_bias: bool = False, qk_norm: bool = False, fused: bool = False
) -> Iterator[Logical]:
    """Llama, Mistral, Qwen2 and Seed-OSS (qkv_bias), Qwen3 (qk_norm) and Phi-3 (fused: q|k|v and gate|up in one tensor
    each)."""
    yield Logical("model.embed_tokens.weight", (size.vocab, size.hidden), "embedding", "outside")
    for i in range(size.layers):
        layer = _dense_layer(size, f"model.layers.{i}", f"layers-{i}", qkv_bias, qk_norm)
        yield from _fused(layer) if fused else layer
    yield Logical("model.norm.weight", (size.hidden,), "norm", "outside")
    if not size.tied:
        yield Logical("lm_head.weight", (size.vocab, size.hidden), "lm_head", "outside")


def _dense_layer(size: Dense | Drafter, at: str, file: str, qkv_bias: bool, qk_norm: bool) -> Iterator[Logical]:
    h, d = size.hidden, size.head_dim
    q, kv = size.q_heads * d, size.kv_heads * d
    for name, rows in (("q_proj", q), ("k_proj", kv), ("v_proj", kv)):
        yield Logical(f"{at}.self_attn.{name}.weight", (rows, h), "attention", file)
        if qkv_bias:
            yield Logical(f"{at}.self_attn.{name}.bias", (rows,), "bias", file)
    yield Logical(f"{at}.self_attn.o_proj.weight", (h, q), "attention", file)
    if qk_norm:
        yield Logical(f"{at}.self_attn.q_norm.weight", (d,), "norm", file)
        yield Logical(f"{at}.self_attn.k_norm.weight", (d,), "norm", file)
    yield from gated_mlp(f"{at}.mlp", size.mlp, h, "mlp", file)
    yield Logical(f"{at}.input_layernorm.weight", (h,), "norm", file)
    yield Logical(f"{at}.post_attention_layernorm.weight", (h,), "norm", file)


def _fused(layer: Iterable[Logical]) -> Iterator[Logical]:
    """A layer with its q, k and v one after another in one tensor, and its gate and up."""
    by_leaf = {t.name.split(".")[-2]: t for t in layer}
    for parts, fused in ((("q_proj", "k_proj", "v_proj"), "qkv_proj"), (("gate_proj", "up_proj"), "gate_up_proj")):
        first, rows = by_leaf[parts[0]], sum(by_leaf.pop(p).shape[0] for p in parts)
        yield Logical(first.name.replace(parts[0], fused), (rows, *first.shape[1:]), first.kind, first.file)
    yield from by_leaf.values()


def drafter_table(size: Drafter) -> Iterator[Logical]:
    """DFlash2: Qwen3 layers without a prefix, two grouped convolutions a layer over the hidden stream, the mixer of
    the target's hidden states, and a selector with two codebooks over the vocabulary. The embedding and the head are
    the target's."""
    h = size.hidden
    # before and after the sublayer, per tap of the kernel and group of channels
    mixes = 2 * size.conv_kernel * (h // size.conv_group)
    yield Logical("candidate_selector.hidden_projection.weight", (size.selector_rank, h), "selector", "outside")
    yield Logical("candidate_selector.predecessor_codebook", (size.vocab, size.selector_rank), "selector", "outside")
    yield Logical("candidate_selector.successor_codebook", (size.vocab, size.selector_rank), "selector", "outside")
    yield Logical("fc.weight", (h, len(size.taps) * h), "draft_fc", "outside")
    yield Logical("hidden_norm.weight", (h,), "norm", "outside")
    for i in range(size.layers):
        yield from _dense_layer(size, f"layers.{i}", f"layers-{i}", False, True)
        for conv in ("attention_conv", "mlp_conv"):
            at = f"layers.{i}.{conv}"
            yield Logical(f"{at}.base_kernel", (2, size.conv_kernel, h), "kernel", f"layers-{i}")
            yield Logical(f"{at}.kernel_projection.weight", (mixes, h), "kernel_projection", f"layers-{i}")
    yield Logical("norm.weight", (h,), "norm", "outside")
