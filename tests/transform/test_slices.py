"""Rank slices over all ranks are the virtual checkpoint; real regions are the source's bytes, fills the plan's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout.shapes import VARIANTS, config, plan, subject, tensor_table
from proof.random_plans import equal_plan, ragged_plan
from safetensors.numpy import save_file

from oddrank.checkpoint import Checkpoint
from oddrank.errors import OddrankError
from oddrank.layout.plan import Plan
from oddrank.transform.recipe import materialize, recipes
from oddrank.transform.slice import RankSlice, rank_slice

# by hand: stored tensor -> (dimension that is cut, axis); anything else is on every rank
CUT = {
    "q_proj.weight": (0, "q_heads"),
    "k_proj.weight": (0, "kv_heads"),
    "v_proj.weight": (0, "kv_heads"),
    "q_proj.bias": (0, "q_heads"),
    "k_proj.bias": (0, "kv_heads"),
    "v_proj.bias": (0, "kv_heads"),
    "o_proj.weight": (1, "q_heads"),
    "gate_proj.weight": (0, "mlp"),
    "up_proj.weight": (0, "mlp"),
    "gate_proj.bias": (0, "mlp"),
    "up_proj.bias": (0, "mlp"),
    "down_proj.weight": (1, "mlp"),
    "embed_tokens.weight": (0, "vocab"),
    "lm_head.weight": (0, "vocab"),
}


def cut_of(name: str) -> tuple[int, str] | None:
    return next((cut for end, cut in CUT.items() if name.endswith(end)), None)


class Words:
    """A checkpoint of random words, none of them zero."""

    def __init__(self, table: dict[str, Any], seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.words = {n: rng.integers(1, 2**16, t.shape, dtype=np.uint16) for n, t in table.items()}

    def array(self, name: str) -> Any:
        return self.words[name]


def parts(p: Plan, checkpoint: Any) -> list[dict[str, Any]]:
    found = []
    for rank in range(p.tp):
        part = RankSlice(p, checkpoint, rank)
        held = {}
        for name in part.names():
            held[name] = np.full(part.shape(name), 0xDEAD, dtype=np.uint16)
            part.read_into(name, held[name])
        found.append(held)
    return found


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32))
def test_ranks_side_by_side_are_the_virtual_checkpoint(seed: int) -> None:
    rng = np.random.default_rng(seed)
    variant = sorted(VARIANTS)[rng.integers(len(VARIANTS))]
    c = config(variant, q=9, kv=3, head_dim=4, mlp=22, vocab=300, layers=1)
    s = subject(c)
    p = equal_plan(s, rng)
    words = Words(tensor_table(c), seed)
    held = parts(p, words)
    for name, recipe in recipes(p, p.virtual()).items():
        whole = np.array(materialize(recipe, words.array(name)))
        cut = cut_of(name)
        if cut is None:
            assert all(np.array_equal(part[name], whole) for part in held)
        else:
            joined = np.concatenate([part[name] for part in held], axis=cut[0])
            if cut[1] == "vocab":  # padded in the engine's own buffers only
                assert not joined[len(whole) :].any()
                joined = joined[: len(whole)]
            assert np.array_equal(joined, whole), name


@settings(deadline=None, max_examples=60)
@given(st.integers(0, 2**32))
def test_every_real_slot_has_its_bytes_and_every_dummy_the_fill(seed: int) -> None:
    rng = np.random.default_rng(seed)
    variant = sorted(VARIANTS)[rng.integers(len(VARIANTS))]
    c = config(variant, q=8, kv=4, head_dim=4, mlp=22, vocab=40, layers=1)
    s = subject(c)
    p = ragged_plan(s, rng)
    words = Words(tensor_table(c), seed)
    seen: dict[str, int] = {}
    for rank, held in enumerate(parts(p, words)):
        part = RankSlice(p, None, rank)
        assert set(held) == set(words.words)
        for name, got in held.items():
            cut = cut_of(name)
            if cut is None:
                assert np.array_equal(got, words.array(name))
                continue
            dim, axis = cut
            source = part.source(axis)
            assert part.count(axis) == len(source)
            width = got.shape[dim] // max(1, len(source))
            for slot, element in enumerate(source.tolist()):
                local = np.moveaxis(got, dim, 0)[slot * width : (slot + 1) * width]
                if element < 0:
                    assert not local.any(), name
                else:
                    real = np.moveaxis(words.array(name), dim, 0)[element * width : (element + 1) * width]
                    assert np.array_equal(local, real), name
                    seen[name] = seen.get(name, 0) + 1
    # summed axes: each element on exactly one rank
    assert seen["model.layers.0.self_attn.o_proj.weight"] == 8
    assert seen["model.layers.0.mlp.down_proj.weight"] == 22


def test_maps_and_owners() -> None:
    s = subject(config("llama+qkv_bias+o_bias+mlp_bias", q=9, kv=3))
    p = plan(s, 2).plan
    ranks = [rank_slice(p, r) for r in range(2)]
    # the first five heads read KV heads 0 and 1, the others 1 and 2 (or the mirror image of it)
    for part in ranks:
        held = part.source("kv_heads")[part.partner("q_heads")]
        assert held.tolist() == (part.source("q_heads") // 3).tolist()
    for name in ("model.layers.0.self_attn.o_proj.bias", "model.layers.1.mlp.down_proj.bias"):
        assert [part.owns(name) for part in ranks] == [True, False]
        assert all(part.joins_sum(name) for part in ranks)
    with pytest.raises(KeyError):
        ranks[0].owns("model.norm.weight")
    assert not ranks[0].joins_sum("model.norm.weight")


def test_a_slice_from_a_file(tmp_path: Path) -> None:
    """From the mapped file, against the safetensors library's own reading of it."""
    import json

    c = config("qwen2", q=9, kv=3, head_dim=4, mlp=24, vocab=40, layers=2)
    rng = np.random.default_rng(3)
    tensors = {n: rng.standard_normal(t.shape).astype(np.float16) for n, t in tensor_table(c).items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(c))
    checkpoint = Checkpoint.open(tmp_path)
    s = subject(c, {n: checkpoint.tensors[n] for n in checkpoint.tensors})  # type: ignore[misc]
    p = plan(s, 4, "runtime", "pad").plan
    total = 0
    for rank in range(4):
        part = RankSlice(p, checkpoint, rank)
        heads = part.source("q_heads").tolist()
        name = "model.layers.1.self_attn.q_proj.weight"
        out = np.empty(part.shape(name), dtype=np.uint16)
        part.read_into(name, out)
        got = out.view(np.float16).reshape(len(heads), 4, 36)
        for slot, head in enumerate(heads):
            expected = tensors[name].reshape(9, 4, 36)[head] if head >= 0 else np.zeros((4, 36))
            assert np.array_equal(got[slot], expected)
        assert part.dtype(name) == "F16"
        assert part.nbytes() == sum(2 * int(np.prod(part.shape(n))) for n in part.names())
        total += part.nbytes()
    assert total > sum(2 * t.size for t in tensors.values())


def test_misuse() -> None:
    s = subject(config(q=9, kv=3))
    p = plan(s, 2).plan
    for rank in (-1, 2):
        with pytest.raises(OddrankError, match=r"not one of the plan's 2"):
            RankSlice(p, None, rank)
    part = RankSlice(p, None, 0)
    name = "model.layers.0.self_attn.q_proj.weight"
    with pytest.raises(OddrankError, match="no checkpoint"):
        part.read_into(name, np.empty(part.shape(name), dtype=np.uint16))
    part = RankSlice(p, Words(tensor_table(config(q=9, kv=3)), 0), 0)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="the slice is"):
        part.read_into(name, np.empty((1, 1), dtype=np.uint16))
