"""From a rank's slice of the mapped files into its parameters.

Every parameter is filled exactly once and every stored tensor of the slice is used; anything else is an error.
Parameters are allocated one at a time and their values copied straight from the mapping, in the order in which
the slice names them; what `prepare` makes of them replaces them one by one. So a rank never holds more than its
slice and a matrix a thread.
"""

import ctypes
import time
from collections.abc import Callable, Collection

import torch
from torch import Tensor

from oddrank.errors import OddrankError
from oddrank.runtime.formats import torch_dtype
from oddrank.runtime.layers.module import Module, Parameter, Part
from oddrank.runtime.models.build import Slice
from oddrank.runtime.pages import in_large_pages
from oddrank.runtime.request import Loaded
from oddrank.runtime.threads import side_by_side
from oddrank.runtime.words import words_of

_DENSE = {torch.bfloat16, torch.float16, torch.float32, torch.float64}
"""What may be converted into each other; codes and scales of quantized weights are kept as they are."""

_CONVERT_ELEMENTS = 1 << 22
"""Elements converted at a time."""


def load(
    model: Module,
    part: Slice,
    release: Callable[[str], object] | None = None,
    device: torch.device | str = "cpu",
    without: Collection[str] = (),
) -> Loaded:
    """Fill every parameter of `model` from `part`.

    release: called with each stored tensor's name once it was read (drops its mapped pages). device: where the
    parameters are kept. without: optional parts of a model that this one does not have; their tensors are counted and
    not read.
    OddrankError where a tensor has no parameter, a parameter no tensor, or their shapes differ.
    """
    start = time.perf_counter()
    places = _places(model)
    waiting = {id(p): len(p.parts) for p in model.parameters()}
    tensors: dict[int, Tensor] = {}
    stored, skipped = 0, dict.fromkeys(without, 0)
    own = {name for module in model.modules() for name in module.own_tensors()}
    for name in part.names():
        if name in own:
            own.remove(name)
            continue
        place = places.pop(name, None)
        if place is None:
            optional = part.part_of(name)
            if optional in skipped:
                skipped[optional] += 1
                continue
            raise OddrankError(
                f"The rank's slice has {name}, for which the model has no parameter. The plan's family "
                "and the runtime's model disagree about what the checkpoint holds."
            )
        parameter, place_in = place
        _check_shape(name, part.shape(name), parameter, place_in)
        key = id(parameter)
        if key not in tensors:
            tensors[key] = in_large_pages(torch.empty(parameter.shape, dtype=parameter.dtype))
        stored += _fill(tensors[key][place_in.index], part, name)
        if release is not None:
            release(name)
        waiting[key] -= 1
        if waiting[key] == 0:
            parameter.fill(tensors.pop(key).to(device))
    if missing := sorted({*places, *own}):
        raise OddrankError(
            f"{len(missing)} tensors that the model needs are not in the slice: {', '.join(missing[:3])}"
            f"{', ...' if len(missing) > 3 else ''}."
        )
    stored += sum(module.load_own(part, release) for module in model.modules())
    _return_freed_memory()
    skipped = {what: count for what, count in skipped.items() if count}
    return Loaded(stored, model.nbytes(), time.perf_counter() - start, skipped=skipped)


def prepare(model: Module) -> float:
    """Bring every module's parameters into the form that this machine's kernels take, on as many threads as torch
    uses. A loaded model computes without it, more slowly. Returns the seconds it took."""
    start, threads = time.perf_counter(), torch.get_num_threads()
    side_by_side(threads, lambda module: module.prepare(threads), list(model.modules()))
    _return_freed_memory()
    return time.perf_counter() - start


def _places(model: Module) -> dict[str, tuple[Parameter, Part]]:
    places: dict[str, tuple[Parameter, Part]] = {}
    for parameter in model.parameters():
        for stored in parameter.parts:
            if stored.name in places:
                raise OddrankError(f"Two parameters of the model are made from {stored.name}.")
            places[stored.name] = parameter, stored
    return places


def _check_shape(name: str, shape: tuple[int, ...], parameter: Parameter, place: Part) -> None:
    wanted = parameter.shape_of(place)
    if tuple(shape) != wanted:
        raise OddrankError(f"{name}: the plan gives this rank {list(shape)} and the model has room for {list(wanted)}.")


def _fill(target: Tensor, part: Slice, name: str) -> int:
    """Copy a stored tensor into `target`, converting, some rows at a time, where it is kept in another type of float.
    Returns bytes stored."""
    stored = part.dtype(name)
    dtype = torch_dtype(stored)
    if dtype is None or (dtype != target.dtype and not {dtype, target.dtype} <= _DENSE):
        raise OddrankError(f"{name} is stored as {stored}, and the model wants {target.dtype}.")
    if dtype == target.dtype:
        part.read_into(name, words_of(target, stored))
    elif target.numel():
        step = max(1, _CONVERT_ELEMENTS * len(target) // target.numel())
        staged = torch.empty(min(step, len(target)), *target.shape[1:], dtype=dtype)
        for first in range(0, len(target), step):
            rows = target[first : first + step]
            part.read_rows_into(name, first, words_of(staged[: len(rows)], stored))
            rows.copy_(staged[: len(rows)])
    return target.numel() * dtype.itemsize


def _return_freed_memory() -> None:
    """Give what loading allocated and freed back to the system (glibc keeps it for itself otherwise)."""
    try:
        ctypes.CDLL(None).malloc_trim(0)
    except (OSError, AttributeError):
        return
