"""A norm over all heads, cut over ranks: copies count once, dummies not at all, the real width divides (traps: 8)."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from oddrank.errors import OddrankError
from oddrank.runtime.layers.norm import RMSNormAcrossRanks
from oddrank.runtime.parallel import Group, LocalGroup

HEADS, DIM, EPS = 5, 4, 1e-3
LAYOUTS = {
    "even": [[0, 1, 2, 3, 4]],
    "ragged": [[0, 1, 2], [3, 4]],
    "copies, dummies, a rank with none": [[3, -1, 0], [], [0, 4, -1], [2, 0, 1, 4]],
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_the_norm_of_the_whole(name: str, dtype: torch.dtype) -> None:
    layout, rng = LAYOUTS[name], np.random.default_rng(3)
    x, weight = rng.standard_normal((6, HEADS, DIM)) * 3, rng.standard_normal((HEADS, DIM))
    want = x / np.sqrt((x**2).mean((1, 2), keepdims=True) + EPS) * weight

    def rank(group: Group) -> tuple[np.ndarray, int]:
        source = np.array(layout[group.rank], dtype=np.int64)
        norm = RMSNormAcrossRanks("n", source, HEADS, DIM, EPS, dtype, group)
        norm.weight.fill(torch.from_numpy(np.where(source[:, None] < 0, 0, weight[source])).flatten().to(dtype))
        mine = torch.from_numpy(np.where(source[:, None] < 0, 0, x[:, source])).flatten(1).to(dtype)
        before = group.counts.all_reduce
        out = norm(mine).view(6, len(source), DIM).double().numpy()
        return out, group.counts.all_reduce - before

    for heads, (out, reduces) in zip(layout, LocalGroup.run(len(layout), rank), strict=True):
        assert reduces == 1
        for slot, head in enumerate(heads):
            wanted = want[:, head] if head >= 0 else 0 * want[:, 0]
            assert np.abs(out[:, slot] - wanted).max() < (1e-13 if dtype == torch.float64 else 1e-5)


def test_a_head_on_no_rank_is_refused() -> None:
    def rank(group: Group) -> None:
        RMSNormAcrossRanks("n", np.array([[0, 1], [2, 4]][group.rank]), HEADS, DIM, EPS, torch.float64, group)

    with pytest.raises(OddrankError, match="n: head 3 of 5 is on no rank"):
        LocalGroup.run(2, rank)
