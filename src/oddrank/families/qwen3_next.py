"""Qwen3-Next: the hybrid decoder with experts in every layer, whose gated delta nets store their projections
interleaved: per key head `[q, k, its values, their z]` in one tensor, `[their b, their a]` in another."""

from __future__ import annotations

from oddrank.checkpoint.config import ConfigView
from oddrank.families.base import Family
from oddrank.families.decoder import Index, linear
from oddrank.families.gated_delta import DeltaNet
from oddrank.families.hybrid import PREFIXES, hybrid
from oddrank.geometry import Along, Groups, Model, Role, Whole


class InterleavedDeltaNet(DeltaNet, frozen=True):
    def projections(self, at: str, hidden: int, index: Index) -> list[Role]:
        k, v = Along("gdn_k_heads", self.k_width), Along("gdn_v_heads", self.v_width)
        head, h = Along("gdn_v_heads"), Whole(hidden)
        return [
            *linear(f"{at}.in_proj_qkvz", Groups("gdn_k_heads", (k, k, v, v)), h, "column", index),
            *linear(f"{at}.in_proj_ba", Groups("gdn_k_heads", (head, head)), h, "column", index),
        ]


def build(c: ConfigView, prefix: str) -> Model:
    return hybrid(c, prefix, "qwen3_next", experts=True, net=InterleavedDeltaNet)


FAMILY = Family("qwen3_next", ("qwen3_next",), build, prefixes=PREFIXES)
