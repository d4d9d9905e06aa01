"""Every placement with every stored form: what a rank keeps, multiplies and adds, against numpy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from formats.codec import Raw
from runtime.quantized.stores import EVERY, PACKED, Matrix, Store

from oddrank.errors import OddrankError
from oddrank.runtime.layers.kernels import Rows
from oddrank.runtime.layers.linear import ColumnParallelLinear, MergedColumnParallelLinear, RowParallelLinear
from oddrank.runtime.layers.stored import StoredWeight
from oddrank.runtime.layers.vocab import ParallelLMHead, VocabParallelEmbedding
from oddrank.runtime.parallel import Group, LocalGroup
from oddrank.runtime.precision import Precision

NAMES = sorted(EVERY)
F64 = torch.float64
EXACT = {"rtol": 1e-12, "atol": 1e-12}


def span(*bounds: tuple[int, int]) -> list[int]:
    return [i for a, b in bounds for i in range(a, b)]


def pairs() -> list[tuple[str, str, str]]:
    """Each form once first, once in the middle, once last, beside two others."""
    return [(NAMES[i], NAMES[(i + 5) % len(NAMES)], NAMES[(i + 7) % len(NAMES)]) for i in range(len(NAMES))]


@pytest.mark.parametrize("names", pairs(), ids="+".join)
def test_merged_columns_stored_each_in_another_way(names: Sequence[str]) -> None:
    """Parts of different sizes, magnitudes and formats, one with no row on this rank; per-tensor scales stay with their
    own part (traps: 13)."""
    sizes = {"p0": 64, "none": 0, "p1": 128, "p2": 192}
    parts = {f"p{i}": Matrix.of(name, sizes[f"p{i}"], 192, seed=i) for i, name in enumerate(names)}
    real = torch.from_numpy(np.concatenate([m.decode() for m in parts.values()]))
    parts["none"] = Matrix.of(names[0], 128, 192).cut([], None)
    biases = {f"{name}.bias": np.arange(n) * 0.5 for name, n in sizes.items()}
    for bias in (False, True):
        store = Store(parts, biases if bias else None)
        rows = [Rows(name, n) for name, n in sizes.items()]
        layer = MergedColumnParallelLinear(store.weights(), rows, 192, bias=bias, dtype=F64)
        store.fill(layer)
        x = torch.randn(5, 192, dtype=F64)
        want = x @ real.t() + (torch.from_numpy(np.concatenate(list(biases.values()))) if bias else 0)
        assert torch.allclose(layer(x), want, **EXACT)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_kept_as_stored(name: str) -> None:
    """In bytes too: nothing is decoded until it is multiplied by (dense weights go into the type asked for)."""
    m = Matrix.of(name, 256, 192)
    layer = ColumnParallelLinear(Store({"l": m}).weights("fp32"), "l", 256, 192, bias=False, dtype=torch.float32)
    Store({"l": m}).fill(layer)
    kept = sum(raw.words.nbytes for raw in m.parts.values())
    if name in PACKED:  # in rows: codes, a word a scale, of 8 bits another a zero point
        bits, points = int(m.dialect.format[3]), any(s.endswith(("qzeros", "zero_point")) for s in m.parts)
        words = 8 if bits == 8 and points else 4
        kept = 256 * 192 * bits // 8 + 256 * -(-192 // (m.dialect.block[1] or 128)) * words
    assert layer.nbytes() == kept
    x = torch.randn(2, 192)
    want = x.double() @ torch.from_numpy(m.decode()).t()
    assert float((layer(x) - want).abs().max() / want.abs().max()) < 1e-6


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bias", [False, True])
def test_row_parallel(name: str, bias: bool) -> None:
    """K is cut on stored entries, unevenly, out of order, with dummies, one rank with nothing; the bias is added by one
    rank; one reduce."""
    whole = Matrix.of(name, 192, 512)
    columns = [span((320, 512), (0, 64)), [], [-1] * 64 + span((64, 320))]
    beside = {"o.bias": np.arange(192) * 0.25} if bias else None
    x = torch.randn(4, 512, dtype=F64)
    want = x @ torch.from_numpy(whole.decode()).t() + (torch.arange(192) * 0.25 if bias else 0)

    def rank(group: Group) -> tuple[torch.Tensor, int]:
        mine = columns[group.rank]
        part = whole.cut(None, mine) if mine else None
        store = Store({"o": part if part is not None else whole.cut(None, [])}, beside)
        layer = RowParallelLinear(
            store.weights(), "o", 192, len(mine), group, bias_owner=group.rank == 2 if bias else None, dtype=F64
        )
        store.fill(layer)
        nines = torch.cat([x, torch.full((4, 1), 9.0, dtype=F64)], 1)  # what reaches a dummy must not matter
        return layer(nines[:, mine]).reduce(), group.counts.total

    for out, collectives in LocalGroup.run(3, rank):
        assert collectives == 1
        assert torch.allclose(out, want, **EXACT)


def test_exponents_stored_under_a_name_of_their_own() -> None:
    m = Matrix.of("MXFP4, Quark", 64, 64)
    named = m._replace(parts={**m.parts, ".weight_scale": m.parts[".weight_scale"]._replace(dtype="F8_E8M0")})
    layer = ColumnParallelLinear(Store({"l": named}).weights(), "l", 64, 64, bias=False, dtype=F64)
    Store({"l": named}).fill(layer)
    assert torch.allclose(layer(torch.eye(64, dtype=F64)).t(), torch.from_numpy(m.decode()), **EXACT)


VOCAB = 384
ROWS = [span((256, 384)) + [-1] * 64, [], span((0, 64), (192, 256)), [-1] * 64 + span((64, 192))]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tied", [False, True])
def test_vocabulary(name: str, tied: bool) -> None:
    """Table and head are cut with the vocabulary, never whole on a rank (traps: 21), in any order, one rank with
    nothing."""
    table, head = Matrix.of(name, VOCAB, 64), Matrix.of(name, VOCAB, 64, seed=1)
    tokens = torch.tensor([383, 0, 63, 64, 200, 255])

    def rank(group: Group) -> tuple[torch.Tensor, torch.Tensor, int]:
        rows = np.array(ROWS[group.rank], dtype=np.int64)
        store = Store({"t": table.cut(rows.tolist(), None)} | ({} if tied else {"h": head.cut(rows.tolist(), None)}))
        weights, precision = store.weights(), Precision.of("fp64")
        embed = VocabParallelEmbedding(weights, "t", rows, 64, group, precision)
        out = ParallelLMHead(weights, "h", rows, 64, VOCAB, group, precision, tied=embed if tied else None)
        both = _Both(embed, out)
        store.fill(both)
        x = torch.linspace(-1, 1, 3 * 64, dtype=F64).reshape(3, 64)
        return embed(tokens).reduce(), out(x), both.nbytes()

    x = torch.linspace(-1, 1, 3 * 64, dtype=F64).reshape(3, 64)
    stored = sum(raw.words.nbytes for raw in table.parts.values()) * (1 if tied else 2)
    # dense is held in the type of the run, fp64 here
    stored *= 2 if name == "dense" else 1
    for looked_up, logits, held in LocalGroup.run(4, rank):
        assert torch.allclose(looked_up, torch.from_numpy(table.decode())[tokens], **EXACT)
        assert torch.allclose(logits, x @ torch.from_numpy((table if tied else head).decode()).t(), **EXACT)
        assert held < 0.55 * stored


def test_padding_rows_never_win() -> None:
    """All real logits are negative, so a zero row would be the largest (traps: 29)."""
    m = Matrix.of("NVFP4, ModelOpt", 128, 64)
    negative = {**m.parts, ".weight": Raw("U8", np.full((128, 32), 0xAA, np.uint8))}  # -1 everywhere

    def rank(group: Group) -> torch.Tensor:
        rows = np.array([span((0, 100)) + [-1] * 28, [-1] * 64 + span((100, 128))][group.rank], dtype=np.int64)
        store = Store({"h": m._replace(parts=negative).cut(rows.tolist(), None)})
        head = ParallelLMHead(store.weights(), "h", rows, 64, 128, group, Precision.of("fp64"))
        store.fill(head)
        return head(torch.ones(1, 64, dtype=F64))

    for logits in LocalGroup.run(2, rank):
        assert logits.shape == (1, 128) and bool((logits < 0).all())


class _Both(VocabParallelEmbedding):
    def __init__(self, embed: VocabParallelEmbedding, head: ParallelLMHead) -> None:
        self.parts = [embed, head]


@pytest.mark.parametrize("name", [n for n in NAMES if EVERY[n].block not in ((1, 1), (0, 0))])
def test_a_weight_without_its_part_of_the_scales_is_refused(name: str) -> None:
    """A rank's rows with the whole matrix's scales, as a loader makes it that cuts only one of them (traps: 22)."""
    whole = Matrix.of(name, 512, 256)
    mine = whole.cut(range(128), None)
    scale = next(s for s in mine.parts if s in (".weight_scale", ".weight_scale_inv", ".scales"))
    store = Store({"l": mine._replace(parts={**mine.parts, scale: whole.parts[scale]})})
    layer = ColumnParallelLinear(store.weights(), "l", 128, 256, bias=False, dtype=F64)
    with pytest.raises(OddrankError, match=rf"l{scale}: the plan gives this rank \[(512|4|\d+, 512)"):
        store.fill(layer)


@pytest.mark.parametrize(
    ("suffix", "raw", "words"),
    [
        (".weight", Raw("BF16", np.zeros((64, 64), np.uint16)), "l.weight is stored as BF16"),
        (".weight_scale", Raw("I16", np.zeros(64, np.uint16)), "l.weight_scale is stored as I16"),
    ],
)
def test_words_are_never_taken_for_other_numbers(suffix: str, raw: Raw, words: str) -> None:
    m = Matrix.of("fp8 channel, 1-D", 64, 64)
    with pytest.raises(OddrankError, match=words):
        store = Store({"l": m._replace(parts={**m.parts, suffix: raw})})
        weight = StoredWeight(Store({"l": m}) if raw.dtype == "BF16" else store, "l", 64, 64)
        store.fill(weight)


def test_no_parameter_is_a_view_of_something_larger() -> None:
    """Nor of what it was read from (traps: 23)."""
    parts: dict[str, Any] = {f"p{i}": Matrix.of(name, 64, 192) for i, name in enumerate(NAMES)}
    store = Store(parts)
    layer = MergedColumnParallelLinear(store.weights(), [Rows(n, 64) for n in parts], 192, bias=False, dtype=F64)
    store.fill(layer)
    theirs = [(raw.words.ctypes.data, raw.words.ctypes.data + raw.words.nbytes) for raw in store.raw.values()]
    for parameter in layer.parameters():
        at, size = parameter.data.data_ptr(), parameter.data.untyped_storage().nbytes()
        assert size == parameter.data.nbytes
        assert not any(a < at + size and at < b for a, b in theirs)
    assert len(list(layer.parameters())) == len(store.raw)
