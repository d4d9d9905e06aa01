"""Releases of integers and of MXFP8 in the runtime, against transformers on the same weights decoded by numpy."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from formats.codec import Parts, Raw, decode, numbers
from formats.integers import awq, ct, gptq, packed, unpacked
from formats.packed_models import write
from hybrid import tiny as hybrid
from proof import tiny as plain
from proof.tiny import F64, Weights
from runtime.quantized.hybrids import distance, fp32_angles
from stream.releases import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from oddrank.checkpoint import Checkpoint
from oddrank.layout.plan import Plan
from oddrank.native import library
from oddrank.planner import make_plan
from oddrank.runtime.experts.layer import Experts
from oddrank.runtime.formats import decoder
from oddrank.runtime.layers.kernels import Rows
from oddrank.runtime.layers.stored import PackedWeight, StoredFormat
from oddrank.runtime.loader import prepare
from oddrank.runtime.models import Llama
from oddrank.runtime.models.llama import full_logits
from oddrank.runtime.parallel import Group, LocalGroup
from oddrank.runtime.precision import Precision
from oddrank.runtime.step import Step
from oddrank.runtime.worker import load_rank
from oddrank.transform.slice import StoredMatrix

CASES = [
    ("llama", "int4-ct"), ("llama", "int4-ct-asym"), ("llama", "int8"), ("llama", "int8-ct"), ("mistral", "awq"),
    ("qwen2", "gptq"), ("qwen2", "gptq-int8"), ("qwen3", "auto-round"), ("qwen3", "auto-round-awq"),
    ("qwen3_5", "gptq"), ("qwen3_5_moe", "awq"), ("qwen3_5_moe", "int4-ct"), ("qwen3", "mxfp8"),
]  # fmt: skip
TOKENS = np.random.default_rng(5).integers(0, 512, 14).tolist()
_HOME = TemporaryDirectory(prefix="oddrank-ordered-")


def packing(fmt: str, group: int) -> Any:
    match fmt:
        case "gptq" | "auto-round":
            return gptq(group=group, index=fmt == "gptq")
        case "gptq-int8":
            return gptq(8, group)
        case "awq" | "auto-round-awq":
            return awq(group)
        case "int8-ct":
            return ct(8, 0)
    return ct(4, group, symmetric=fmt == "int4-ct")


def group_of(config: dict[str, Any]) -> int:
    groups = config.get("config_groups")
    return int((groups["group_0"]["weights"] if groups else config)["group_size"] or 0)


def decoded(source: Checkpoint, fmt: str) -> Weights:
    """Every tensor's numbers by its dense name."""
    stored: dict[str, dict[str, Raw]] = {}
    for name, tensor in source.tensors.items():
        base, _, leaf = name.rpartition(".")
        if leaf.startswith(("weight_", "q", "scales", "g_idx")) or f"{base}.weight_scale" in source.tensors:
            stored.setdefault(f"{base}.weight", {})[f".{leaf}"] = Raw(tensor.dtype, source.array(name))
        else:
            stored[name] = {"": Raw(tensor.dtype, source.array(name))}
    form = packing(fmt, group_of(source.config["quantization_config"]))

    def read(parts: Parts) -> F64:
        if "" in parts:
            return numbers(parts[""])
        block = {"int8": (1, 0), "mxfp8": (1, 32)}.get(fmt)
        return decode(parts, block) if block else form.decode(parts)

    return {name: read(parts) for name, parts in stored.items()}


def logits_of(config: dict[str, Any], weights: Weights) -> F64:
    """In float64 throughout, so that all of the difference is the runtime's."""
    config = {k: v for k, v in config.items() if k != "quantization_config"}
    if "qwen3_5" not in config["model_type"]:
        with plain_angles(config):
            return plain.transformers_logits(config, weights, TOKENS)
    with fp32_angles(config, len(TOKENS)):
        return hybrid.transformers_logits(config, weights, TOKENS)


@contextmanager
def plain_angles(config: dict[str, Any]) -> Iterator[None]:
    """transformers' rotary embedding as it is without any redirected cast, as fp32_angles has it."""
    kind = config["model_type"]
    module = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    (cls,) = (v for n, v in vars(module).items() if n.endswith("RotaryEmbedding"))
    tables = cls(plain.transformers_config(config))(torch.zeros(()).double(), torch.arange(len(TOKENS))[None])
    with mock.patch.object(cls, "forward", lambda self, x, position_ids: tables):
        yield


