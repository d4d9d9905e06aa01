"""Quantized storage that goes wrong in practice; each test is named after what would go wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from formats.codec import numbers
from formats.dialects import DIALECTS, matrix, sample, stored
from formats.moves import Move, Tensor, moved
from layout.shapes import config, tensor_table
from stream.releases import as_numpy, checkpoint, plan

import oddrank
from oddrank.checkpoint import Checkpoint
from oddrank.checkpoint.config import ConfigView
from oddrank.errors import OddrankError
from oddrank.families import family_of
from oddrank.layout.census import Census, take_census
from oddrank.layout.plan import Plan, config_digest
from oddrank.layout.solver import Request
from oddrank.planner import Subject, plan_subject

Table = dict[str, Tensor]


def subject_of(c: dict[str, Any], table: Table, quantization: dict[str, Any] | None = None) -> Subject:
    """A checkpoint as planning sees it, from a config and names, dtypes and shapes."""
    view = ConfigView(c, file="config.json")
    prefix = "model.language_model." if "model.language_model.embed_tokens.weight" in table else "model."
    model = family_of(view).build(view, prefix)
    said = c.get("quantization_config") if quantization is None else quantization
    return Subject("m", config_digest(c), model, take_census(model, table, said), 2)


def table_of(model: Checkpoint) -> Table:
    return {name: Tensor(t.dtype, t.shape) for name, t in model.tensors.items()}


def release(family: str, fmt: str) -> tuple[dict[str, Any], Table]:
    found = checkpoint(family, fmt)
    return found.config, table_of(found)


def formats_by_name(subject: Subject) -> dict[str, str]:
    """Dense name -> the format it was found in."""
    found = {}
    for use in subject.census.uses:
        names = list(subject.model.roles[use.role].instances())
        for number in range(len(names)) if use.instances is None else use.instances:
            found[names[number]] = use.format
    return found


def planned(subject: Subject, tp: int = 3, executor: str = "vllm") -> Plan:
    return plan_subject(subject, Request(tp=tp, executor=executor)).plan


def fp8(table: Table, base: str) -> None:
    """Store a packed four-bit matrix as ModelOpt's fp8 per tensor instead."""
    packed = table.pop(f"{base}.weight")
    for suffix in ("weight_scale", "weight_scale_2", "input_scale"):
        table.pop(f"{base}.{suffix}")
    n, k = packed.shape
    table[f"{base}.weight"] = Tensor("F8_E4M3", (n, 2 * k))
    table[f"{base}.weight_scale"] = table[f"{base}.input_scale"] = Tensor("F32", ())


# -- scales of a tensor ----------------------------------------------------------------------------------------------


def test_a_global_scale_is_neither_inverted_nor_cut() -> None:
    """compressed-tensors divides by 2688 / amax, ModelOpt multiplies by amax / 2688: each stays what it is."""
    x = matrix(128, 256)
    amax = float(np.abs(x).max())
    move = Move({"mlp": 256}, 128, (("mlp", 1),), {"mlp": [*range(64, 256), *[-1] * 64]})
    _, modelopt = moved(move, stored(DIALECTS["NVFP4, ModelOpt"], x))
    _, compressed = moved(move, stored(DIALECTS["NVFP4, compressed-tensors"], x))
    assert modelopt[".weight_scale_2"].words.shape == () and compressed[".weight_global_scale"].words.shape == (1,)
    assert numbers(modelopt[".weight_scale_2"]) == pytest.approx(amax / 2688, rel=1e-6)
    assert numbers(compressed[".weight_global_scale"]) == pytest.approx(2688 / amax, rel=1e-6)


def test_parts_that_an_engine_fuses_keep_their_own_scale() -> None:
    """q, k and v have a scale each; whoever fuses them must see three different ones, unchanged."""
    source = checkpoint("qwen3_5", "nvfp4-mixed")
    given = dict(as_numpy(source))
    made = dict(oddrank.stream(plan("qwen3_5", "nvfp4-mixed", 3), given.items()))
    scales = [f"model.layers.3.self_attn.{p}_proj.weight_scale" for p in "qkv"]
    assert all(made[n] is given[n] and made[n].shape == () for n in scales)
    assert len({int(made[n]) for n in scales}) == 3


