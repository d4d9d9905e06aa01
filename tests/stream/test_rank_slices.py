"""`oddrank.rank_slice`: the ranks' parts, put back together by the sections of each dimension, are the whole."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from formats.codec import Raw
from stream.releases import EVERY, checkpoint, plan
from stream.sections import INTERLEAVED, cut_dims, gathered, logical, matrices, parts_of, places, scale_block, widths

import oddrank
from oddrank.checkpoint import STORAGE, Checkpoint
from oddrank.layout.plan import Plan
from oddrank.transform.slice import RankSlice

Words = npt.NDArray[Any]


OTHERWISE = ("int4", "int8-ct", "gptq", "awq", "auto-round", "mxfp4-experts")
ALONG = [(family, fmt) for family, fmt in EVERY if not fmt.startswith(OTHERWISE)]
"""Releases whose stored tensors all lie as their matrices do, [N, K]; the others' ranks are decoded, here and in
tests/formats."""


def read(rank: RankSlice, name: str) -> Words:
    """A rank's part, read into a column range of a bigger buffer as a fused parameter would be."""
    shape = rank.shape(name)
    wide = np.zeros((*shape[:-1], shape[-1] + 3) if shape else (), dtype=STORAGE[rank.dtype(name)])
    out = wide[..., 1 : shape[-1] + 1] if shape else wide
    rank.read_into(name, out)
    if shape:
        assert not wide[..., 0].any() and not wide[..., shape[-1] + 1 :].any()
    return out


def footprint(suffix: str, stored: Words, logical_shape: tuple[int, ...], block: tuple[int, int]) -> tuple[int, ...]:
    """Logical elements an entry covers, along each dimension it has; (): one value for the whole tensor."""
    if suffix in ("", ".weight", ".weight_packed"):
        packed = suffix != "" and stored.dtype == np.uint8 and stored.shape[-1] * 2 == logical_shape[-1]
        return (1,) * (stored.ndim - 1) + (2 if packed else 1,)
    if stored.size == 1 and stored.ndim < 2:
        return ()
    return block[: stored.ndim]


