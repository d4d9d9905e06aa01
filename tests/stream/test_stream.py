"""`oddrank.stream`: the virtual checkpoint while it is being read, the same bytes that `oddrank pad` writes."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from stream.releases import EVERY, as_numpy, as_torch, checkpoint, plan, words_of
from stream.sections import INTERLEAVED, cut_dims, gathered, logical, matrices, parts_of, widths

import oddrank
from oddrank.checkpoint import Checkpoint

TORCH = {
    "BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn, "I8": torch.int8, "I32": torch.int32, "I64": torch.int64,
}  # fmt: skip


@pytest.mark.parametrize(("family", "fmt"), EVERY)
def test_streamed_bytes_are_the_padded_files(family: str, fmt: str, tmp_path: Path) -> None:
    """In every release, for torch tensors in their own dtypes and for numpy arrays of words; and the padded matrices
    decode to the source's, moved by the slots as the model code reads them."""
    source, made = checkpoint(family, fmt), plan(family, fmt, 3)
    assert not made.is_identity()
    result = Checkpoint.open(oddrank.pad(made, source, tmp_path / "out").path)
    for stream, is_torch in ((as_torch(source), True), (as_numpy(source), False)):
        seen = {}
        for name, tensor in oddrank.stream(made, stream):
            info = result.tensors[name]
            assert tuple(tensor.shape) == info.shape and name not in seen
            assert words_of(tensor) == bytes(result.raw(name)), name
            if is_torch:
                assert tensor.dtype == TORCH[info.dtype] and tensor.is_contiguous()
            seen[name] = True
        assert seen.keys() == result.tensors.keys() == source.tensors.keys()
    w, stock = widths(source.config), made.model.stock()
    slots = dict(made.virtual().source)
    for dense, suffixes in matrices(list(source.tensors)).items():
        if dense.endswith(INTERLEAVED):
            continue
        before, after = (logical(parts_of(c, dense, suffixes)) for c in (source, result))
        expected = gathered(before, cut_dims(dense, w), stock, slots)
        assert after.shape == expected.shape and np.array_equal(after, expected), dense


@pytest.mark.parametrize(("family", "fmt"), [("qwen3", "fp8-block"), ("qwen3_5", "nvfp4-mixed")])
def test_it_does_not_read_ahead(family: str, fmt: str) -> None:
    """One tensor in, one tensor out, and neither is kept."""
    taken: list[str] = []
    alive: list[weakref.ref[Any]] = []

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in as_torch(checkpoint(family, fmt)):
            taken.append(name)
            copy = tensor.clone()
            alive.append(weakref.ref(copy))
            yield name, copy
            del copy

    stream = oddrank.stream(plan(family, fmt, 3), source())
    assert taken == []  # made, not started
    for count, (name, _tensor) in enumerate(stream, start=1):
        assert taken[-1] == name and len(taken) == count
        if count == 12:
            break
    del _tensor
    gc.collect()
    assert sum(ref() is not None for ref in alive[:-1]) == 0


def test_without_a_plan_it_is_the_very_iterable() -> None:
    tensors = [("a", np.zeros(3))]
    assert oddrank.stream(None, tensors) is tensors
    generator = iter(tensors)
    assert oddrank.stream(None, generator) is generator


@pytest.mark.parametrize(("family", "fmt"), [("qwen3", "fp8-block"), ("qwen3_5_moe", "nvfp4-ct"), ("dflash", "bf16")])
def test_an_identity_plan_is_the_very_iterable(family: str, fmt: str) -> None:
    made = plan(family, fmt, 2)
    assert made.kind == "identity"
    tensors = as_torch(checkpoint(family, fmt))
    assert oddrank.stream(made, tensors) is tensors


