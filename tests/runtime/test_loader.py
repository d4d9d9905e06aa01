"""Loading: every parameter once, every stored tensor used, nothing kept beyond the slice."""

from typing import Any

import numpy as np
import pytest
import torch
from runtime.tiny import Tiny, TinySlice, ragged, tiny

from oddrank.errors import OddrankError
from oddrank.runtime.loader import load
from oddrank.runtime.models import Llama, build_model
from oddrank.runtime.parallel import LocalGroup, SoloGroup
from oddrank.runtime.precision import Precision


@pytest.fixture(scope="module")
def model() -> Tiny:
    return tiny("llama")


class _Renamed(TinySlice):
    """A slice whose names, shapes and dtypes can be changed."""

    def __init__(self, model: Tiny, change: dict[str, Any]) -> None:
        super().__init__(model, ragged(model, 1), 0)
        self.change = change

    def names(self) -> list[str]:
        gone = self.change.get("gone")
        return [n for n in super().names() if n != gone] + self.change.get("more", [])

    def shape(self, name: str) -> tuple[int, ...]:
        return self.change.get("shape", {}).get(name) or super().shape(name)

    def dtype(self, name: str) -> str:
        return self.change.get("dtype", {}).get(name) or super().dtype(name)


def _build(model: Tiny, part: TinySlice, dtype: str = "fp64") -> Llama:
    return build_model(model.family, model.config, part, SoloGroup(), Precision.of(dtype))


@pytest.mark.parametrize(
    "change,words",
    [
        ({"gone": "model.layers.1.mlp.up_proj.bias"}, "1 tensors.*model.layers.1.mlp.up_proj.bias"),
        ({"more": ["model.layers.0.extra.weight"]}, "model.layers.0.extra.weight.*no parameter"),
        ({"more": ["model.norm.weight"]}, "model.norm.weight"),
        ({"shape": {"model.norm.weight": (28,)}}, r"model.norm.weight.*\[28\].*\[27\]"),
        ({"dtype": {"model.norm.weight": "F8_E4M3"}}, "model.norm.weight.*F8_E4M3"),
    ],
)
def test_disagreement_is_an_error(model: Tiny, change: dict[str, Any], words: str) -> None:
    part = _Renamed(model, change)
    with pytest.raises(OddrankError, match=words):
        load(_build(model, part), part)


def test_a_parameter_is_not_used_before_it_is_loaded(model: Tiny) -> None:
    made = _build(model, TinySlice(model, ragged(model, 1), 0))
    with pytest.raises(OddrankError, match="before it was loaded"):
        made.norm(torch.ones(1, 27, dtype=torch.float64))


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", ["bf16", "fp32", "fp64"])
def test_every_value_arrives_in_its_place(model: Tiny, stored: torch.dtype, dtype: str) -> None:
    """The fused parameters hold each part's rows; conversion is torch's."""
    part = TinySlice(model, ragged(model, 1), 0, stored)
    made = _build(model, part, dtype)
    load(made, part)
    filled = {p.name: p for m in made.modules() for p in m.parameters()}
    seen = 0
    for parameter in filled.values():
        for rows in parameter.parts:
            want = model.state[rows.name].to(stored).to(parameter.dtype)
            assert torch.equal(parameter.data[rows.index], want), rows.name
            seen += 1
    assert seen == len(model.state)


def test_a_rank_keeps_its_slice(model: Tiny) -> None:
    """All ranks together: what is cut once, what is whole on each; a tied head costs nothing."""
    for family in ("llama", "qwen3"):
        source = tiny(family)
        stored = sum(t.nbytes for t in source.state.values())
        layout = ragged(source, 3)

        def rank(group: Any, source: Tiny = source, layout: Any = layout) -> tuple[int, int, int]:
            part = TinySlice(source, layout, group.rank)
            made = build_model(source.family, source.config, part, group, Precision.of("fp64"))
            loaded = load(made, part)
            slice_bytes = sum(8 * int(np.prod(part.shape(n))) for n in part.names())
            return loaded.stored_bytes, loaded.kept_bytes, slice_bytes

        ranks = LocalGroup.run(3, rank)
        for stored_bytes, kept, slice_bytes in ranks:
            assert kept == stored_bytes == slice_bytes < 0.6 * stored
        assert sum(kept for _, kept, _ in ranks) < 1.5 * stored


def test_mapped_pages_are_dropped_after_each_tensor(model: Tiny) -> None:
    part = TinySlice(model, ragged(model, 1), 0)
    released: list[str] = []
    load(_build(model, part), part, released.append)
    assert released == part.names()


def test_no_parameter_shares_memory_with_what_was_read(model: Tiny) -> None:
    part = TinySlice(model, ragged(model, 1), 0)
    made = _build(model, part)
    load(made, part)
    theirs = [(t.data_ptr(), t.data_ptr() + t.nbytes) for t in part._tensors.values()]
    for parameter in made.parameters():
        at = parameter.data.data_ptr()
        assert not any(start <= at < end for start, end in theirs)
