"""The virtual checkpoint as a stream: wrap whatever an engine iterates over while it loads, rewrite nothing on disk.

Tensors come out as they came in, numpy or torch, unchanged ones as the very object. A tally per role is kept and, at
the end, compared with what the config implies, so that a loader that skipped or repeated something is noticed.
"""

from __future__ import annotations

import re
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any, Literal, TypeVar

import msgspec
import numpy as np

from oddrank.checkpoint.dtypes import STORAGE
from oddrank.errors import OddrankError
from oddrank.layout.plan import Plan
from oddrank.transform.recipe import Recipe, Words, made_recipes, materialize, passed_names

T = TypeVar("T")


class Tally(msgspec.Struct):
    """What has passed of one stored tensor of one role: how many, of which shape before and after."""

    role: str
    expected: int
    source_shape: tuple[int, ...]
    shape: tuple[int, ...]
    count: int = 0


class Stream(Iterable[tuple[str, T]]):
    """An iterator over (name, tensor) of the virtual checkpoint, with its tally.

    Raises OddrankError for a tensor that is not stored as the plan was made for (shape, width of its numbers), for one
    that comes twice, and, when the source is exhausted, where the tally is not complete. With coverage="warn" these are
    warnings; a tensor that is stored otherwise is then passed on as it came, and not counted. optional: tensors by name
    that the source may leave out (other ranks' experts).
    """

    def __init__(
        self,
        plan: Plan,
        tensors: Iterable[tuple[str, T]],
        coverage: Literal["strict", "warn"],
        optional: Callable[[str], bool] | None = None,
    ) -> None:
        self.plan, self._tensors, self._coverage, self._optional = plan, tensors, coverage, optional
        self._recipes: dict[str, tuple[Recipe, Tally]] = {}
        self.tallies: list[Tally] = []
        self._beside: dict[str, str] = {}  # tensors that others are made of, too -> those others
        self._ignored = re.compile("|".join(plan.model.ignored) or r"(?!)")
        self._passed = set(passed_names(plan))
        self._aliases = {n for role in plan.model.roles if role.tied_to is not None for n in role.instances()}
        for made in made_recipes(plan, plan.virtual()):
            tally = Tally(made.what, len(made.names), made.recipe.source_shape, made.recipe.shape)
            self.tallies.append(tally)
            self._recipes.update(dict.fromkeys(made.names, (made.recipe, tally)))
            if made.recipe.zeros is not None:
                self._beside.update({made.recipe.zeros.beside(name): name for name in made.names})

    def __iter__(self) -> Iterator[tuple[str, T]]:
        seen: set[str] = set()
        held: dict[str, T] = {}  # zero points that came before their values, and values before their zero points
        for tally in self.tallies:
            tally.count = 0
        for name, tensor in self._tensors:
            known = self._recipes.get(name)
            if known is None:
                if not self._accounted(name):
                    self._complain(f"{name} has no role in family {self.plan.model.family}.")
                yield name, tensor
                continue
            recipe, tally = known
            if getattr(tensor, "shape", None) != recipe.source_shape or not (
                recipe.unchanged or _carries(getattr(tensor, "dtype", None), recipe.dtype)
            ):
                kind, shape = _kind(getattr(tensor, "dtype", "")), list(getattr(tensor, "shape", ()))
                self._complain(
                    f"{name} comes as {kind} {shape}; the plan was made for "
                    f"{recipe.dtype} {list(recipe.source_shape)}. The stream must be of the checkpoint that was "
                    "planned, as stored."
                )
                yield name, tensor
                continue
            if name in seen:
                self._complain(f"{name} came twice.")
            seen.add(name)
            tally.count += 1
            beside, values = recipe.beside(name), self._beside.get(name)
            if beside is not None and beside not in held:
                held[name] = tensor
                continue
            made = tensor if recipe.unchanged else transformed(recipe, tensor, held.pop(beside or "", None))
            yield name, made
            if values in held:
                yield values, transformed(self._recipes[values][0], held.pop(values), tensor)
            elif values is not None:
                held[name] = tensor
        self._finish(seen)

    def _accounted(self, name: str) -> bool:
        """Is a tensor without a role ignored, a stored copy of a tied one, or what a tool writes beside a format?"""
        return name in self._aliases or name in self._passed or self._ignored.fullmatch(name) is not None

    def _finish(self, seen: set[str]) -> None:
        """Compare the tally with what the config implies."""
        wrong = [t for t in self.tallies if t.count != t.expected]
        if wrong and self._optional is not None:
            required: dict[int, int] = {}
            for name, (_, tally) in self._recipes.items():
                required[id(tally)] = required.get(id(tally), 0) + (name in seen or not self._optional(name))
            wrong = [t for t in wrong if t.count != required[id(t)]]
        if wrong:
            more = f" (and {len(wrong) - 5} more)" if len(wrong) > 5 else ""
            some = "; ".join(f"{t.role}: {t.count} of {t.expected}" for t in wrong[:5])
            self._complain(f"the stream ended without all that the config implies: {some}{more}.")

    def _complain(self, message: str) -> None:
        if self._coverage == "strict":
            raise OddrankError(message)
        warnings.warn(message, stacklevel=3)