@pytest.mark.parametrize(
    ("name", "grows"),
    [
        ("fp8 channel, 1-D", False), ("fp8 channel, compressed-tensors", False), ("fp8 tensor, ModelOpt", False),
        ("fp8 block, HF, bf16 scales", True), ("NVFP4, ModelOpt", True), ("MXFP4, Quark", True),
    ],
)  # fmt: skip
def test_padding_columns_leaves_a_per_channel_scale_alone_and_grows_a_block_scale(name: str, grows: bool) -> None:
    move = Move({"mlp": 256}, 128, (("mlp", 1),), {"mlp": [*range(256), *[-1] * 128]})
    source = sample(name, (128, 256))
    _, result = moved(move, source, DIALECTS[name].quantization)
    suffix = ".weight_scale_inv" if ".weight_scale_inv" in source else ".weight_scale"
    before, after = source[suffix].words, result[suffix].words
    if grows:
        assert after.shape == (before.shape[0], before.shape[1] * 3 // 2)
        assert np.array_equal(after[:, : before.shape[1]], before)
    else:
        assert after.shape == before.shape and np.array_equal(after, before)


# -- widths of whole blocks ------------------------------------------------------------------------------------------


def blocked(mlp: int, *, head_dim: int = 128, q: int = 8, kv: int = 4) -> Subject:
    """qwen3 with every projection in fp8 blocks of 128 x 128."""
    c = config("qwen3", q=q, kv=kv, head_dim=head_dim, hidden=512, mlp=mlp, layers=1)
    table: Table = {}
    for name, (dtype, shape) in tensor_table(c).items():
        if name.endswith("_proj.weight"):
            table[name] = Tensor("F8_E4M3", shape)
            table[f"{name}_scale_inv"] = Tensor("F32", tuple(-(-n // 128) for n in shape))
        else:
            table[name] = Tensor(dtype, shape)
    return subject_of(c, table)


@pytest.mark.parametrize(
    ("mlp", "tp", "total"),
    [
        (512, 3, 768), (512, 8, 1024), (640, 8, 1024), (1536, 8, 2048), (29568, 8, 29696), (29568, 2, 29696),
        (13696, 2, 13824),
    ],
)  # fmt: skip
def test_a_width_that_is_no_multiple_of_blocks_is_padded_to_whole_blocks(mlp: int, tp: int, total: int) -> None:
    """What users hit: 4, 5 and 12 blocks over 8 ranks, 231 blocks over anything, 107 blocks, a prime. Each rank gets
    whole blocks, so kernels' tiles of 64 or 128 fit."""
    layout = planned(blocked(mlp, q=16, kv=8), tp).layout("mlp")
    assert layout.total() == total and set(layout.counts()) == {total // tp} and total // tp % 128 == 0
    assert sum(layout.real()) == mlp


def test_512_channels_in_the_runtime_take_finer_blocks_instead() -> None:
    made = planned(blocked(512), 3, "runtime")
    assert sorted(made.layout("mlp").counts()) == [128, 192, 192] and dict(made.refined) == {"mlp": 64}


def test_two_heads_of_64_share_a_block_and_are_not_parted() -> None:
    """6 query heads of 64 rows are three blocks: at 3 ranks two a rank, at 2 ranks never three."""
    two = planned(blocked(512, head_dim=64, q=6, kv=6), 2)
    for rank in range(2):
        slots = two.layout("q_heads").slots(rank)
        assert len(slots) % 2 == 0
        pairs = slots.reshape(-1, 2)
        assert all((a < 0 and b < 0) or (a % 2 == 0 and b == a + 1) for a, b in pairs.tolist())
    three = planned(blocked(512, head_dim=64, q=6, kv=6), 3)
    assert three.layout("q_heads").counts() == (2, 2, 2) and three.layout("q_heads").total() == 6


# -- what the config says, and what the tensors are ------------------------------------------------------------------


def test_fp8_layers_inside_a_four_bit_model_are_found_per_tensor() -> None:
    """The last layer's MLP in fp8 where the others' is NVFP4 (as layers 56 to 63 of a published model): no rule by
    kind of layer holds, and the plan holds for both."""
    c, table = release("qwen3_5", "nvfp4-mixed")
    for part in ("gate_proj", "up_proj", "down_proj"):
        fp8(table, f"model.layers.3.mlp.{part}")
    fp8(table, "model.layers.2.mlp.up_proj")
    subject = subject_of(c, table)
    assert not subject.census.problems
    found = formats_by_name(subject)
    for layer in range(4):
        for part in ("gate_proj", "up_proj", "down_proj"):
            wanted = "fp8-tensor" if layer == 3 or (layer, part) == (2, "up_proj") else "nvfp4"
            assert found[f"model.layers.{layer}.mlp.{part}.weight"] == wanted
    for executor in ("vllm", "runtime"):
        made = planned(subject, 5, executor)
        assert made.uses == subject.census.uses and sum(made.layout("mlp").real()) == 768


GROUPS: list[Any] = [
    {},
    {"quant_method": "fp8", "modules_to_not_convert": []},
    {"quant_method": "compressed-tensors", "ignore": ["re:.*"], "config_groups": {}},
    {
        "quant_method": "compressed-tensors",
        "ignore": ["model.language_model.layers.0.mlp", "re:.*self_attn.*"],
        "config_groups": {
            "group_0": {"targets": ["Linear"], "weights": {"num_bits": 8, "type": "float", "strategy": "channel"}},
            "group_1": {"targets": ["re:.*mlp.*", "re:.*"], "weights": {"num_bits": 4, "type": "float"}},
        },
    },
]


@pytest.mark.parametrize("said", GROUPS, ids=["nothing", "fp8", "all ignored", "overlapping groups"])
@pytest.mark.parametrize("fmt", ["nvfp4-ct", "nvfp4-mixed", "mxfp4"])
def test_an_ignore_list_or_overlapping_groups_do_not_change_what_a_tensor_is(fmt: str, said: dict[str, Any]) -> None:
    """Prefixes, wildcards and groups in the config are sometimes wrong; the tensors are not."""
    c, table = release("qwen3_5", fmt)
    assert subject_of(c, table, said).census == subject_of(c, table).census


def test_scales_of_the_kv_cache_that_only_hf_quant_config_declares_are_carried_over(tmp_path: Path) -> None:
    """ModelOpt's own file reaches the result as it is, with what it says of the cache."""
    source = checkpoint("qwen3_5", "nvfp4-mixed")
    result = oddrank.pad(plan("qwen3_5", "nvfp4-mixed", 3), source, tmp_path / "out")
    name = "hf_quant_config.json"
    assert (Path(result.path) / name).read_bytes() == (source.path / name).read_bytes()


# -- experts ---------------------------------------------------------------------------------------------------------


def separate(table: Table, at: str) -> None:
    """Replace the stacked experts under `at` by one tensor per expert and projection."""
    dtype, (experts, two, hidden) = table.pop(f"{at}.gate_up_proj")
    table.pop(f"{at}.down_proj")
    for e in range(experts):
        table[f"{at}.{e}.gate_proj.weight"] = table[f"{at}.{e}.up_proj.weight"] = Tensor(dtype, (two // 2, hidden))
        table[f"{at}.{e}.down_proj.weight"] = Tensor(dtype, (hidden, two // 2))


@pytest.mark.parametrize("main", ["stacked", "separate"])
@pytest.mark.parametrize("mtp", ["stacked", "separate"])
def test_stacked_and_separate_experts_are_both_read_even_in_one_model(main: str, mtp: str) -> None:
    c, table = release("qwen3_5_moe", "bf16")
    at = "model.language_model"
    stacked = {f"{at}.layers.{i}.mlp.experts" for i in range(4)} if main == "stacked" else set()
    stacked |= {"mtp.layers.0.mlp.experts"} if mtp == "stacked" else set()
    for name in [n.removesuffix(".gate_up_proj") for n in table if n.endswith("gate_up_proj")]:
        if name not in stacked:
            separate(table, name)
    subject = subject_of(c, table)
    assert not subject.census.problems and not subject.census.unmatched
    made = planned(subject, 3)
    found = formats_by_name(subject)
    for i in range(4):
        assert (f"{at}.layers.{i}.mlp.experts.gate_up_proj" in found) == (main == "stacked")
        assert (f"{at}.layers.{i}.mlp.experts.7.up_proj.weight" in found) == (main == "separate")
    assert ("mtp.layers.0.mlp.experts.down_proj" in found) == (mtp == "stacked")
    assert sum(made.layout("moe").real()) == 256 and made.layout("moe").total() % 3 == 0


def test_experts_stacked_in_some_layers_and_separate_in_others_are_named() -> None:
    """No release mixes the two inside its main layers; what is absent is said, nothing is skipped."""
    c, table = release("qwen3_5_moe", "bf16")
    separate(table, "model.language_model.layers.1.mlp.experts")
    problems = " ".join(subject_of(c, table).census.problems)
    assert "model.language_model.layers.1.mlp.experts.gate_up_proj is missing" in problems
    assert "model.language_model.layers.1.mlp.experts.7.down_proj.weight BF16 [256, 256] has no role" in problems


# -- what cannot be read is named ------------------------------------------------------------------------------------


def refusal(c: dict[str, Any], table: Table) -> tuple[Census, str]:
    subject = subject_of(c, table)
    with pytest.raises(OddrankError) as caught:
        planned(subject)
    return subject.census, str(caught.value)


DOWN = "model.language_model.layers.2.mlp.experts.5.down_proj"


@pytest.mark.parametrize(
    ("family", "fmt", "name", "expected"),
    [
        ("qwen3_5_moe", "nvfp4-mixed", f"{DOWN}.weight_scale", r"F8_E4M3 [256, 16]"),
        ("qwen3_5_moe", "nvfp4-mixed", f"{DOWN}.weight_scale_2", "[]"),
        ("qwen3_5_moe", "nvfp4-ct", f"{DOWN}.weight_global_scale", "[1]"),
        ("qwen3_5_moe", "mxfp4", f"{DOWN}.weight_scale", "[256, 8]"),
        ("qwen3_5_moe", "fp8-block", f"{DOWN}.weight_scale_inv", "[2, 2]"),
        ("qwen3_5", "nvfp4-ct", "model.layers.3.self_attn.o_proj.weight_scale", "[256, 1]"),
        ("qwen3_5", "mxfp4", "mtp.layers.0.self_attn.o_proj.weight_scale", "[256]"),
    ],
)
@pytest.mark.parametrize("how", ["missing", "misshapen"])
def test_a_scale_that_is_missing_or_misshapen_is_named(
    family: str, fmt: str, name: str, expected: str, how: str
) -> None:
    c, table = release(family, fmt)
    found = table.pop(name)
    if how == "misshapen":
        table[name] = Tensor(found.dtype, (*found.shape[:-1], 7) if found.shape else (3,))
    census, message = refusal(c, table)
    assert len(census.problems) == 1 and name in message and expected in message
    if how == "misshapen":
        assert f"{name} is {found.dtype} {list(table[name].shape)} instead of" in message
    else:
        assert "is missing" in message


def test_a_dtype_that_no_format_has_is_named() -> None:
    c, table = release("qwen3_5", "fp8-block")
    name = "model.layers.0.mlp.up_proj.weight"
    table[name] = Tensor("F8_E5M2", table[name].shape)
    _, message = refusal(c, table)
    assert "model.layers.0.mlp.up_proj" in message and "F8_E5M2 [768, 256]" in message and "no known format" in message


@pytest.mark.parametrize("dialect", ["GPTQ", "AWQ", "W4A16"])
def test_integer_words_with_zero_points_are_taken_for_nothing_else(dialect: str) -> None:
    """A word of zeros is not a weight of zero there, and what is one only their own config says: under another no
    format may claim them; each tensor is named."""
    c, table = release("qwen3_5", "nvfp4-mixed")
    base = "model.layers.0.mlp.up_proj"
    for suffix in ("weight", "weight_scale", "weight_scale_2", "input_scale"):
        table.pop(f"{base}.{suffix}")
    n, k, g = 768, 256, 128
    table |= {
        "GPTQ": {
            f"{base}.qweight": Tensor("I32", (k // 8, n)), f"{base}.qzeros": Tensor("I32", (k // g, n // 8)),
            f"{base}.scales": Tensor("F16", (k // g, n)), f"{base}.g_idx": Tensor("I32", (k,)),
        },
        "AWQ": {
            f"{base}.qweight": Tensor("I32", (k, n // 8)), f"{base}.qzeros": Tensor("I32", (k // g, n // 8)),
            f"{base}.scales": Tensor("F16", (k // g, n)),
        },
        "W4A16": {
            f"{base}.weight_packed": Tensor("I32", (n, k // 8)), f"{base}.weight_scale": Tensor("BF16", (n, k // g)),
            f"{base}.weight_shape": Tensor("I64", (2,)),
        },
    }[dialect]  # fmt: skip
    census, message = refusal(c, table)
    assert base in message and "only where quantization_config says so" in message
    (named,) = [problem for problem in census.problems if problem.startswith(base)]
    assert all(name.removeprefix(base) in named for name in table if name.startswith(f"{base}."))
    assert base not in {n.removesuffix(".weight") for n in formats_by_name(subject_of(c, table))}


def test_the_plan_says_how_each_tensor_is_stored_and_survives_json() -> None:
    """Formats with their usual and with other parameters come back by name."""
    c, table = release("qwen3", "fp8-block")
    for name in [n for n in table if n.endswith("weight_scale_inv")]:
        n, k = table[name.removesuffix("_scale_inv")].shape
        table[name] = Tensor("F32", (-(-n // 64), -(-k // 32)))
    said = c["quantization_config"] | {"weight_block_size": [64, 32]}
    made = planned(subject_of(c, table, said))
    assert "fp8-block-64x32" in {use.format for use in made.uses}
    again = Plan.from_json(made.to_json())
    assert again == made and msgspec.json.decode(made.to_json())["uses"]
