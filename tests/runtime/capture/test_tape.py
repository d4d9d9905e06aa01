"""Calls that are remembered: a replay does what the code did, to other numbers; what it would lack is seen."""

import ctypes

import numpy as np
import pytest
import torch

from oddrank.native.calls import call, not_a_call
from oddrank.native.compiled import Library, library
from oddrank.native.embedding import take_rows
from oddrank.native.tape import Blocks, Recording


@pytest.fixture
def found() -> Library:
    made = library()
    if made is None:
        pytest.skip("no compiled kernels")
    return made


TABLE = torch.arange(60.0).reshape(12, 5)


def chain(found: Library, tokens: torch.Tensor, times: int) -> torch.Tensor:
    """Rows looked up and, through one temporary tensor after another, placed into a result."""
    rows = [take_rows(found, TABLE, tokens) for _ in range(times)]
    return take_rows(found, rows[-1].view(-1, 5)[:2], torch.tensor([0, 1]) if times > 9 else ZERO_ONE)


ZERO_ONE = torch.tensor([1, 0])


def test_a_replay_reads_what_is_there_then(found: Library) -> None:
    tokens = torch.tensor([3, 7, 2])
    with Recording(found, Blocks()) as recording:
        out = chain(found, tokens, 3)
    assert recording.stray is None
    assert len(recording.tape) == 4 and set(recording.tape.names) == {"take_rows"}
    assert torch.equal(out, TABLE[[7, 3]])  # computed while it was recorded
    for new in ([0, 11, 5], [4, 4, 4]):
        tokens.copy_(torch.tensor(new))
        assert recording.tape.replay()
        assert torch.equal(out, TABLE[new[1::-1]])


def test_blocks_serve_again_once_nothing_is_in_them(found: Library) -> None:
    blocks, tokens = Blocks(), torch.arange(10)
    with Recording(found, blocks) as recording:
        held = take_rows(found, TABLE, tokens)
        base = blocks.nbytes
        x = take_rows(found, TABLE, tokens)
        view = x[2:].view(-1)
        place = x.data_ptr()
        del x
        other = take_rows(found, TABLE, tokens)
        assert other.data_ptr() != place  # the view is still in it
        del view
        third = take_rows(found, TABLE, tokens)
        assert third.data_ptr() == place
        del other, third
        for _ in range(50):
            out = take_rows(found, TABLE, tokens)
    assert blocks.nbytes <= 4 * base
    assert len({t.data_ptr() for t in (held, out)}) == 2
    held.zero_()
    out.zero_()
    assert recording.tape.replay()
    assert torch.equal(held, TABLE[:10]) and torch.equal(out, TABLE[:10])
    del held, out, recording
    again = blocks.empty_like(torch.empty(10, 5))
    assert again.data_ptr() % 64 == 0 and blocks.nbytes <= 4 * base


def test_what_was_released_reads_what_is_replayed_and_its_block_serves_others(found: Library) -> None:
    blocks, tokens = Blocks(), torch.arange(4)
    first, second = Recording(found, blocks), Recording(found, blocks)
    with first:
        out = take_rows(found, TABLE, tokens)
    place = out.data_ptr()
    out = blocks.released(out)
    assert out.data_ptr() == place and torch.equal(out, TABLE[:4])
    with second:
        other = take_rows(found, TABLE, tokens)
    assert other.data_ptr() == place
    tokens.copy_(torch.tensor([9, 8, 7, 6]))
    assert first.tape.replay()
    assert torch.equal(out, TABLE[[9, 8, 7, 6]])
    mine = torch.ones(3)
    assert blocks.released(mine) is mine


@pytest.mark.parametrize(
    "harmless",
    [
        lambda x: x.view(2, 30),
        lambda x: x.reshape(-1),
        lambda x: x[1:3],
        lambda x: x.chunk(2, -1)[1],
        lambda x: torch.split_with_sizes(x, [2, 3], 1)[0].unsqueeze(0),
        lambda x: x.t().unbind(0)[1],
        lambda x: x.float(),
        lambda x: x.contiguous(),
        lambda x: torch.empty(3, 4),
        lambda x: x.new_empty(7),
        lambda x: torch.empty_like(x),
        lambda x: x.new_empty(0).view(torch.int32),
    ],
)
def test_views_and_memory_pass(found: Library, harmless: object) -> None:
    with torch.inference_mode(), Recording(found, Blocks()) as recording:
        harmless(TABLE)  # type: ignore[operator]
    assert recording.stray is None


