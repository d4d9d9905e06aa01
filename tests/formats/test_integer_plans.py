"""Whole models of packed integers, planned, proven, streamed, written and cut at sizes that nothing divides."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from cli.test_cli import run
from formats.codec import F64, Raw
from formats.dialects import DIALECTS, stored
from formats.integers import PACKINGS, gptq, packed, skewed, unpacked
from formats.packed_models import decoded, matrices, parts_of, write
from stream.sections import Sections, cut_dims, gathered, widths

import oddrank
from oddrank.checkpoint import STORAGE, Checkpoint
from oddrank.errors import OddrankError
from oddrank.formats import formats
from oddrank.layout.plan import Plan
from oddrank.layout.proof import prove
from oddrank.planner import make_plan

_HOME = TemporaryDirectory(prefix="oddrank-packed-")

SIZES = (2, 3, 5, 6, 7, 8)
EVERYWHERE = (
    "GPTQ", "GPTQ, whole rows", "GPTQ, version 2", "GPTQ, 8 bits", "AWQ", "AWQ, whole rows",
    "AutoRound as GPTQ", "AutoRound as AWQ", "compressed-tensors int4", "compressed-tensors int4, asymmetric",
    "compressed-tensors int4, asymmetric, channels", "compressed-tensors int8", "compressed-tensors int8, channels",
)  # fmt: skip


@cache
def model(name: str) -> Checkpoint:
    return write(Path(_HOME.name) / name.replace(" ", "-"), PACKINGS[name])


@cache
def whole(name: str) -> dict[str, F64]:
    """Every matrix and vector of a model, decoded."""
    source = model(name)
    found = matrices(list(source.tensors)).items()
    return {d: decoded(PACKINGS[name], parts_of(reader(source), d, suffixes)) for d, suffixes in found}


@cache
def planned(name: str, tp: int, executor: str) -> Plan:
    made = make_plan(model(name).path, tp, executor=executor)
    assert all(check.ok for check in made.checks) and len(made.checks) == 7
    assert {u.format for u in made.plan.uses} == {"dense", PACKINGS[name].format}
    return made.plan


def reader(source: Checkpoint) -> Any:
    return lambda name: Raw(source.tensors[name].dtype, source.array(name))


def in_numpy(source: Checkpoint) -> Iterator[tuple[str, Any]]:
    for name in source.tensors:
        yield name, source.array(name)


def dims_of(dense: str, source: Checkpoint) -> dict[int, Sections]:
    return cut_dims(dense, widths(source.config))


@pytest.mark.parametrize("tp", SIZES)
@pytest.mark.parametrize("name", EVERYWHERE)
def test_the_virtual_checkpoint_decodes_to_the_padded_matrices(name: str, tp: int) -> None:
    source, made = model(name), planned(name, tp, "vllm")
    assert made.layout("mlp").total() % (tp * PACKINGS[name].cut[1]) == 0
    streamed = dict(oddrank.stream(made, in_numpy(source)))
    assert streamed.keys() == source.tensors.keys()
    stock, slots = made.model.stock(), dict(made.virtual().source)

    def read(key: str) -> Raw:
        return Raw(source.tensors[key].dtype, streamed[key])

    for dense, suffixes in matrices(list(source.tensors)).items():
        expected = gathered(whole(name)[dense], dims_of(dense, source), stock, slots)
        assert np.array_equal(decoded(PACKINGS[name], parts_of(read, dense, suffixes)), expected), dense


@pytest.mark.parametrize(("tp", "executor"), [(2, "runtime"), (3, "runtime"), (7, "runtime"), (3, "vllm"), (8, "vllm")])
@pytest.mark.parametrize("name", EVERYWHERE)
def test_each_rank_s_slice_decodes_to_its_part(name: str, tp: int, executor: str) -> None:
    source, made = model(name), planned(name, tp, executor)
    stock = made.model.stock()
    real = 0
    for r in range(tp):
        rank = oddrank.rank_slice(made, r, source)
        slots = {axis: rank.source(axis) for axis in stock}

        def read(key: str, rank: Any = rank) -> Raw:
            out = np.empty(rank.shape(key), dtype=STORAGE[rank.dtype(key)])
            rank.read_into(key, out)
            again = np.empty_like(out)
            if out.ndim:
                middle = len(out) // 2
                rank.read_rows_into(key, 0, again[:middle])
                rank.read_rows_into(key, middle, again[middle:])
                assert np.array_equal(out, again)
            return Raw(rank.dtype(key), out)

        for dense, suffixes in matrices(list(source.tensors)).items():
            expected = gathered(whole(name)[dense], dims_of(dense, source), stock, slots)
            part = decoded(PACKINGS[name], parts_of(read, dense, suffixes))
            assert np.array_equal(part, expected), dense
        real += int((slots["mlp"] >= 0).sum())
        matrix = rank.matrix("model.layers.0.mlp.down_proj")
        assert matrix.format == PACKINGS[name].format and set(matrix.blocks) == set(matrix.names)
    assert real == 1152


@pytest.mark.parametrize("name", PACKINGS)
def test_pad_writes_what_is_streamed(name: str, tmp_path: Path) -> None:
    """In every packing, from torch tensors and in either order of values and zero points."""
    source, made = model(name), planned(name, 3, "vllm")
    result = Checkpoint.open(oddrank.pad(made, source, tmp_path / "out").path)
    for stream in (in_numpy(source), reversed([*in_numpy(source)]), in_torch(source)):
        seen = set()
        for key, tensor in oddrank.stream(made, stream):
            words = tensor.view(torch.uint8).numpy() if isinstance(tensor, torch.Tensor) else tensor
            assert words.tobytes() == bytes(result.raw(key)) and key not in seen, key
            seen.add(key)
        assert seen == result.tensors.keys() == source.tensors.keys()
    # the written checkpoint is one of its own: planned again, at one rank nothing changes
    again = make_plan(result.path, 1, executor="vllm")
    assert again.plan.is_identity() and {u.format for u in again.plan.uses} == {"dense", PACKINGS[name].format}


def in_torch(source: Checkpoint) -> Iterator[tuple[str, torch.Tensor]]:
    from safetensors import safe_open

    with safe_open(str(source.path / "model.safetensors"), framework="pt") as opened:
        for key in opened.keys():  # noqa: SIM118 - it is no dict
            yield key, opened.get_tensor(key)


def test_a_stream_holds_one_matrix_until_its_zero_points_come() -> None:
    """Dummy columns of whole rows are made of them; nothing is read ahead, nothing is lost, and a stream that never
    brings them says so."""
    name = "GPTQ, whole rows"
    source, made = model(name), planned(name, 3, "vllm")
    key = "model.layers.0.self_attn.o_proj"
    first = [(key + s, source.array(key + s)) for s in (".qweight", ".scales", ".qzeros")]
    others = [(n, t) for n, t in in_numpy(source) if n not in dict(first)]
    order = [n for n, _ in oddrank.stream(made, iter(first + others))]
    assert order[:3] == [f"{key}.scales", f"{key}.qzeros", f"{key}.qweight"]
    with pytest.raises(OddrankError, match=r"o_proj.qzeros: 0 of 1"):
        list(oddrank.stream(made, iter(first[:2] + others)))


# -- the proof -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "suffix"),
    [
        ("GPTQ", ".qweight"), ("GPTQ", ".qzeros"), ("AWQ", ".qzeros"),
        ("compressed-tensors int4, asymmetric", ".weight_zero_point"),
    ],
)  # fmt: skip
def test_a_fill_that_is_no_zero_is_refused(name: str, suffix: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """GPTQ's second version keeps 8 where the first keeps 7: either beside the other would make every dummy 1."""
    made = planned(name, 3, "vllm")
    form = oddrank.formats.format_named(PACKINGS[name].format)
    wrong = [msgspec.structs.replace(s, row_fill=0x66666666) if s.suffix == suffix else s for s in form.stored]
    monkeypatch.setitem(formats(), form.name, msgspec.structs.replace(form, stored=tuple(wrong)))
    (check,) = [c for c in prove(made, None) if c.name == "silence"]
    assert not check.ok and form.name in check.detail
    monkeypatch.undo()
    assert all(c.ok for c in prove(made, None))


