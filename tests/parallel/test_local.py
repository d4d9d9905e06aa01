"""LocalGroup: lockstep, the right sums, and nobody left waiting."""

import contextvars
import threading
from typing import Any

import pytest
import torch

from oddrank import OddrankError
from oddrank.runtime.parallel import Group, LocalGroup, SoloGroup


def _ranks_alive() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("rank ")]


@pytest.mark.parametrize("size", [1, 2, 3, 7])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_all_reduce_is_the_rounded_sum_in_place(size: int, dtype: torch.dtype) -> None:
    terms = torch.randn(size, 5, 13, generator=torch.Generator().manual_seed(size)).to(dtype)

    def fn(group: Group) -> torch.Tensor:
        mine = terms[group.rank].clone()
        assert group.all_reduce(mine) is mine
        return mine

    results = LocalGroup.run(size, fn)
    exact = terms.double().sum(0)
    # One rounding to the dtype (half an ulp), plus the fp32 accumulator's where the dtype is narrower.
    bound = exact.abs() * torch.finfo(dtype).eps / 2 + size * 4 * torch.finfo(torch.float32).eps
    if dtype == torch.float32:
        bound = bound * size
    assert ((results[0].double() - exact).abs() <= bound).all()
    assert all(torch.equal(result, results[0]) for result in results)


def test_half_precision_terms_are_not_rounded_one_by_one() -> None:
    # 256 + 1 is 256 in bf16, so adding rank by rank in bf16 would give 256; the sum is 258.
    terms = [256.0, 1.0, 1.0]
    results = LocalGroup.run(3, lambda g: g.all_reduce(torch.tensor([terms[g.rank]], dtype=torch.bfloat16)))
    assert [result.item() for result in results] == [258.0] * 3


def test_terms_are_added_in_rank_order() -> None:
    # In this order fp32 loses the 1; any order that adds the two large terms first keeps it.
    terms = [1e8, 1.0, -1e8]
    results = LocalGroup.run(3, lambda g: g.all_reduce(torch.tensor([terms[g.rank]])))
    assert [result.item() for result in results] == [0.0] * 3


def test_ranks_take_turns_in_the_same_order_each_time() -> None:
    def trace() -> list[tuple[int, int]]:
        seen: list[tuple[int, int]] = []

        def fn(group: Group) -> None:
            for step in range(4):
                seen.append((step, group.rank))
                group.barrier()

        LocalGroup.run(3, fn)
        return seen

    first = trace()
    assert sorted(first) == [(step, rank) for step in range(4) for rank in range(3)]
    assert [step for step, _ in first] == sorted(step for step, _ in first)
    assert all(trace() == first for _ in range(5))


def test_gather_of_unequal_sizes() -> None:
    sizes = [3, 0, 5, 1]

    def fn(group: Group) -> tuple[torch.Tensor, list[torch.Tensor]]:
        part = torch.full((2, sizes[group.rank]), float(group.rank))
        return group.all_gather(part), group.all_gather_list(part.T)

    for whole, parts in LocalGroup.run(4, fn):
        assert whole.tolist() == [[0.0] * 3 + [2.0] * 5 + [3.0]] * 2
        assert [tuple(part.shape) for part in parts] == [(3, 2), (0, 2), (5, 2), (1, 2)]


def test_gathered_parts_are_the_ranks_own() -> None:
    def fn(group: Group) -> list[float]:
        parts = group.all_gather_list(torch.tensor([float(group.rank)]))
        parts[0] += 10 * (group.rank + 1)
        group.barrier()
        return [part.item() for part in parts]

    assert LocalGroup.run(2, fn) == [[10.0, 1.0], [20.0, 1.0]]


def test_broadcast_and_counts() -> None:
    def fn(group: Group) -> tuple[Any, int, int]:
        value = group.broadcast({"from": group.rank}, source=2)
        group.barrier()
        group.all_reduce(torch.zeros(1))
        group.all_reduce(torch.zeros(1))
        return value, group.counts.all_reduce, group.counts.total

    assert LocalGroup.run(3, fn) == [({"from": 2}, 2, 4)] * 3


def test_solo_group_returns_its_input() -> None:
    group = SoloGroup()
    tensor = torch.randn(3)
    assert group.all_reduce(tensor) is tensor
    assert group.all_gather(tensor) is tensor
    assert group.broadcast(5) == 5
    assert group.counts.all_reduce == 1


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_rank_that_raises_releases_the_others(failing: int) -> None:
    released: list[int] = []

    def fn(group: Group) -> None:
        group.barrier()
        if group.rank == failing:
            raise ZeroDivisionError("by hand")
        try:
            group.all_reduce(torch.zeros(2))
        except OddrankError as error:
            assert f"rank {failing}" in str(error) and "by hand" in str(error)
            released.append(group.rank)
            raise

    with pytest.raises(ZeroDivisionError, match="by hand") as caught:
        LocalGroup.run(3, fn)
    assert caught.value.__notes__ == [f"on rank {failing} of 3"]
    assert sorted(released) == [rank for rank in range(3) if rank != failing]
    assert not _ranks_alive()


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (lambda g: g.all_reduce(torch.zeros(3)), "different collectives"),
        (lambda g: g.all_reduce(torch.zeros(2, dtype=torch.float64)), "different collectives"),
        (lambda g: g.barrier(), "different collectives"),
        (lambda g: None, "returned while|has returned"),
    ],
)
@pytest.mark.parametrize("rank", [0, 2])
def test_ranks_that_disagree_get_an_error(odd: Any, words: str, rank: int) -> None:
    errors: list[int] = []

    def fn(group: Group) -> None:
        try:
            odd(group) if group.rank == rank else group.all_reduce(torch.zeros(2))
        except OddrankError:
            errors.append(group.rank)
            raise

    with pytest.raises(OddrankError, match=words):
        LocalGroup.run(3, fn)
    assert {0, 1, 2} - {rank} <= set(errors)
    assert not _ranks_alive()


def test_ranks_see_the_callers_modes() -> None:
    variable: contextvars.ContextVar[int] = contextvars.ContextVar("variable")
    variable.set(3)

    def fn(group: Group) -> tuple[bool, bool, int]:
        return torch.is_inference_mode_enabled(), torch.is_grad_enabled(), variable.get()

    with torch.inference_mode():
        assert LocalGroup.run(2, fn) == [(True, False, 3)] * 2
    with torch.no_grad():
        assert LocalGroup.run(2, fn) == [(False, False, 3)] * 2
    assert LocalGroup.run(2, fn) == [(False, True, 3)] * 2


def test_no_ranks_is_refused() -> None:
    with pytest.raises(OddrankError, match="at least one rank"):
        LocalGroup.run(0, lambda g: None)
