"""Layers one by one, against transformers, float64 and plain loops."""

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama.modeling_llama import LlamaRMSNorm, LlamaRotaryEmbedding, apply_rotary_pos_emb

from oddrank.native import library
from oddrank.runtime.cache import BLOCK, KVCache
from oddrank.runtime.layers.attention import Attention, HeadMap
from oddrank.runtime.layers.kernels import (
    DenseFormat,
    HalfPackedWeight,
    LinearWeight,
    NarrowWeight,
    Rows,
    half_packing_works,
)
from oddrank.runtime.layers.module import Parameter
from oddrank.runtime.layers.norm import RMSNorm
from oddrank.runtime.layers.rotary import RotaryEmbedding
from oddrank.runtime.precision import Precision
from oddrank.runtime.step import Step

ROPES = {
    "default": {},
    "linear": {"factor": 3.0},
    "dynamic": {"factor": 3.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn mscale": {
        "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 1.3,
        "beta_fast": 20, "beta_slow": 2, "truncate": False,
    },
    "yarn attention": {"factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 0.5},
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(ROPES))
def test_rotary_is_that_of_transformers(name: str) -> None:
    rope = {"rope_type": name.split()[0], "rope_theta": 10000.0, **ROPES[name]}
    limit = 256
    config = transformers.LlamaConfig(
        hidden_size=64, num_attention_heads=2, head_dim=32, max_position_embeddings=limit, rope_parameters=rope
    )
    # beyond the model's positions too, where "dynamic" stretches
    for length in (5, 200, limit + 100):
        positions = torch.arange(length)
        q, k = torch.randn(2, 1, 3, length, 32)
        theirs = apply_rotary_pos_emb(q, k, *LlamaRotaryEmbedding(config)(q, positions[None]))
        rotary = RotaryEmbedding(rope, 32, limit, torch.float32)(positions, [(length, length)])
        for x, y in zip((q, k), theirs, strict=True):
            ours = rotary.apply_(x[0].transpose(0, 1).clone()).transpose(0, 1)
            # transformers computes the stretched base in fp32, which angles of a few hundred magnify
            assert torch.allclose(ours, y[0], rtol=0, atol=1e-4 if name == "dynamic" else 2e-6)


def test_dynamic_rotary_goes_by_each_sequence() -> None:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    make = RotaryEmbedding(rope, 8, 16, torch.float32)
    assert make.limit == 32
    short, long = torch.arange(4), torch.arange(20)
    both = make(torch.cat([short, long]), [(4, 4), (20, 20)])
    assert torch.equal(both.cos[:4], make(short, [(4, 4)]).cos)
    assert torch.equal(both.cos[4:], make(long, [(20, 20)]).cos)
    assert not torch.equal(both.cos[4:8], both.cos[:4])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rms_norm_is_that_of_transformers(dtype: torch.dtype) -> None:
    theirs = LlamaRMSNorm(48, 1e-4).to(dtype)
    torch.nn.init.normal_(theirs.weight)
    ours = RMSNorm("norm", 48, 1e-4, dtype)
    ours.weight.fill(theirs.weight.detach())
    x = (torch.randn(7, 48) * torch.logspace(-3, 3, 7)[:, None]).to(dtype)
    with torch.no_grad():
        want = theirs(x)
    if dtype == torch.float32:
        assert torch.allclose(ours(x), want, rtol=2e-6, atol=0)
    else:
        assert torch.equal(ours(x), want)


def test_rms_norm_in_float64_has_no_fp32_in_it() -> None:
    ours = RMSNorm("norm", 5, 1e-4, torch.float64)
    ours.weight.fill(torch.randn(5, dtype=torch.float64))
    x = torch.randn(3, 5, dtype=torch.float64)
    want = torch.stack([row / torch.sqrt((row @ row) / 5 + 1e-4) * ours.weight.data for row in x])
    assert torch.allclose(ours(x), want, rtol=1e-14, atol=0)


# -- kernels -----------------------------------------------------------------------------------------------


def _weight(kind: type[NarrowWeight], values: torch.Tensor, threads: int = 1) -> NarrowWeight:
    parameter = Parameter([("w.weight", len(values))], tuple(values.shape[1:]), values.dtype)
    parameter.fill(values)
    weight = kind(parameter)
    for _ in range(2):  # the second changes nothing
        weight.prepare(threads)
    return weight


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("n,k", [(48, 20), (33, 7), (1, 64), (2200, 1000)])
def test_packed_weights_multiply_in_fp32(dtype: torch.dtype, threads: int, n: int, k: int) -> None:
    if not half_packing_works():
        pytest.skip("this build of torch has no packed fp16 product")
    values = (torch.randn(n, k) * 0.05).to(dtype)
    weight = _weight(HalfPackedWeight, values, threads)
    assert weight.weight.tensor is None
    assert weight.nbytes() <= (n + 15) * k * 2
    bias = torch.randn(n)
    for m in (1, 2, 5, 67):
        x = torch.randn(m, k)
        exact = x.double() @ values.double().t()
        for given_bias in (None, bias):
            want = exact if given_bias is None else exact + bias
            got = weight(x, given_bias)
            assert got.dtype == torch.float32
            # fp32's rounding of k products, far below the 2^-9 by which bf16 rounds a single one
            assert float((got - want).abs().max()) < 2e-6 * k**0.5
    assert torch.get_num_threads() == 1  # as before, whatever the products took


def test_a_large_matrix_is_packed_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    if not half_packing_works():
        pytest.skip("this build of torch has no packed fp16 product")
    monkeypatch.setattr("oddrank.runtime.layers.kernels._PACK_ELEMENTS", 64 * 10)
    values = torch.randn(150, 10).bfloat16()
    weight = _weight(HalfPackedWeight, values)
    assert isinstance(weight, HalfPackedWeight) and len(weight._packs) == 3
    x = torch.randn(2, 10)
    assert torch.allclose(weight(x).double(), x.double() @ values.double().t(), atol=1e-5)


@pytest.mark.parametrize("scale", [1e6, 1e-6])
def test_weights_that_fp16_does_not_hold_are_not_packed(scale: float) -> None:
    values = (torch.randn(32, 16) * scale).bfloat16()
    weight = _weight(HalfPackedWeight, values)
    assert weight.weight.tensor is values
    x = torch.randn(8, 16)
    want = x.double() @ values.double().t()
    assert float((weight(x) - want).abs().max() / want.abs().max()) < 1e-5


def test_packing_changes_small_weights_by_less_than_it_says() -> None:
    """bf16 numbers from 2^-24 to 2^-10 beside one of 2^-9: at most 2^-25 off each."""
    if not half_packing_works():
        pytest.skip("this build of torch has no packed fp16 product")
    values = torch.cat([torch.tensor([2.0**-9]), torch.rand(63).bfloat16().float() * torch.logspace(-24, -10, 63, 2)])
    values = values.bfloat16()[:, None]
    held = _weight(HalfPackedWeight, values)(torch.ones(1, 1))[0].double()
    off = (held - values[:, 0].double()).abs()
    assert float(off.max()) <= 2.0**-25
    assert float(off[values[:, 0] >= 2.0**-17].max()) == 0
    assert float(off.max()) > 0  # the bound is about something


@pytest.mark.parametrize("m", [1, 3, 4, 9])
def test_narrow_weights(m: int) -> None:
    values = (torch.randn(70, 40) * 0.1).bfloat16()
    weight = _weight(NarrowWeight, values)
    x, bias = torch.randn(m, 40), torch.randn(70)
    error = float((weight(x, bias) - (x.double() @ values.double().t() + bias)).abs().max())
    found = library()
    rounds = m <= 3 or (found is not None and found.level == "avx512bf16")  # x to bf16, whose step is 2^-8
    assert error < (2e-2 if rounds else 5e-6)
    rows = torch.tensor([3, 69, 0])
    assert torch.allclose(weight.exact(x[0], rows), values[rows].float() @ x[0], atol=1e-5)


def test_format_gives_the_weight_of_the_parts() -> None:
    for name, kind in (("fp64", torch.float64), ("fp32", torch.float32), ("bf16", torch.bfloat16)):
        weight = DenseFormat(Precision.of(name)).linear([Rows("a", 3), Rows("b", 0), Rows("c", 2)], 4)
        (parameter,) = weight.parameters()
        assert [(p.name, p.index) for p in parameter.parts] == [
            ("a.weight", (slice(0, 3),)), ("b.weight", (slice(3, 3),)), ("c.weight", (slice(3, 5),)),
        ]  # fmt: skip
        assert parameter.shape == (5, 4) and parameter.dtype == kind
        assert isinstance(weight, LinearWeight)


# -- attention ---------------------------------------------------------------------------------------------


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_head_map_groups_every_query_at_its_kv_slot(data: st.DataObject) -> None:
    kv = data.draw(st.integers(1, 5))
    partner = np.array(data.draw(st.lists(st.integers(0, kv - 1), max_size=12)), dtype=np.int64)
    heads = HeadMap(partner, kv)
    members = np.arange(len(partner)) if heads.members is None else heads.members.numpy()
    place = np.arange(len(partner)) if heads.place is None else heads.place.numpy()
    assert len(members) == kv * heads.group
    for slot, at in enumerate(place):
        assert members[at] == slot
        assert at // heads.group == partner[slot]
    if heads.members is None and len(partner):
        assert (partner == np.arange(len(partner)) // (len(partner) // kv)).all()


def _loops(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, partner: np.ndarray, window: int | None) -> torch.Tensor:
    """Attention of one sequence written out: q [T, heads, d], k and v [T, kv, d]."""
    out = torch.empty_like(q)
    for t in range(len(q)):
        first = 0 if window is None else max(0, t + 1 - window)
        for h, j in enumerate(partner):
            weights = torch.softmax(k[first : t + 1, j] @ q[t, h] * 0.3, 0)
            out[t, h] = weights @ v[first : t + 1, j]
    return out


@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("partner", [[0, 0, 1, 1], [0, 1], [1, 0, 0], [2, 2, 0, 1, 2], [1, 1]])
def test_attention_over_a_batch(partner: list[int], window: int | None) -> None:
    torch.manual_seed(0)
    kv_heads, dim, lengths, more = 3, 6, [7, 2, 4], 4
    to = np.array(partner)
    sequences = [
        (torch.randn(n + more, len(to), dim).double(), torch.randn(2, n + more, kv_heads, dim).double())
        for n in lengths
    ]
    wanted = [_loops(q, kv[0], kv[1], to, window) for q, kv in sequences]
    cache = KVCache(1, 3, kv_heads, dim, torch.float64)
    attention = Attention(HeadMap(to, kv_heads), 0, 0.3, window)

    def run(pieces: list[tuple[int, int, int]]) -> None:
        """(slot, from, to) of the sequences, in one step."""
        step = Step.of([(s, [0] * (b - a), a) for s, a, b in pieces], "cpu")
        cache.reserve(step.longest)
        q = torch.cat([sequences[s][0][a:b] for s, a, b in pieces])
        kv = torch.cat([sequences[s][1][:, a:b].transpose(0, 1).flatten(1, 2) for s, a, b in pieces])
        got = attention(q, kv, step, cache).split([b - a for _, a, b in pieces])
        for (s, a, b), part in zip(pieces, got, strict=True):
            assert torch.allclose(part, wanted[s][a:b], rtol=0, atol=1e-12)

    run([(0, 0, 3), (1, 0, 2)])
    run([(2, 0, 4), (0, 3, 7)])
    for i in range(more):
        run([(s, n + i, n + i + 1) for s, n in enumerate(lengths)])


def test_cache_grows_and_moves() -> None:
    cache = KVCache(2, 2, 3, 4, torch.float32)
    assert cache.nbytes() == 0
    cache.reserve(10)
    assert cache.capacity == BLOCK and cache.nbytes() == 2 * 2 * 2 * 3 * BLOCK * 4 * 4
    values = torch.randn(6, 10, 4)
    cache.layer(1)[1, :, :10] = values
    cache.reserve(BLOCK)
    assert cache.capacity == BLOCK
    cache.reserve(BLOCK + 1)
    assert cache.capacity == 2 * BLOCK
    assert torch.equal(cache.layer(1)[1, :, :10], values)
    assert not cache.layer(1)[1, :, 10:].any()
    cache.move(1, 0, 10)
    assert torch.equal(cache.layer(1)[0, :, :10], values)