def test_a_layout_that_splits_a_word_or_a_group_is_refused() -> None:
    made = planned("AWQ", 2, "runtime")
    for start, what in ((516, "gate_proj.qweight: packed entry"), (520, "down_proj.scales: entry")):
        ranks = [list(range(start)), list(range(start, 1152))]
        layouts = tuple(
            msgspec.structs.replace(la, ranks=type(la).of("mlp", ranks).ranks) if la.axis == "mlp" else la
            for la in made.layouts
        )
        (check,) = [c for c in prove(msgspec.structs.replace(made, layouts=layouts), None) if c.name == "storage"]
        assert not check.ok and what in check.detail


# -- beside block scales ---------------------------------------------------------------------------------------------


def test_finer_block_scales_leave_the_groups_beside_them_alone(tmp_path: Path) -> None:
    """Layer 0 in int4, groups of 128; layer 1 in fp8, blocks of 128 that the user wants in blocks of 64: both lie along
    the same channels, and only the blocks get finer."""
    blocks, name = DIALECTS["fp8 block, compressed-tensors"], "compressed-tensors int4"
    mixed: dict[str, Any] = dict(PACKINGS[name].config)
    mixed["config_groups"] = mixed["config_groups"] | {"group_1": blocks.quantization["config_groups"]["group_0"]}

    def change(base: str, parts: dict[str, Raw]) -> dict[str, Raw]:
        n, k = (int(i) for i in parts[".weight_shape"].words)
        return parts if "layers.0" in base else stored(blocks, skewed(n, k))

    source = write(tmp_path / "m", PACKINGS[name], change=change, said=mixed, layers=2, mlp=512)
    for tp in (2, 3):
        made = make_plan(source.path, tp, constraints={"block": 64}).plan
        assert {u.format for u in made.uses} == {"dense", "fp8-block-ct", "int4-pack-g128"}
        for r in range(tp):
            rank = oddrank.rank_slice(made, r, source)
            at = rank.source("mlp")

            def read(key: str, rank: Any = rank) -> Raw:
                out = np.empty(rank.shape(key), dtype=STORAGE[rank.dtype(key)])
                rank.read_into(key, out)
                return Raw(rank.dtype(key), out)

            for layer, decode in ((0, PACKINGS[name].decode), (1, lambda p: blocks.decode(p, (64, 64)))):
                key, stock = f"model.layers.{layer}.mlp.down_proj", (128, 128)
                suffixes = [n.removeprefix(key) for n in source.tensors if n.startswith(key)]
                whole = {s: reader(source)(key + s) for s in suffixes}
                before = PACKINGS[name].decode(whole) if layer == 0 else blocks.decode(whole, stock)
                part = decode({s: read(key + s) for s in suffixes})
                assert np.array_equal(part[:, at >= 0], before[:, at[at >= 0]]) and not part[:, at < 0].any()


