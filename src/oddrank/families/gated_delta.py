"""Pieces of the hybrid Qwen families: which layers are gated delta nets, their tensors, the vision tower."""

from __future__ import annotations

import msgspec

from oddrank.checkpoint.config import ConfigView
from oddrank.errors import OddrankError
from oddrank.families.decoder import Index, Part, in_group, linear, norm
from oddrank.geometry import Along, Axis, Concat, Pair, Role, State, Whole

FULL, LINEAR = "full_attention", "linear_attention"


def layers_of(c: ConfigView) -> dict[str, tuple[int, ...]]:
    """Layer numbers by type, from `layer_types` or `full_attention_interval` (every fourth layer by default)."""
    count = c.count("num_hidden_layers")
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

    def part(self, at: str, hidden: int, index: Index) -> Part:
        """Its axes, its fp32 recurrent matrix per value head, and its tensors."""
        return Part(
            roles=self.roles(at, hidden, index),
            axes=(
                Axis("gdn_v_heads", self.v_heads, "heads"),
                Axis("gdn_k_heads", self.k_heads, "heads", summed=False),
            ),
            pairs=(Pair("gdn_v_heads", "gdn_k_heads"),),
            states=(State("gdn_v_heads", len(index[0][1]), self.k_width * self.v_width * 4),),
            config_axes=(("linear_num_key_heads", "gdn_k_heads"), ("linear_num_value_heads", "gdn_v_heads")),
        )

    def roles(self, at: str, hidden: int, index: Index) -> list[Role]:
        """The convolution runs over q|k|v, each section cut by itself."""
        k, v, head = Along("gdn_k_heads", self.k_width), Along("gdn_v_heads", self.v_width), Along("gdn_v_heads")
        return [
            *self.projections(at, hidden, index),
            Role(f"{at}.conv1d.weight", (Concat((k, k, v)), Whole(1), Whole(self.kernel)), "column", index),
            Role(f"{at}.A_log", (head,), "column", index),
            Role(f"{at}.dt_bias", (head,), "column", index),
            norm(f"{at}.norm", self.v_width, index),
            *linear(f"{at}.out_proj", Whole(hidden), v, "row", index),
        ]

    def projections(self, at: str, hidden: int, index: Index) -> list[Role]:
        k, v, head = Along("gdn_k_heads", self.k_width), Along("gdn_v_heads", self.v_width), Along("gdn_v_heads")
        h = Whole(hidden)
        return [
            *linear(f"{at}.in_proj_qkv", Concat((k, k, v)), h, "column", index),
            *linear(f"{at}.in_proj_z", v, h, "column", index),
            *linear(f"{at}.in_proj_b", head, h, "column", index),
            *linear(f"{at}.in_proj_a", head, h, "column", index),
        ]


def vision_tower(c: ConfigView, prefix: str) -> list[Role]:
    """The Qwen3-VL vision tower, replicated on every rank and passed through: 12 tensors a block and 9 around them."""
    view = c.child("vision_config")
    if view is None:
        return []
    depth, h = view.count("depth"), view.require_int("hidden_size")
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
