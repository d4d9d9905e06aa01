"""Pieces of the hybrid Qwen families: gated delta net layers, gated attention, mixture of experts, MTP, vision."""

from __future__ import annotations

import msgspec

from oddrank.checkpoint.config import ConfigView
from oddrank.errors import OddrankError
from oddrank.families.decoder import Index, gated_mlp, linear, norm
from oddrank.geometry import Along, Axis, Concat, Pair, Role, State, Whole

FULL, LINEAR = "full_attention", "linear_attention"


def layers_of(c: ConfigView) -> dict[str, tuple[int, ...]]:
    """Layer numbers by type, from `layer_types` or `full_attention_interval` (every fourth layer by default)."""
    count = c.require_int("num_hidden_layers")
    kinds = [str(k) for k in c.get_list("layer_types")]
    if not kinds:
        every = c.get_int("full_attention_interval", 4)
        kinds = [LINEAR if (i + 1) % every else FULL for i in range(count)]
    if len(kinds) != count or set(kinds) - {FULL, LINEAR}:
        raise c.error("layer_types", f"{count} of {FULL} and {LINEAR}", kinds)
    return {kind: tuple(i for i, k in enumerate(kinds) if k == kind) for kind in (FULL, LINEAR)}


class DeltaNet(msgspec.Struct, frozen=True):
    """Sizes of a gated delta net: heads, widths, the convolution's kernel."""

    k_heads: int
    v_heads: int
    k_width: int
    v_width: int
    kernel: int

    @classmethod
    def of(cls, c: ConfigView) -> DeltaNet:
        k, v = c.require_int("linear_num_key_heads"), c.require_int("linear_num_value_heads")
        if v % k:
            raise OddrankError(
                f"{c.file}: {k} GDN key heads do not divide {v} value heads, so which value head reads which key "
                "head is undefined. Check linear_num_key_heads and linear_num_value_heads."
            )
        return cls(
            k,
            v,
            c.require_int("linear_key_head_dim"),
            c.require_int("linear_value_head_dim"),
            c.get_int("linear_conv_kernel_dim", 4),
        )

    def axes(self) -> tuple[Axis, Axis]:
        return Axis("gdn_v_heads", self.v_heads, "heads"), Axis("gdn_k_heads", self.k_heads, "heads", summed=False)

    def pair(self) -> Pair:
        return Pair("gdn_v_heads", "gdn_k_heads")

    def states(self, layers: int) -> tuple[State, ...]:
        """fp32 recurrent matrix per value head."""
        return (State("gdn_v_heads", layers, self.k_width * self.v_width * 4),)

    def roles(self, at: str, hidden: int, index: Index) -> list[Role]:
        """`in_proj_qkv` is q|k|v, each section cut by itself; the convolution runs over the same channels."""
        k, v = Along("gdn_k_heads", self.k_width), Along("gdn_v_heads", self.v_width)
        qkv, head = Concat((k, k, v)), Along("gdn_v_heads")
        h = Whole(hidden)
        return [
            *linear(f"{at}.in_proj_qkv", qkv, h, "column", index),
            *linear(f"{at}.in_proj_z", v, h, "column", index),
            *linear(f"{at}.in_proj_b", head, h, "column", index),
            *linear(f"{at}.in_proj_a", head, h, "column", index),
            Role(f"{at}.conv1d.weight", (qkv, Whole(1), Whole(self.kernel)), "column", index),
            Role(f"{at}.A_log", (head,), "column", index),
            Role(f"{at}.dt_bias", (head,), "column", index),
            norm(f"{at}.norm", self.v_width, index),
            *linear(f"{at}.out_proj", h, v, "row", index),
        ]


def gated_attention(at: str, hidden: int, head_dim: int, index: Index, bias: bool) -> list[Role]:
    """Attention whose q_proj rows are per head `[query | output gate]`, with a norm on every query and key head."""
    q, kv, h = Along("q_heads", 2 * head_dim), Along("kv_heads", head_dim), Whole(hidden)
    return [
        *linear(f"{at}.q_proj", q, h, "column", index, bias),
        *linear(f"{at}.k_proj", kv, h, "column", index, bias),
        *linear(f"{at}.v_proj", kv, h, "column", index, bias),
        *linear(f"{at}.o_proj", h, Along("q_heads", head_dim), "row", index, bias),
        norm(f"{at}.q_norm", head_dim, index),
        norm(f"{at}.k_norm", head_dim, index),
    ]