# -- activation order ------------------------------------------------------------------------------------------------


def scattered_in(*layers: str) -> Checkpoint:
    """A model quantized with desc_act whose g_idx is out of order in these layers, and in order in the others."""
    ordered, scattered = gptq(), gptq(scatter=3)

    def change(base: str, parts: dict[str, Raw]) -> dict[str, Raw]:
        if not base.endswith(layers):
            return parts
        q = unpacked(parts[".qweight"], 4, 0)  # the same codes, their groups exchanged
        order = np.random.default_rng(3).permutation(len(q))
        index = (np.arange(len(q)) // 128)[order].astype(np.uint32)
        return {**parts, ".qweight": packed(q[order], 4, 0), ".g_idx": Raw("I32", index)}

    folder = Path(_HOME.name) / f"scattered-{'-'.join(layers) or 'none'}"
    return write(folder, ordered, change=change, said=scattered.config)


def test_activation_order_is_allowed_where_only_rows_are_cut() -> None:
    """gate_proj and up_proj are cut along N: their columns and g_idx stay as they are."""
    source = scattered_in("gate_proj", "up_proj")
    made = make_plan(source.path, 3, executor="vllm").plan
    streamed = dict(oddrank.stream(made, in_numpy(source)))
    slots, stock = dict(made.virtual().source), made.model.stock()
    for dense, suffixes in matrices(list(source.tensors)).items():
        before = decoded(gptq(), parts_of(reader(source), dense, suffixes))
        after = decoded(gptq(), parts_of(lambda k: Raw(source.tensors[k].dtype, streamed[k]), dense, suffixes))
        assert np.array_equal(after, gathered(before, dims_of(dense, source), stock, slots)), dense
    key = "model.layers.0.mlp.up_proj.g_idx"
    assert np.array_equal(streamed[key], source.array(key))


@pytest.mark.parametrize("layer", ["o_proj", "down_proj"])
@pytest.mark.parametrize("executor", ["vllm", "runtime"])
def test_activation_order_is_refused_where_columns_would_be_cut(
    layer: str, executor: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source = scattered_in(layer)
    assert make_plan(source.path, 1, executor=executor).plan.tp == 1
    with pytest.raises(OddrankError, match=rf"{layer} \(1 of 1\) is quantized in activation order .* 3 ranks cannot"):
        make_plan(source.path, 3, executor=executor)
    code, _, err = run(capsys, "plan", source.path, "--tp", 3)
    assert code == 2 and "activation order" in err


def test_a_plan_that_was_made_otherwise_does_not_cut_activation_order() -> None:
    """The proof finds it, too, should a plan come from elsewhere."""
    source = scattered_in("down_proj")
    alone = make_plan(source.path, 1, executor="runtime").plan
    elsewhere = planned("GPTQ", 3, "runtime")
    forged = msgspec.structs.replace(elsewhere, uses=alone.uses)
    (check,) = [c for c in prove(forged, None) if c.name == "storage"]
    assert not check.ok and "down_proj" in check.detail and "activation order" in check.detail


def test_activation_order_that_the_config_hides_is_found_before_a_byte_is_moved(tmp_path: Path) -> None:
    """desc_act false, g_idx out of order: an engine would ignore it. Nothing is written."""
    hidden = scattered_in("down_proj")
    config = (hidden.path / "config.json").read_text().replace('"desc_act": true', '"desc_act": false')
    source = Path(_HOME.name) / "hidden"
    source.mkdir(exist_ok=True)
    (source / "config.json").write_text(config)
    (source / "model.safetensors").write_bytes((hidden.path / "model.safetensors").read_bytes())
    found = Checkpoint.open(source)
    made = make_plan(source, 5, executor="vllm").plan
    with pytest.raises(OddrankError, match=r"down_proj.g_idx says \d+ at \[\d+\] .* activation order"):
        oddrank.pad(made, found, tmp_path / "out")
    assert not (tmp_path / "out").exists()