@cache
def reference(family: str, fmt: str) -> F64:
    source = checkpoint(family, fmt)
    return logits_of(source.config, decoded(source, fmt))


def on_ranks(source: Checkpoint, made: Plan, work: Any, dtype: str) -> list[Any]:
    def rank(group: Group) -> Any:
        return work(load_rank(made, source, group, Precision.of(dtype))[0])

    with torch.inference_mode():
        return LocalGroup.run(made.tp, rank)


def in_steps(model: Llama) -> torch.Tensor:
    """A prompt in two chunks, then cached steps, by what `prepare` chose."""
    prepare(model)
    cache, rows, at = model.new_cache(1), [], 0
    for count in (8, 3, 1, 1, 1):
        rows.append(model.logits(model(Step.of([(0, TOKENS[at : at + count], at)], "cpu"), cache)))
        at += count
    return torch.cat(rows)


@pytest.mark.parametrize(("family", "fmt"), CASES)
def test_logits_of_transformers(family: str, fmt: str) -> None:
    """On 1, 2 and 3 ranks: in fp64 by the decoders of what is stored, in fp32 and bf16 by what is held."""
    source, found = checkpoint(family, fmt), library()
    rounded = 0.02 if found is not None and found.level == "avx512bf16" else 1e-3  # bf16 tensors: see there
    for tp in (1, 2, 3):
        made = make_plan(source.path, tp).plan
        for logits in on_ranks(source, made, lambda m: full_logits(m, TOKENS), "fp64"):
            assert distance(logits, reference(family, fmt)) < 1e-9
        for dtype in ("fp32", "bf16") if tp == 2 else ("fp32",):
            for logits in on_ranks(source, made, in_steps, dtype):
                bound = 1e-4 if dtype == "fp32" else rounded
                assert distance(logits.double(), reference(family, fmt)) < bound


def test_what_is_computed_by_the_compiled_kernels() -> None:
    """All packed matrices, routed experts too, and no second copy of one."""
    if library() is None:
        pytest.skip("the package was installed without a C++ compiler")

    def count(model: Llama) -> tuple[int, int]:
        prepare(model)
        weights = [m for m in model.modules() if isinstance(m, PackedWeight)]
        assert all(w.native is not None and not w.parts for w in weights)
        layers = [m for m in model.modules() if isinstance(m, Experts)]
        for layer in layers:
            banks = layer._host or layer._device
            assert banks is not None
            assert {*banks.gate_up.tensors} == {".codes", ".scales"}
            assert layer._kernel.native(banks.gate_up.tensors, banks.down.tensors) is not None
        return len(weights), len(layers)

    packed = ("qwen2", "gptq"), ("qwen2", "gptq-int8"), ("llama", "int8-ct"), ("qwen3_5_moe", "awq")
    for family, fmt in (*packed, ("qwen3_5_moe", "int4-ct")):
        source = checkpoint(family, fmt)
        for weights, layers in on_ranks(source, make_plan(source.path, 2).plan, count, "bf16"):
            assert weights > 3 and (layers > 0) == (family == "qwen3_5_moe")