class Experts(msgspec.Struct, frozen=True):
    """Sizes of a mixture of experts with a shared expert."""

    count: int
    chosen: int
    width: int
    shared: int

    @classmethod
    def of(cls, c: ConfigView) -> Experts:
        count = c.require_int("num_experts")
        chosen = c.require_int("num_experts_per_tok", high=count)
        return cls(
            count,
            chosen,
            c.require_int("moe_intermediate_size"),
            c.require_int("shared_expert_intermediate_size"),
        )

    def axes(self) -> tuple[Axis, ...]:
        return (
            Axis("experts", self.count, "experts", summed=False),
            Axis("moe", self.width, "width"),
            Axis("shared", self.shared, "width"),
        )

    def roles(self, at: str, hidden: int, index: Index, choice: str) -> list[Role]:
        """Router and shared gate on every rank; experts cut inside, stacked in one tensor or stored one by one."""
        h, width = Whole(hidden), Along("moe")
        work = self.chosen / self.count
        stacked = (choice, "stacked")
        separate = (choice, "separate")
        each: Index = (*index, ("expert", tuple(range(self.count))))
        experts = f"{at}.experts"
        one = [
            msgspec.structs.replace(r, either=separate, work=work)
            for r in gated_mlp(f"{experts}.{{expert}}", hidden, "moe", each)
        ]
        return [
            Role(f"{at}.gate.weight", (Along("experts"), h), "replicated", index, matrix=True, work=1.0),
            Role(f"{at}.shared_expert_gate.weight", (Whole(1), h), "replicated", index, matrix=True, work=1.0),
            *gated_mlp(f"{at}.shared_expert", hidden, "shared", index),
            *one,
            Role(
                f"{experts}.gate_up_proj",
                (Along("experts"), Concat((width, width)), h),
                "column",
                index,
                matrix=True,
                work=work,
                either=stacked,
            ),
            Role(
                f"{experts}.down_proj",
                (Along("experts"), h, width),
                "row",
                index,
                matrix=True,
                work=work,
                either=stacked,
            ),
        ]


def in_group(roles: list[Role], group: str) -> list[Role]:
    """Roles of a part that a checkpoint has completely or not at all."""
    return [msgspec.structs.replace(r, group=group) for r in roles]


def vision_tower(c: ConfigView, prefix: str) -> list[Role]:
    """The Qwen3-VL vision tower, replicated on every rank and passed through: 12 tensors a block and 9 around them."""
    view = c.child("vision_config")
    if view is None:
        return []
    depth, h = view.require_int("depth"), view.require_int("hidden_size")
    mlp, out = view.require_int("intermediate_size"), view.require_int("out_hidden_size")
    patch, time = view.get_int("patch_size", 16), view.get_int("temporal_patch_size", 2)
    merged = h * view.get_int("spatial_merge_size", 2) ** 2
    index: Index = (("block", tuple(range(depth))),)
    block = f"{prefix}blocks.{{block}}"

    def both(name: str, shape: tuple[int, ...], at: Index = ()) -> list[Role]:
        weight = Role(f"{name}.weight", tuple(Whole(n) for n in shape), "replicated", at, matrix=len(shape) == 2)
        return [weight, Role(f"{name}.bias", (Whole(shape[0]),), "replicated", at)]

    roles = [
        *both(f"{prefix}patch_embed.proj", (h, view.get_int("in_channels", 3), time, patch, patch)),
        Role(
            f"{prefix}pos_embed.weight",
            (Whole(view.get_int("num_position_embeddings", 2304)), Whole(h)),
            "replicated",
        ),
        *both(f"{block}.norm1", (h,), index),
        *both(f"{block}.norm2", (h,), index),
        *both(f"{block}.attn.qkv", (3 * h, h), index),
        *both(f"{block}.attn.proj", (h, h), index),
        *both(f"{block}.mlp.linear_fc1", (mlp, h), index),
        *both(f"{block}.mlp.linear_fc2", (h, mlp), index),
        *both(f"{prefix}merger.norm", (h,)),
        *both(f"{prefix}merger.linear_fc1", (merged, merged)),
        *both(f"{prefix}merger.linear_fc2", (out, merged)),
    ]
    return in_group(roles, "vision")