def stream(
    plan: Plan | None, tensors: Iterable[tuple[str, T]], *, coverage: Literal["strict", "warn"] = "strict"
) -> Iterable[tuple[str, T]]:
    """The virtual checkpoint of `plan`, lazily, from any iterable of (name, numpy array or torch tensor).

    Without a plan, or with one that changes nothing, it returns `tensors` itself. See `Stream` for the errors.
    """
    if plan is None or plan.is_identity():
        return tensors
    if not plan.executor_facts().equal_ranks:
        raise OddrankError(
            f"a plan for the {plan.executor} executor has no virtual checkpoint to stream; plan with --executor vllm."
        )
    return Stream(plan, tensors, coverage)


def transformed(recipe: Recipe, tensor: Any, beside: Any = None) -> Any:
    """A changed tensor as a new one of the same kind (numpy array, torch tensor on the CPU) and dtype. beside: the
    source of `recipe.beside`, where it has one."""
    made = materialize(recipe, _words(tensor), None if beside is None else _words(beside))
    if isinstance(tensor, np.ndarray):
        return made.view(tensor.dtype)
    return _torch_of(tensor).from_numpy(made).view(tensor.dtype)


def _words(tensor: Any) -> Words:
    """A view of the tensor's words. numpy knows neither bfloat16 nor float8: they travel as unsigned integers."""
    if isinstance(tensor, np.ndarray):
        return tensor.view(_CARRIERS[tensor.dtype.itemsize])
    carrier = getattr(_torch_of(tensor), _CARRIERS[tensor.dtype.itemsize])
    found: Words = (tensor.detach() if tensor.requires_grad else tensor).view(carrier).numpy()
    return found


_CARRIERS = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}
"""The unsigned integer type of a width, as numpy and torch both name it."""
_FLOATS = {
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}
"""safetensors dtype by the name numpy, ml_dtypes and torch have for it."""


def _kind(dtype: Any) -> str:
    """The safetensors name of a numpy or torch dtype, else their own."""
    name = str(dtype).removeprefix("torch.")
    return _FLOATS.get(name, name)


@cache
def _carries(dtype: Any, planned: str) -> bool:
    """Can a tensor of this numpy or torch dtype hold the words of the planned safetensors dtype? Integers of the right
    width may carry any dtype's words; a float of another kind was converted on the way, and words of fills would mean
    something else in it."""
    kind = _kind(dtype)
    if kind in _FLOATS.values():
        return kind == planned or {kind, planned} == {"F8_E8M0", "U8"}
    return bool(dtype.itemsize == STORAGE[planned].itemsize)


def _torch_of(tensor: Any) -> Any:
    """The torch that made a tensor, which never has to be imported for it."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(tensor, torch.Tensor):
        raise TypeError(f"a stream carries numpy arrays or torch tensors, not {type(tensor).__name__}")
    return torch