def ordered(*layers: str) -> Checkpoint:
    """A model quantized with desc_act whose columns are scattered over scale groups in these layers only."""

    def change(base: str, parts: dict[str, Raw]) -> dict[str, Raw]:
        if not base.endswith(layers):
            return parts
        q = unpacked(parts[".qweight"], 4, 0)
        order = np.random.default_rng(len(base)).permutation(len(q))
        index = (np.arange(len(q)) // 32)[order].astype(np.uint32)
        return {**parts, ".qweight": packed(q[order], 4, 0), ".g_idx": Raw("I32", index)}

    said = gptq(group=32, scatter=3).config
    folder = Path(_HOME.name) / "-".join(layers)
    return write(folder, gptq(group=32), change=change, said=said, vocab=512)


@pytest.mark.parametrize("tp", [1, 2, 3])
def test_columns_in_activation_order(tp: int) -> None:
    """Where only rows are cut on several ranks; everywhere on one."""
    cut = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
    source = ordered(*cut) if tp > 1 else ordered(*cut, "o_proj", "down_proj")
    want, made = logits_of(source.config, decoded(source, "gptq")), make_plan(source.path, tp).plan
    for dtype, work, bound in (("fp64", lambda m: full_logits(m, TOKENS), 1e-9), ("fp32", in_steps, 1e-4)):
        for logits in on_ranks(source, made, work, dtype):
            assert distance(logits.double(), want) < bound


class Allocations(TorchDispatchMode):
    """Notes the bytes of every tensor that an operation makes, views apart."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and not t.is_meta and t.untyped_storage().data_ptr() not in given:
                self.made.append(t.untyped_storage().nbytes())
        return out


class Words:
    """A matrix's stored tensors, as a rank slice has them."""

    def __init__(self, form: str, n: int, k: int) -> None:
        self.form, made = form, decoder(form)
        draw = np.random.default_rng(0)
        self.raw = {}
        for part in made.format.stored:
            shape = made.shape(part.suffix, n, k)
            scales = draw.integers(0x2000, 0x2400, shape, np.uint16) if "F16" in part.dtypes else None
            self.raw[part.suffix] = draw.integers(0, 2**32, shape, np.uint32) if scales is None else scales
        if ".g_idx" in self.raw:
            self.raw[".g_idx"] = draw.permutation(np.arange(k) // 128).astype(np.uint32)

    def matrix(self, name: str) -> StoredMatrix:
        return StoredMatrix(self.form, {suffix: suffix for suffix in self.raw}, {})

    def shape(self, name: str) -> tuple[int, ...]:
        return self.raw[name].shape

    def dtype(self, name: str) -> str:
        return "F16" if self.raw[name].dtype == np.uint16 else "I32"

    def read_into(self, name: str, out: Any) -> None:
        out[...] = self.raw[name]

    def read_rows_into(self, name: str, start: int, out: Any) -> None:
        out[...] = self.raw[name][start : start + len(out)]


def test_a_gpu_is_given_rows_too() -> None:
    """As Triton's kernels take them: packed in the machine's memory, then moved."""
    pytest.importorskip("triton")
    words, precision = Words("int4-awq-g128", 64, 256), Precision.of("bf16", "cuda")
    weight = StoredFormat(words, precision, "cuda").linear([Rows("", 64)], 256)
    assert isinstance(weight, PackedWeight) and weight._device == "cuda"
    weight._device = "meta"
    weight.load_own(words)
    assert {s: (t.shape, t.device.type) for s, t in weight._stored().items()} == {
        ".codes": ((64, 128), "meta"), ".scales": ((64, 2, 4), "meta"),
    }  # fmt: skip


@pytest.mark.parametrize(
    "form",
    ["int4-awq-g128", "int4-gptq-g128", "int4-gptq-scattered-g128", "int8-gptq-g128", "int8-gptq-scattered-g128"],
)
def test_a_matrix_is_packed_in_pieces(form: str) -> None:
    """Beside what is held of 17 MB nothing larger than two is made; whatever the pieces, they become the same."""
    if library() is None:
        pytest.skip("the package was installed without a C++ compiler")
    n, k, bits = 8192, 4096, int(form[3])
    words, precision = Words(form, n, k), Precision.of("bf16")
    weight = StoredFormat(words, precision).table("", n, k)
    with Allocations() as seen:
        weight.load_own(words)
    held = sorted(t.nbytes for t in weight._stored().values() if t.nbytes >= 1 << 20)
    assert held == [n * k // 128 * bits, n * k * bits // 8] and sorted(seen.made)[-2:] == held
    assert sorted(seen.made)[-3] <= 2 << 20
    kinds = {2: np.float16, 4: np.int32}
    stored = {suffix: torch.from_numpy(raw.view(kinds[raw.itemsize])) for suffix, raw in words.raw.items()}
    rows = torch.tensor([0, 7, 8, 4095, 8191])
    want = decoder(form).take(stored, rows, torch.float64)
    got = weight.decoder.take(weight._stored(), rows, torch.float64)
    assert torch.equal(got, want)
