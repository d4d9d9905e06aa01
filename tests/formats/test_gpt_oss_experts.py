"""gpt-oss's experts: MXFP4 in `_blocks` and `_scales`, gate and up rows alternating, with their biases.

The stored form is written from transformers' definition and decoded by transformers' own code.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import torch
from formats.codec import Raw
from formats.dialects import nearest_e2m1
from formats.moves import Tensor, census_of
from layout.shapes import plan, subject_of
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import oddrank
from oddrank.checkpoint import STORAGE
from oddrank.geometry import Along, Axis, Model, Pair, Role, Whole
from oddrank.layout.proof import prove
from oddrank.runtime.formats import decoder
from oddrank.transform.recipe import materialize, recipes

EXPERTS, HIDDEN = 3, 64
AT = "model.layers.0.mlp.experts"


def model(width: int, *, heads: int = 8) -> Model:
    """One layer's attention and experts, with the names and shapes of transformers' modeling_gpt_oss."""
    h, each, q, kv = Whole(HIDDEN), Along("experts"), Along("q_heads", 8), Along("kv_heads", 8)
    up, down, at = f"{AT}.gate_up_proj", f"{AT}.down_proj", "model.layers.0.self_attn"
    roles = (
        Role(f"{at}.q_proj.weight", (q, h), "column", matrix=True, work=1.0),
        Role(f"{at}.k_proj.weight", (kv, h), "column", matrix=True, work=1.0),
        Role(f"{at}.v_proj.weight", (kv, h), "column", matrix=True, work=1.0),
        Role(f"{at}.o_proj.weight", (h, q), "row", matrix=True, work=1.0),
        Role(up, (each, Along("moe", 2), h), "column", matrix=True, work=1.0),
        Role(f"{up}_bias", (each, Along("moe", 2)), "column"),
        Role(down, (each, h, Along("moe")), "row", matrix=True, work=1.0),
        Role(f"{down}_bias", (each, h), "replicated", joins=down),
    )
    axes = (
        Axis("q_heads", heads, "heads"), Axis("kv_heads", heads, "heads", summed=False),
        Axis("experts", EXPERTS, "experts", summed=False), Axis("moe", width, "width"),
    )  # fmt: skip
    return Model("toy", "GptOss", HIDDEN, axes, (Pair("q_heads", "kv_heads"),), roles, (), ())


def packed(x: npt.NDArray[np.float32]) -> dict[str, Raw]:
    """[E, N, K] -> blocks [E, N, K/32, 16], low nibble first, and scales [E, N, K/32]."""
    groups = x.reshape(*x.shape[:-1], -1, 32)
    power = np.ceil(np.log2(np.maximum(np.abs(groups).max(axis=-1), 2.0**-60) / 6))
    codes = nearest_e2m1((groups / np.exp2(power)[..., None]).astype(np.float32))
    blocks = codes[..., 0::2] | codes[..., 1::2] << 4
    return {"_blocks": Raw("U8", blocks), "_scales": Raw("U8", (power + 127).astype(np.uint8))}


def decoded(parts: dict[str, Raw]) -> npt.NDArray[np.float32]:
    """[E, N, K], by transformers, which makes [E, K, N]."""
    blocks, scales = (torch.from_numpy(np.ascontiguousarray(parts[s].words)) for s in ("_blocks", "_scales"))
    return convert_moe_packed_tensors(blocks, scales, dtype=torch.float32).transpose(1, 2).numpy()


def experts_of(found: dict[str, Raw], name: str) -> npt.NDArray[np.float32]:
    return decoded({suffix: found[f"{AT}.{name}{suffix}"] for suffix in ("_blocks", "_scales")})


def tensors(width: int, heads: int = 8) -> dict[str, Raw]:
    rng = np.random.default_rng(width)

    def bf16(*shape: int) -> Raw:
        return Raw("BF16", rng.integers(0x3C00, 0x4000, shape).astype(np.uint16))

    def experts(*shape: int) -> npt.NDArray[np.float32]:
        gains = 2.0 ** rng.uniform(-3, 3, (*shape[:-1], shape[-1] // 32))
        return (rng.standard_normal(shape) * np.repeat(gains, 32, axis=-1)).astype(np.float32)

    made = {f"model.layers.0.self_attn.{n}_proj.weight": bf16(8 * heads, HIDDEN) for n in "qkv"}
    made["model.layers.0.self_attn.o_proj.weight"] = bf16(HIDDEN, 8 * heads)
    for name, shape in (("gate_up_proj", (EXPERTS, 2 * width, HIDDEN)), ("down_proj", (EXPERTS, HIDDEN, width))):
        made |= {f"{AT}.{name}{s}": raw for s, raw in packed(experts(*shape)).items()}
        made[f"{AT}.{name}_bias"] = bf16(*shape[:2])
    return made


def subject(width: int, **shape: Any) -> Any:
    return subject_of(
        model(width, **shape), {n: Tensor(r.dtype, r.words.shape) for n, r in tensors(width, **shape).items()}
    )


@pytest.mark.parametrize("executor", ["vllm", "runtime"])
@pytest.mark.parametrize("tp", [2, 3, 5, 6, 7, 8])
@pytest.mark.parametrize("width", [288, 320])
def test_every_rank_decodes_to_its_gate_and_up_rows_side_by_side(width: int, tp: int, executor: str) -> None:
    """9 and 10 groups of 32. transformers reads gate = rows 0, 2, 4, ... and up = rows 1, 3, 5, ... of whatever a rank
    holds; dummies are zero in both, in down_proj's columns, and in the biases."""
    source, s = tensors(width), subject(width)
    assert not s.census.problems
    made = plan(s, tp, executor).plan
    assert {u.format for u in made.uses} == {"dense", "mxfp4-blocks"}
    before = {n: experts_of(source, n) for n in ("gate_up_proj", "down_proj")}
    held: list[int] = []
    virtual = [made.virtual()] if executor == "vllm" else []
    for slots in [*(made.slots(r) for r in range(tp)), *virtual]:
        made_here = recipes(made, slots)
        result = {n: Raw(r.dtype, materialize(r, source[n].words)) for n, r in made_here.items()}
        after = {n: experts_of(result, n) for n in before}
        at = slots.source["moe"]
        real = at >= 0
        for first in (0, 1):
            rows = after["gate_up_proj"][:, first::2]
            assert np.array_equal(rows[:, real], before["gate_up_proj"][:, first::2][:, at[real]])
            assert not rows[:, ~real].any()
            bias, stock = (w[f"{AT}.gate_up_proj_bias"].words[:, first::2] for w in (result, source))
            assert np.array_equal(bias[:, real], stock[:, at[real]]) and not bias[:, ~real].any()
        assert np.array_equal(after["down_proj"][:, :, real], before["down_proj"][:, :, at[real]])
        assert not after["down_proj"][:, :, ~real].any()
        assert np.array_equal(result[f"{AT}.down_proj_bias"].words, source[f"{AT}.down_proj_bias"].words)
        if slots not in virtual:
            held += at[real].tolist()
    assert sorted(held) == list(range(width))
    # each expert's output bias is added by one rank
    assert dict(made.owners)[f"{AT}.down_proj_bias"] in range(tp)


