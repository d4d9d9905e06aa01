"""The one rule: a partial sum only adds to a partial sum and is reduced exactly once."""

import copy
import operator
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from oddrank.runtime.parallel import Group, LocalGroup, Partial, SoloGroup

GROUP = SoloGroup()


def _partial() -> Partial:
    return Partial(torch.ones(2, 3), GROUP)


MISUSES: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "partial + tensor": lambda p, t: p + t,
    "tensor + partial": lambda p, t: t + p,
    "tensor += partial": lambda p, t: operator.iadd(t, p),
    "partial + number": lambda p, t: p + 1,
    "tensor - partial": lambda p, t: t - p,
    "partial * tensor": lambda p, t: p * t,
    "tensor @ partial": lambda p, t: t @ p,
    "-partial": lambda p, t: -p,
    "torch.add": lambda p, t: torch.add(t, p),
    "tensor.add_": lambda p, t: t.add_(p),
    "torch.cat": lambda p, t: torch.cat([t, p]),
    "copy_": lambda p, t: t.copy_(p),
    "setitem": lambda p, t: t.__setitem__(0, p),
    "getitem": lambda p, t: p[0],
    "silu": lambda p, t: torch.nn.functional.silu(p),
    "module": lambda p, t: torch.nn.Linear(3, 3)(p),
    "norm module": lambda p, t: torch.nn.RMSNorm(3)(p),
    "numpy ufunc": lambda p, t: np.add(t.numpy(), p),
    "numpy array": lambda p, t: np.asarray(p),
    "sum": lambda p, t: sum([p, _partial()]),
    "bool": lambda p, t: bool(p),
    "equal": lambda p, t: p == t,
    "equal, tensor first": lambda p, t: t == p,
    "copy": lambda p, t: copy.copy(p),
    "pickle": lambda p, t: pickle.dumps(p),
}


@pytest.mark.parametrize("name", MISUSES)
def test_a_partial_is_not_a_tensor(name: str) -> None:
    with pytest.raises(TypeError):
        MISUSES[name](_partial(), torch.ones(2, 3))


def test_the_message_says_what_to_do() -> None:
    with pytest.raises(TypeError, match=r"added to Tensor. Call reduce\(\) first"):
        torch.ones(2, 3) + _partial()
    with pytest.raises(AttributeError, match=r"asked for .view"):
        _partial().view(6)  # type: ignore[attr-defined]


def test_reduced_twice() -> None:
    term = _partial()
    term.reduce()
    with pytest.raises(TypeError, match="already reduced"):
        term.reduce()
    with pytest.raises(TypeError, match="already reduced"):
        term + _partial()


def test_used_after_it_was_added() -> None:
    first, second = _partial(), _partial()
    total = first + second
    for used in (first, second):
        with pytest.raises(TypeError, match="already added"):
            used.reduce()
        with pytest.raises(TypeError, match="already added"):
            total + used
    assert total.reduce().tolist() == [[2.0] * 3] * 2


def test_added_to_itself() -> None:
    term = _partial()
    with pytest.raises(TypeError, match="itself"):
        term + term


@pytest.mark.parametrize(
    "other",
    [
        lambda: Partial(torch.ones(3), GROUP),  # would broadcast
        lambda: Partial(torch.ones(2, 3, dtype=torch.float64), GROUP),
        lambda: Partial(torch.ones(2, 3), SoloGroup()),
        lambda: Partial.from_replicated(torch.ones(3), True, GROUP),
        lambda: Partial.from_replicated(torch.ones(3), False, GROUP),
    ],
)
def test_partials_of_another_group_shape_or_dtype_do_not_add(other: Callable[[], Partial]) -> None:
    mine = _partial()
    with pytest.raises(TypeError, match="do not add"):
        mine + other()
    assert mine.reduce().tolist() == [[1.0] * 3] * 2  # refused, so not used up


@pytest.mark.parametrize("owner", [0, 1, 2])
@pytest.mark.parametrize("first", [True, False])
def test_a_replicated_term_counts_once(owner: int, first: bool) -> None:
    bias = torch.tensor([10.0, 20.0])

    def fn(group: Group) -> list[Any]:
        mine = Partial(torch.full((3, 2), float(group.rank)), group)
        term = Partial.from_replicated(bias, owner, group, shape=mine.shape)
        total = term + mine if first else mine + term
        result = total.reduce().tolist()
        assert group.counts.total == 1
        return result

    assert LocalGroup.run(3, fn) == [[[13.0, 23.0]] * 3] * 3
    assert bias.tolist() == [10.0, 20.0]


def test_a_replicated_tensor_is_never_written_to() -> None:
    def fn(group: Group) -> list[list[float]]:
        a, b = torch.ones(4), torch.full((4,), 2.0)
        owner = group.rank == 1
        both = Partial.from_replicated(a, owner, group) + Partial.from_replicated(b, owner, group)
        alone = Partial.from_replicated(a, owner, group).reduce()
        return [both.reduce().tolist(), alone.tolist(), a.tolist(), b.tolist()]

    assert LocalGroup.run(2, fn) == [[[3.0] * 4, [1.0] * 4, [1.0] * 4, [2.0] * 4]] * 2


def test_a_rank_without_real_units_adds_nothing() -> None:
    def fn(group: Group) -> list[float]:
        if group.rank == 1:
            term = Partial.nothing((2,), torch.float32, group)
            assert term.shape == (2,) and term.dtype == torch.float32
        else:
            term = Partial(torch.tensor([1.0, 2.0]), group)
        return term.reduce().tolist()

    assert LocalGroup.run(3, fn) == [[2.0, 4.0]] * 3


def test_a_block_reduces_once() -> None:
    def fn(group: Group) -> int:
        routed = Partial(torch.ones(2, 3), group)
        shared = Partial(torch.ones(2, 3), group)
        bias = Partial.from_replicated(torch.ones(2, 3), 0, group)
        out = (routed + shared + bias).reduce()
        assert out.tolist() == [[5.0] * 3] * 2
        return group.counts.all_reduce

    assert LocalGroup.run(2, fn) == [1, 1]


def test_the_type_checker_refuses_it_too(tmp_path: Path) -> None:
    api = pytest.importorskip("mypy.api")
    lines = {
        "h + p": "operator",
        "p + h": "operator",
        "h * p": "operator",
        "torch.add(h, p)": "call-overload",
        "torch.nn.functional.silu(p)": "arg-type",
        "p.view(1)": "attr-defined",
        "h + p.reduce() + (q + r).reduce()": "",
    }
    source = tmp_path / "source.py"
    source.write_text(
        "import torch\nfrom torch import Tensor\nfrom oddrank.runtime.parallel import Partial\n"
        "def f(h: Tensor, p: Partial, q: Partial, r: Partial) -> None:\n" + "".join(f"    {line}\n" for line in lines)
    )
    options = ["--strict", "--cache-dir", str(Path(__file__).parents[2] / ".mypy_cache")]
    out, _, _ = api.run([*options, str(source)])
    for number, (line, code) in enumerate(lines.items(), start=5):
        found = [text for text in out.splitlines() if f"source.py:{number}: error" in text]
        assert bool(found) == bool(code), (line, out)
        assert not code or f"[{code}]" in found[0], (line, out)