def test_refined_blocks_are_no_identity(tmp_path: Path) -> None:
    """Nothing moves at two ranks, but a user may ask for finer scales: config, files and stream all say so."""
    source = checkpoint("qwen3", "fp8-block")
    made = oddrank.make_plan(source.path, 2, executor="vllm", constraints={"block": 64}).plan
    assert made.kind == "identity" and not made.is_identity()
    result = Checkpoint.open(oddrank.pad(made, source, tmp_path / "out").path)
    assert source.config["quantization_config"]["weight_block_size"] == [128, 128]
    assert result.config["quantization_config"]["weight_block_size"] == [64, 64]
    streamed = dict(oddrank.stream(made, as_torch(source)))
    for dense, suffixes in matrices(list(source.tensors)).items():
        refined = parts_of(result, dense, suffixes)
        block = (64, 64) if ".weight_scale_inv" in suffixes else None
        assert np.array_equal(logical(refined, block), logical(parts_of(source, dense, suffixes))), dense
        for suffix in suffixes:
            name = dense.removesuffix(".weight") + suffix if suffix else dense
            assert words_of(streamed[name]) == bytes(result.raw(name))


def test_a_refined_block_is_named_by_the_groups_of_compressed_tensors(tmp_path: Path) -> None:
    source = checkpoint("qwen3_5", "nvfp4-ct-block")
    made = oddrank.make_plan(source.path, 3, executor="vllm", constraints={"block": 64}).plan
    result = Checkpoint.open(oddrank.pad(made, source, tmp_path / "out").path)
    groups = [c.config["quantization_config"]["config_groups"] for c in (source, result)]
    assert [g["group_0"]["weights"]["block_structure"] for g in groups] == [[128, 128], [64, 64]]
    assert groups[0]["group_1"] == groups[1]["group_1"]
    name = "model.layers.3.self_attn.o_proj.weight_scale"
    rows, columns = source.tensors[name.removesuffix("_scale")].shape
    assert source.tensors[name].shape == (rows // 128, columns // 128)
    assert result.tensors[name].shape == (rows // 64, 9 * 128 // 64)


@pytest.mark.parametrize("block", [48, 100, 256])
def test_a_block_that_divides_no_stored_block_is_refused(block: int) -> None:
    with pytest.raises(oddrank.OddrankError, match=f"block={block}: scales per 128"):
        oddrank.make_plan(checkpoint("qwen3", "fp8-block").path, 2, executor="vllm", constraints={"block": block})


def test_a_block_is_refused_where_there_is_none() -> None:
    for family, fmt in (("qwen3", "bf16"), ("qwen3_5", "mxfp4")):
        with pytest.raises(oddrank.OddrankError, match="no block scales"):
            oddrank.make_plan(checkpoint(family, fmt).path, 2, executor="vllm", constraints={"block": 16})


def test_a_plan_of_unequal_ranks_has_no_stream() -> None:
    made = plan("qwen3_5", "nvfp4-mixed", 5, "runtime")
    assert not made.is_identity() or made.refined
    with pytest.raises(oddrank.OddrankError, match="--executor vllm"):
        oddrank.stream(made, [])


# -- the tally -------------------------------------------------------------------------------------------------------


def test_the_tally_counts_every_stored_tensor_of_every_role() -> None:
    source = checkpoint("qwen3_5_moe", "nvfp4-mixed")
    made = plan("qwen3_5_moe", "nvfp4-mixed", 3)
    stream = oddrank.stream(made, as_numpy(source))
    assert isinstance(stream, oddrank.Stream)
    assert all(t.count == 0 for t in stream.tallies)
    assert sum(t.expected for t in stream.tallies) == len(source.tensors)
    for _ in range(2):  # a second pass counts anew
        stream._tensors = as_numpy(source)
        list(stream)
        assert all(t.count == t.expected for t in stream.tallies)
    by_role = {t.role: t for t in stream.tallies}
    down = by_role["model.language_model.layers.{layer}.mlp.experts.{expert}.down_proj.weight_scale"]
    assert (down.count, down.source_shape, down.shape) == (4 * 8, (256, 256 // 16), (256, 384 // 16))
    o_proj = by_role["model.language_model.layers.{layer}.self_attn.o_proj.weight"]
    assert (o_proj.count, o_proj.source_shape, o_proj.shape) == (1, (256, 6 * 128), (256, 9 * 128))
    scalar = by_role["model.language_model.layers.{layer}.self_attn.o_proj.weight_scale"]
    assert (scalar.count, scalar.source_shape, scalar.shape) == (1, (), ())


SCALE = "model.layers.1.mlp.up_proj.weight_scale_inv"


def tensors() -> dict[str, Any]:
    return dict(as_numpy(checkpoint("qwen3", "fp8-block")))


def drained(pairs: list[tuple[str, Any]], coverage: Any) -> dict[str, Any]:
    return dict(oddrank.stream(plan("qwen3", "fp8-block", 3), pairs, coverage=coverage))


def spoiled(kind: str) -> tuple[list[tuple[str, Any]], str]:
    """(what comes, what the complaint says)."""
    found = tensors()
    if kind == "missing":
        del found[SCALE]
        return list(found.items()), r"model\.layers\.\{layer\}\.mlp\.up_proj\.weight_scale_inv: 1 of 2"
    if kind == "repeated":
        return [*found.items(), (SCALE, found[SCALE])], f"{SCALE} came twice"
    weight = "model.layers.1.self_attn.o_proj.weight"
    if kind == "shape":
        found[weight] = found[weight][:, :128]
        return list(found.items()), rf"{weight} comes as uint8 \[256, 128\]; .* F8_E4M3 \[256, 768\]"
    scale = f"{weight}_scale_inv"
    found[scale] = (found[scale].astype(np.uint32) << 16).view(np.float32)
    return list(found.items()), rf"{scale} comes as F32 \[2, 6\]; the plan was made for BF16 \[2, 6\]"


@pytest.mark.parametrize("kind", ["missing", "repeated", "shape", "dtype"])
def test_what_was_not_planned_raises(kind: str) -> None:
    pairs, message = spoiled(kind)
    with pytest.raises(oddrank.OddrankError, match=message):
        drained(pairs, "strict")


@pytest.mark.filterwarnings("ignore:the stream ended")
@pytest.mark.parametrize("kind", ["missing", "repeated", "shape", "dtype"])
def test_what_was_not_planned_warns_where_asked(kind: str) -> None:
    """The rest is as it would be; a tensor that is stored otherwise passes as it came, never cut wrongly."""
    pairs, message = spoiled(kind)
    whole = drained(list(tensors().items()), "strict")
    with pytest.warns(UserWarning, match=message):
        made = drained(pairs, "warn")
    given = dict(pairs)
    other = {n for n, a in given.items() if a.shape != tensors()[n].shape or a.dtype != tensors()[n].dtype}
    assert len(other) == (kind in ("shape", "dtype"))
    for name, array in made.items():
        if name in other:
            assert array is given[name]
        else:
            assert np.array_equal(array, whole[name])


def test_a_whole_stream_warns_of_nothing() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert drained(list(tensors().items()), "warn").keys() == tensors().keys()


def test_a_scale_converted_on_the_way_is_not_filled_with_words_of_another_dtype() -> None:
    """bf16 words in an fp32 or fp16 tensor would be another number, or half as many."""
    found = dict(as_torch(checkpoint("qwen3", "fp8-block")))
    name = "model.layers.0.self_attn.o_proj.weight_scale_inv"
    for dtype in (torch.float32, torch.float16):
        with pytest.raises(oddrank.OddrankError, match="the plan was made for BF16"):
            list(oddrank.stream(plan("qwen3", "fp8-block", 3), [(name, found[name].to(dtype))]))


def test_a_tensor_without_a_role_is_named_or_passed_untouched_with_a_warning() -> None:
    extra = np.arange(7)
    pairs = [("another_model.weight", extra), *tensors().items()]
    with pytest.raises(oddrank.OddrankError, match=r"another_model\.weight has no role"):
        list(oddrank.stream(plan("qwen3", "fp8-block", 3), pairs))
    with pytest.warns(UserWarning, match=r"another_model\.weight has no role"):
        (name, tensor), *_ = oddrank.stream(plan("qwen3", "fp8-block", 3), pairs, coverage="warn")
    assert name == "another_model.weight" and tensor is extra


def test_what_the_family_accounts_for_without_a_role_passes_untouched() -> None:
    extra = np.arange(7)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    (first, tensor), *_ = oddrank.stream(plan("qwen3", "fp8-block", 3), [(name, extra), *tensors().items()])
    assert first == name and tensor is extra