@pytest.mark.parametrize(
    ("planted", "names"),
    [
        (lambda x: x + 1, "add"),
        (lambda x: x.clone().mul_(2), "clone"),
        (lambda x: x.t().reshape(-1), "reshape clone"),  # must copy
        (lambda x: x.t().contiguous(), "contiguous clone"),
        (lambda x: x.half(), "to"),
        (lambda x: float(x.sum()), "sum"),
        (lambda x: torch.zeros(3), "zeros"),
        (lambda x: torch.tensor([1.0]), "lift"),
        (lambda x: torch.nn.functional.linear(x, x), "linear mm"),
        (lambda x: x.new_empty(3).copy_(x[0, :3]), "copy"),
        (lambda x: x[0].tolist() and x[0, 0].item(), "item local_scalar"),
        (lambda x: x.index_select(0, torch.tensor(0)), "lift"),
    ],
)
@pytest.mark.parametrize("inference", [True, False])
def test_whatever_torch_computes_is_named(found: Library, planted: object, names: str, inference: bool) -> None:
    tokens = torch.tensor([1, 2, 3])
    with torch.inference_mode(inference), Recording(found, Blocks()) as recording:
        chain(found, tokens, 2)
        wanted = planted(TABLE)  # type: ignore[operator]
        chain(found, tokens, 2)
    # the names of what torch calls in one mode or the other
    assert recording.stray is not None and any(name in recording.stray for name in names.split())
    assert recording.tape.names == ["take_rows"] * 3  # nothing after it
    if isinstance(wanted, torch.Tensor):  # and it was computed all the same
        assert torch.equal(wanted, planted(TABLE))  # type: ignore[operator]


def test_what_is_no_call_is_named(found: Library) -> None:
    with Recording(found, Blocks()) as recording:
        not_a_call("a broadcast")
        not_a_call("another")
    assert recording.stray == "a broadcast"
    not_a_call("nobody records")


def test_arguments_live_as_long_as_the_tape(found: Library) -> None:
    class Arguments(ctypes.Structure):
        _fields_ = [(name, ctypes.c_void_p) for name in ("table", "tokens", "row", "out")] + [
            (name, ctypes.c_int64) for name in ("count", "width", "known", "dtype")
        ]

    out, blocks = torch.zeros(1, 5), Blocks()

    def once() -> Recording:
        tokens = torch.tensor([4])
        made = Arguments(TABLE.data_ptr(), tokens.data_ptr(), None, out.data_ptr(), 1, 5, 12, 2)
        with Recording(found, blocks) as recording:
            call(found.operation("take_rows"), made, TABLE, tokens)
        return recording

    kept = [once() for _ in range(50)]
    [torch.tensor([9]) for _ in range(200)]
    out.zero_()
    assert kept[0].tape.replay()
    assert torch.equal(out[0], TABLE[4])


def test_the_time_of_every_call(found: Library) -> None:
    with Recording(found, Blocks()) as recording:
        chain(found, torch.tensor([3, 7, 2]), 5)
    taken = recording.tape.nanoseconds = np.zeros(len(recording.tape), np.int64)
    for _ in range(100):
        recording.tape.replay()
    assert (taken > 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("width", [1, 7, 64])
def test_rows_of_a_table(found: Library, dtype: torch.dtype, width: int) -> None:
    table = (torch.randn(40, width, dtype=torch.float64) * 2.0 ** torch.randint(-30, 12, (40, width))).to(dtype)
    table[0, 0], table[1, 0] = float("inf"), float("-inf")
    tokens = torch.tensor([0, 1, 39, 5, 5])
    assert torch.equal(take_rows(found, table, tokens), table[tokens].float())
    row = torch.full((30,), -1, dtype=torch.int32)
    row[[3, 7, 29]] = torch.tensor([39, 1, 0], dtype=torch.int32)
    found_rows = take_rows(found, table, torch.tensor([7, 3, 4, 29, 30, 1000]), row)
    assert torch.equal(found_rows[[0, 1, 3]], table[[1, 39, 0]].float())
    assert not found_rows[[2, 4, 5]].any()