def joined(
    ranks: list[RankSlice], parts: list[Words], dims: dict[int, Any], blocks: tuple[int, ...], made: Plan
) -> Words:
    """The ranks' parts of one stored tensor side by side: section by section along the dimension that is cut."""
    cut = [(d, sections) for d, sections in dims.items() if d < len(blocks) and blocks[d]]
    if not cut:
        assert all(np.array_equal(p, parts[0]) for p in parts)
        return parts[0]
    ((d, sections),) = cut
    pieces: list[list[Words]] = [[] for _ in sections]
    held: dict[str, set[int]] = {axis: set() for axis, _ in sections}
    for rank, part in zip(ranks, parts, strict=True):
        start = 0
        for place, (axis, width) in enumerate(sections):
            length = rank.count(axis) * width
            assert length % blocks[d] == 0
            piece = np.take(part, range(start // blocks[d], (start + length) // blocks[d]), axis=d)
            start += length
            copies = made.layout(axis).in_engine and made.model.axis(axis).kind == "heads"
            if not copies or not set(rank.source(axis).tolist()) <= held[axis]:
                pieces[place].append(piece)
            if place == max(i for i, (a, _) in enumerate(sections) if a == axis):
                held[axis] |= set(rank.source(axis).tolist())
        assert start == part.shape[d] * blocks[d]
    whole = np.concatenate([np.concatenate(p, axis=d) for p in pieces], axis=d)
    if sections[0][0] == "vocab":  # the engine's padding rows are not in any file
        rows = made.model.axis("vocab").count
        assert not whole[rows:].any() or blocks[d + 1 :] not in ((1,), (2,))
        whole = whole[:rows]
    return whole


@pytest.mark.parametrize(
    ("family", "fmt", "tp"), [*((*e, 3) for e in ALONG), ("qwen3_5", "nvfp4-mixed", 2), ("dflash", "fp8-block", 8)]
)
def test_equal_ranks_joined_are_the_virtual_checkpoint(family: str, fmt: str, tp: int) -> None:
    source, made = checkpoint(family, fmt), plan(family, fmt, tp)
    ranks = [oddrank.rank_slice(made, r, source) for r in range(tp)]
    w = widths(source.config)
    virtual = dict(oddrank.stream(made, ((n, source.array(n)) for n in source.tensors)))
    assert all(set(r.names()) == set(source.tensors) for r in ranks)
    for dense, suffixes in matrices(list(source.tensors)).items():
        if dense.endswith(INTERLEAVED):
            continue
        stored = parts_of(source, dense, suffixes)
        decoded = logical(stored)
        block = (1, 1) if len(stored) == 1 else scale_block(stored, decoded.shape)
        for suffix in suffixes:
            name = dense.removesuffix(".weight") + suffix if suffix else dense
            blocks = footprint(suffix, stored[suffix].words, decoded.shape, block)
            whole = joined(ranks, [read(r, name) for r in ranks], cut_dims(dense, w), blocks, made)
            assert np.array_equal(whole, virtual[name]), name


@pytest.mark.parametrize(("family", "fmt", "tp"), [(f, t, 3) for f, t in EVERY] + [("qwen3_5_moe", "fp8-block", 5)])
def test_ragged_ranks_cover_every_element_once(family: str, fmt: str, tp: int) -> None:
    """Each rank's part decodes to its elements of the matrix, and of a summed axis every element is on one rank."""
    source, made = checkpoint(family, fmt), plan(family, fmt, tp, "runtime")
    ranks = [oddrank.rank_slice(made, r, source) for r in range(tp)]
    w, stock, refined = widths(source.config), made.model.stock(), dict(made.refined)
    for dense, suffixes in matrices(list(source.tensors)).items():
        if dense.endswith(INTERLEAVED):
            continue
        stored = parts_of(source, dense, suffixes)
        whole = logical(stored)
        dims = cut_dims(dense, w)
        block = list(scale_block(stored, whole.shape)) if len(stored) > 1 else [0, 0]
        if block == [128, 128]:
            for d, sections in dims.items():
                block[d] = min([128, *(refined[axis] for axis, _ in sections if axis in refined)])
        times = np.zeros(whole.shape, dtype=np.int64)
        for rank in ranks:
            local = {s: Raw(raw.dtype, read(rank, _name(dense, s))) for s, raw in stored.items()}
            part = logical(local, (block[0], block[1]) if len(stored) > 1 else None)
            slots = {axis: rank.source(axis) for axis in stock}
            assert np.array_equal(part, gathered(whole, dims, stock, slots)), dense
            at = [
                np.array(places(dims[d], stock, slots)) if d in dims else np.arange(n)
                for d, n in enumerate(whole.shape)
            ]
            assert all(len(np.unique(a[a >= 0])) == (a >= 0).sum() for a in at)
            times[np.ix_(*(a[a >= 0] for a in at))] += 1
        axes = {axis for sections in dims.values() for axis, _ in sections}
        if axes and all(made.model.axis(a).summed for a in axes):
            assert (times == 1).all(), dense
        else:
            assert (times >= 1).all() and (axes or (times == tp).all()), dense


def _name(dense: str, suffix: str) -> str:
    return dense.removesuffix(".weight") + suffix if suffix else dense


# -- loading goes wrong ----------------------------------------------------------------------------------------------


def test_the_head_is_cut_with_the_vocabulary_and_its_last_shard_is_short() -> None:
    """lm_head in NVFP4, 512 rows over 3 ranks: weights and scales have the rank's rows, never all."""
    source = checkpoint("qwen3_5", "nvfp4-mixed")
    made = plan("qwen3_5", "nvfp4-mixed", 3, "runtime")
    ranks = [oddrank.rank_slice(made, r, source) for r in range(3)]
    for suffix in ("weight", "weight_scale"):
        rows = [r.shape(f"lm_head.{suffix}")[0] for r in ranks]
        assert rows == [r.count("vocab") for r in ranks] and sum(rows) == 512 and len(set(rows)) == 2
    assert all(r.shape("lm_head.weight_scale_2") == () for r in ranks)
    padded = plan("qwen3_5", "nvfp4-mixed", 3)
    last = oddrank.rank_slice(padded, 2, source)
    words = read(last, "lm_head.weight")
    real = int((last.source("vocab") >= 0).sum())
    assert len(words) == 192 and real == 512 - 2 * 192
    assert words[:real].any() and not words[real:].any()
    assert np.array_equal(words[:real], source.array("lm_head.weight")[-real:])


@pytest.mark.parametrize("fmt", ["fp8-block", "nvfp4-mixed", "nvfp4-ct", "nvfp4-ct-block", "mxfp4"])
def test_no_weight_is_cut_without_its_scales(fmt: str) -> None:
    """A rank's scales have as many rows and columns as its weight has blocks; what is on every rank is whole."""
    source = checkpoint("qwen3_5_moe", fmt)
    for made in (plan("qwen3_5_moe", fmt, 3), plan("qwen3_5_moe", fmt, 3, "runtime")):
        assert not made.refined
        cut = 0
        for r in range(3):
            rank = oddrank.rank_slice(made, r, source)
            for dense, suffixes in matrices(list(source.tensors)).items():
                scale = next((s for s in suffixes if s in (".weight_scale", ".weight_scale_inv")), None)
                stored = parts_of(source, dense, suffixes)
                if scale is None or stored[scale].words.size == 1:
                    continue
                values = next(s for s in suffixes if s in (".weight", ".weight_packed"))
                n, k = stored[values].words.shape
                four = stored[values].dtype == "U8"
                bn, bk = scale_block(stored, (n, 2 * k if four else k))
                rows, columns = rank.shape(_name(dense, values))
                columns *= 2 if four else 1
                wanted = (-(-rows // bn), 1 if bk == 0 else -(-columns // bk))
                assert rank.shape(_name(dense, scale)) == wanted[: stored[scale].words.ndim]
                cut += (rows, columns) != (n, 2 * k if four else k)
        assert cut > 50


def test_a_slice_pins_no_parent() -> None:
    """What a rank or a stream hands out is memory of its own, of its own size."""
    import torch
    from stream.releases import as_torch

    source, made = checkpoint("qwen3", "fp8-block"), plan("qwen3", "fp8-block", 3)
    changed = 0
    for name, tensor in oddrank.stream(made, as_torch(source)):
        if tuple(tensor.shape) != source.tensors[name].shape:
            assert isinstance(tensor, torch.Tensor)
            assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()
            changed += 1
    for name, array in oddrank.stream(made, ((n, source.array(n)) for n in source.tensors)):
        if array.shape != source.tensors[name].shape:
            owner = array if array.base is None else array.base
            assert owner.nbytes == array.nbytes and not np.shares_memory(array, source.array(name))
    assert changed > 10
    # a part that is one contiguous range of its tensor is copied all the same
    rank = oddrank.rank_slice(plan("qwen3", "fp8-block", 3, "runtime"), 1, source)
    out = read(rank, "model.layers.0.mlp.up_proj.weight")
    assert not np.shares_memory(out, source.array("model.layers.0.mlp.up_proj.weight"))


def test_each_rank_holds_its_part_of_each_expert_not_all() -> None:
    source = checkpoint("qwen3_5_moe", "mxfp4")
    made = plan("qwen3_5_moe", "mxfp4", 2, "runtime")
    whole = sum(array.nbytes for n in source.tensors if ".experts." in n for array in [source.array(n)])
    for r in range(2):
        rank = oddrank.rank_slice(made, r, source)
        held = sum(read(rank, n).nbytes for n in rank.names() if ".experts." in n)
        assert held < 0.51 * whole  # row-parallel MTP experts have a whole one-dimensional scale each


def test_scales_in_another_file_than_their_weights_are_found(tmp_path: Any) -> None:
    """All scales of the model in a shard of their own: the result is that of the usual files."""
    from safetensors.torch import save_file
    from stream.releases import as_torch

    source = checkpoint("qwen3_5", "nvfp4-mixed")
    tensors = dict(as_torch(source))
    where = {n: f"model-0000{1 + ('scale' in n)}-of-00002.safetensors" for n in tensors}
    for file in set(where.values()):
        save_file({n: t.clone() for n, t in tensors.items() if where[n] == file}, tmp_path / file)
    (tmp_path / "config.json").write_bytes((source.path / "config.json").read_bytes())
    apart = Checkpoint.open(tmp_path)
    made = oddrank.make_plan(tmp_path, 3, executor="vllm").plan
    assert made.uses == plan("qwen3_5", "nvfp4-mixed", 3).uses
    results = [
        Checkpoint.open(oddrank.pad(p, c, tmp_path.parent / f"{tmp_path.name}-{i}").path)
        for i, (p, c) in enumerate(((made, apart), (plan("qwen3_5", "nvfp4-mixed", 3), source)))
    ]
    assert results[0].tensors.keys() == results[1].tensors.keys()
    assert all(results[0].raw(n) == results[1].raw(n) for n in results[0].tensors)
    assert {n: t.file for n, t in results[0].tensors.items()} == where