def test_fills_of_blocks_and_exponents() -> None:
    """Dummy columns of real rows have the exponent 2^-127, dummy rows 2^0; 0xFF nowhere."""
    source, s = tensors(288), subject(288)
    made = plan(s, 2, "vllm").plan
    found = {n: materialize(r, source[n].words) for n, r in recipes(made, made.virtual()).items()}
    dead = made.virtual().source["moe"] < 0
    assert dead.any()
    groups = dead.reshape(-1, 32).all(axis=1)
    down, up = found[f"{AT}.down_proj_scales"], found[f"{AT}.gate_up_proj_scales"]
    assert (down[:, :, groups] == 0x00).all() and (up[:, np.repeat(dead, 2)] == 0x7F).all()
    assert not (down == 0xFF).any() and not (up == 0xFF).any()
    assert not found[f"{AT}.down_proj_blocks"][:, :, groups].any()


def test_a_stream_and_slices_take_the_two_tensors_apart() -> None:
    source, s = tensors(320), subject(320)
    made = plan(s, 3, "vllm").plan
    streamed = dict(oddrank.stream(made, ((n, r.words) for n, r in source.items())))
    for name, recipe in recipes(made, made.virtual()).items():
        assert np.array_equal(streamed[name], materialize(recipe, source[name].words))
    rank = oddrank.rank_slice(made, 1)
    matrix = rank.matrix(f"{AT}.gate_up_proj")
    assert matrix.format == "mxfp4-blocks"
    assert matrix.names == {
        ".weight_blocks": f"{AT}.gate_up_proj_blocks", ".weight_scales": f"{AT}.gate_up_proj_scales",
    }  # fmt: skip
    assert rank.shape(f"{AT}.gate_up_proj_blocks") == (EXPERTS, 2 * rank.count("moe"), HIDDEN // 32, 16)
    assert rank.shape(f"{AT}.down_proj_blocks") == (EXPERTS, HIDDEN, rank.count("moe") // 32, 16)
    assert STORAGE[rank.dtype(f"{AT}.down_proj_blocks")] == np.uint8


def test_the_runtime_decodes_them_as_transformers_does() -> None:
    """Stacked, expert by expert, and tile by tile."""
    source = tensors(96)
    form = decoder("mxfp4-blocks")
    for name, shape in (("gate_up_proj", (192, HIDDEN)), ("down_proj", (HIDDEN, 96))):
        stored = {f".weight{s}": torch.from_numpy(source[f"{AT}.{name}{s}"].words) for s in ("_blocks", "_scales")}
        want = torch.from_numpy(experts_of(source, name).copy())
        assert all(form.shape(s, *shape, (EXPERTS,)) == t.shape for s, t in stored.items())
        assert torch.equal(form.dequantize(stored, torch.float32), want)
        one = {s: t[1] for s, t in stored.items()}
        x, rows = torch.randn(3, shape[1], dtype=torch.float64), torch.tensor([5, 0, 5])
        assert torch.allclose(form.linear(x, one), x @ want[1].double().T, rtol=1e-12)
        assert torch.equal(form.take(one, rows, torch.float32), want[1][rows])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({f"{AT}.down_proj_scales": None}, ["down_proj_scales (U8 or F8_E8M0 [3, 64, 9]) is missing"]),
        ({f"{AT}.gate_up_proj_scales": (EXPERTS, 576, 3)}, ["_scales is U8 [3, 576, 3] instead of", "[3, 576, 2]"]),
        ({f"{AT}.down_proj_blocks": (EXPERTS, 64, 9, 8)}, ["down_proj is stored as _blocks U8 [3, 64, 9, 8], _scales"]),
        ({f"{AT}.down_proj_blocks": None}, ["down_proj_scales is U8 [3, 64, 9], which no known format"]),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, Any], words: list[str]) -> None:
    found = tensors(288)
    for name, shape in change.items():
        raw = found.pop(name)
        if shape is not None:
            found[name] = Raw(raw.dtype, np.zeros(shape, dtype=np.uint8))
    (problem,) = census_of(model(288), found).problems
    assert all(w in problem for w in words), problem


def test_a_cut_inside_a_group_is_refused() -> None:
    made = plan(subject(288), 3, "runtime").plan
    ranks = [range(80), range(80, 192), range(192, 288)]
    layouts = tuple(type(la).of("moe", ranks) if la.axis == "moe" else la for la in made.layouts)
    (check,) = [c for c in prove(msgspec.structs.replace(made, layouts=layouts), None) if c.name == "storage"]
    assert not check.ok and "down_proj_blocks" in check.detail


def test_the_published_width_needs_no_padding_at_three_ranks() -> None:
    """gpt-oss-20b: 2880 channels are 90 groups of 32: 960 a rank at 3, in tiles of 64; 3072 at 8."""
    def planned(tp: int) -> Any:
        width, m = 2880, model(2880, heads=24)
        table = {n: Tensor(r.dtype, r.words.shape) for n, r in tensors(64, 24).items()}
        table |= {
            f"{AT}.gate_up_proj_blocks": Tensor("U8", (EXPERTS, 2 * width, HIDDEN // 32, 16)),
            f"{AT}.gate_up_proj_scales": Tensor("U8", (EXPERTS, 2 * width, HIDDEN // 32)),
            f"{AT}.gate_up_proj_bias": Tensor("BF16", (EXPERTS, 2 * width)),
            f"{AT}.down_proj_blocks": Tensor("U8", (EXPERTS, HIDDEN, width // 32, 16)),
            f"{AT}.down_proj_scales": Tensor("U8", (EXPERTS, HIDDEN, width // 32)),
        }
        return plan(subject_of(m, table), tp, "vllm").plan.layout("moe")

    assert planned(3).counts() == (960,) * 3 and planned(3).total() == 2880
    assert planned(8).total() == 3072 and planned(2).total() == 2880 and planned(7).total() == 3136
