"""The census of a checkpoint: every stored tensor with its role and format, and whatever does not fit.

It reads names, dtypes and shapes only. A plan keeps the `uses`; the first proof check (coverage) is that
`problems` is empty.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from oddrank.formats import Format, candidates, format_named, formats
from oddrank.formats.base import Stored, stem
from oddrank.geometry import Model, Role
from oddrank.geometry.axis import MOST
from oddrank.layout.index import entries


class TensorLike(Protocol):
    """What the census reads of a stored tensor."""

    @property
    def dtype(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...


Read = Callable[[str], npt.NDArray[Any]]
"""The words of a stored tensor, by its name."""


class Use(msgspec.Struct, frozen=True):
    """Instances of one role that are stored alike.

    role: position in `Model.roles`. format: its name, see formats.format_named. dtypes: one per stored tensor of the
    format, None where an optional one is absent. instances: positions among `Role.instances()`, None = all of them.
    count: how many.
    """

    role: int
    format: str
    dtypes: tuple[str | None, ...]
    count: int
    instances: tuple[int, ...] | None = None


class Census(msgspec.Struct, frozen=True):
    """What a checkpoint holds.

    total: stored tensors. ignored, aliased: names without a role that the family accounts for. unmatched: names
    nothing accounts for. absent: optional groups of roles it has nothing of (MTP, vision). problems: one sentence
    each, naming the tensor and the numbers.
    """

    uses: tuple[Use, ...]
    total: int
    ignored: tuple[str, ...]
    aliased: tuple[str, ...]
    unmatched: tuple[str, ...]
    absent: tuple[str, ...]
    problems: tuple[str, ...]


class Cut(NamedTuple):
    """How a stored tensor's entries lie along one of its dimensions.

    block: elements an entry covers; 0 = all. shared: one value serves the whole block; else it packs one an element.
    fixed: its elements may not move at all. tail: dummies may stand in the unused places of a short last word, where
    whoever packed it left zeros, which must be what zero means there.
    """

    block: int
    shared: bool = False
    fixed: bool = False
    tail: bool = True


class Part(NamedTuple):
    """One stored tensor of a use. dims: which dims of the role its dimensions are, in order (empty: one entry);
    cuts: how its entries lie along each."""

    suffix: str
    stored: Stored
    dims: tuple[int, ...]
    cuts: tuple[Cut, ...]

    @property
    def blocks(self) -> tuple[int, ...]:
        return tuple(cut.block for cut in self.cuts)


def use_parts(model: Model, use: Use) -> Iterator[tuple[Part, str]]:
    """(stored tensor, dtype) of what a use stores."""
    for part, dtype in zip(parts(model.roles[use.role], format_named(use.format)), use.dtypes, strict=True):
        if dtype is not None:
            yield part, dtype


def parts(role: Role, fmt: Format) -> tuple[Part, ...]:
    """The stored tensors of a role in a format: suffix on the instance's stem, which dims, which footprints.

    A dimension that a scale keeps as one entry ([N, 1], [1]) has block 0.
    """
    found = []
    k = len(role.dims) - 1
    n = k - 1
    for stored in fmt.stored:
        suffix = stored.suffix
        if not role.name.endswith(".weight"):
            suffix = suffix.removeprefix(".weight")
        if not role.matrix:
            found.append(Part(suffix, stored, tuple(range(k + 1)), (Cut(1),) * (k + 1)))
            continue
        tail = fmt.zero_word == 0
        cuts = {
            n: Cut(stored.block[0], stored.shared is True, False, tail),
            k: Cut(stored.block[1], bool(stored.shared), fmt.scattered, tail),
        }
        shape = "kn" if role.transposed and fmt.for_vectors else stored.shape
        kept = {"nk": (n, k), "kn": (k, n), "n": (n,), "k": (k,), "one": (k,), "scalar": ()}[shape]
        leading = tuple(range(n))
        found.append(Part(suffix, stored, (*leading, *kept), (*(Cut(1) for _ in leading), *(cuts[d] for d in kept))))
    return tuple(found)


def stored_shape(logical: tuple[int, ...], part: Part) -> tuple[int, ...]:
    """Shape of a stored tensor whose logical tensor has shape `logical`."""
    shape = tuple(entries(logical[d], b) for d, b in zip(part.dims, part.blocks, strict=True))
    return (*shape, part.stored.inner) if part.stored.inner else shape


class _Form(NamedTuple):
    """A format with the stored shapes it implies for one role."""

    format: Format
    parts: tuple[Part, ...]
    shapes: tuple[tuple[int, ...], ...]

    def match(self, base: str, tensors: Mapping[str, TensorLike]) -> tuple[str | None, ...] | None:
        """dtypes of the stored tensors if the instance `base` is stored so, else None."""
        dtypes: list[str | None] = []
        for part, shape in zip(self.parts, self.shapes, strict=True):
            tensor = tensors.get(base + part.suffix)
            if tensor is None:
                if not part.stored.optional:
                    return None
                dtypes.append(None)
            elif tensor.dtype in part.stored.dtypes and tuple(tensor.shape) == shape:
                dtypes.append(tensor.dtype)
            else:
                return None
        return tuple(dtypes)


Under = tuple[tuple[str, str, tuple[int, ...]], ...]
"""What is stored under one stem: suffix, dtype, shape of each."""


class _Match(NamedTuple):
    """Which form an instance has, the dtypes of its parts, the suffixes of those that are there; `all`: they are
    everything under its stem."""

    place: int
    dtypes: tuple[str | None, ...]
    suffixes: tuple[str, ...]
    all: bool


def _by_stem(tensors: Mapping[str, TensorLike]) -> dict[str, Under]:
    """Tensors by the part of their name before the last dot. Instances with the same entry are stored alike, so that
    a census tries the formats once for each kind of entry and not once for each of tens of thousands of experts."""
    found: dict[str, Under] = {}
    for name, tensor in tensors.items():
        base, dot, leaf = name.rpartition(".")
        found[base] = (*found.get(base, ()), (dot + leaf, tensor.dtype, tuple(tensor.shape)))
    return found


def _match(base: str, under: Under | None, forms: list[_Form], tensors: Mapping[str, TensorLike]) -> _Match | None:
    """The first form that explains the instance `base`."""
    for place, form in enumerate(forms):
        dtypes = form.match(base, tensors)
        if dtypes is not None:
            there = tuple(p.suffix for p, d in zip(form.parts, dtypes, strict=True) if d is not None)
            return _Match(place, dtypes, there, under is not None and len(there) == len(under))
    return None


def take_census(
    model: Model,
    tensors: Mapping[str, TensorLike],
    quantization: dict[str, Any] | None = None,
    read: Read | None = None,
) -> Census:
    """Match every stored tensor with its role and format, by name, dtype and shape.

    quantization: the checkpoint's quantization_config, which only gives formats their parameters (block sizes). read:
    asked for the scale groups of layers whose columns are cut, where the config says that those may be scattered;
    without it they are taken for scattered. Raises OddrankError for a packing that no format moves.
    """
    stock = model.stock()
    every = candidates(quantization)
    absent, unused = _absent(model, tensors)
    by_stem = _by_stem(tensors)
    seen: set[str] = set()
    passed: set[str] = set()
    whole_stems: set[str] = set()
    aliased: list[str] = []
    problems: list[str] = []
    uses: list[Use] = []
    for position, role in enumerate(model.roles):
        if role.group in absent or role.either in unused:
            continue
        if role.tied_to is not None:
            there = [s for name in role.instances() for s in _stored_under(stem(name), tensors)]
            seen.update(there)
            aliased += there
            implied = tuple(d.size(stock) for d in role.dims)
            problems += [
                f"{n} is {tensors[n].dtype} {list(tensors[n].shape)}, but it is tied to {role.tied_to}, {list(implied)}"
                for n in there
                if n == role.name and tuple(tensors[n].shape) != implied
            ]
            continue
        if role.count() > len(tensors):  # not to be named one by one
            problems.append(f"config.json implies {role.count()} of {role.name}, and there are {len(tensors)} tensors")
            continue
        logical = tuple(d.size(stock) for d in role.dims)
        if max(logical, default=0) > MOST["width"]:  # nor its rows or columns
            problems.append(f"config.json implies that {role.name} is {list(logical)}, which is beyond any model")
            continue
        forms = []
        for fmt in every if role.matrix else (f for f in every if f.for_vectors):
            if fmt.scattered and not any(True for _ in role.dims[-1].axes()):
                continue  # its columns stay together, wherever their groups are
            if fmt.zero_points is not None and len(role.dims) != 2:
                continue  # no release stacks them
            made = parts(role, fmt)
            forms.append(_Form(fmt, made, tuple(stored_shape(logical, p) for p in made)))
        ordered = [form for form in forms if not form.format.scattered]
        groups: dict[tuple[int, tuple[str | None, ...]], list[int]] = {}
        known: dict[Under, _Match | None] = {}
        # suffixes of a name without `.weight` are not leaves under its stem
        dotted = role.name.endswith(".weight")
        for number, name in enumerate(role.instances()):
            base = stem(name)
            under = by_stem.get(base) if dotted else None
            if under is None:
                match = _match(base, None, forms, tensors)
            elif under in known:
                match = known[under]
            else:
                match = known[under] = _match(base, under, forms, tensors)
            if match is not None and forms[match.place].format.scattered and _in_order(forms[match.place], base, read):
                again = _match(base, under, ordered, tensors)
                match = again and again._replace(place=forms.index(ordered[again.place]))
            if match is None:
                problems.append(_mismatch(name, tensors, logical, role, forms))
                seen.update(_stored_under(base, tensors))
                continue
            passed.update(base + suffix for suffix in forms[match.place].format.passed)
            if match.all:
                whole_stems.add(base)
            else:
                seen.update(base + suffix for suffix in match.suffixes)
            groups.setdefault((match.place, match.dtypes), []).append(number)
        for (place, dtypes), numbers in groups.items():
            whole = len(numbers) == role.count()
            uses.append(
                Use(position, forms[place].format.name, dtypes, len(numbers), None if whole else tuple(numbers))
            )
    left = [
        name
        for base, under in by_stem.items()
        if base not in whole_stems
        for name in (base + suffix for suffix, _, _ in under)
        if name not in seen
    ]
    pattern = re.compile("|".join(model.ignored) or r"(?!)")
    ignored = tuple(name for name in left if name in passed or pattern.fullmatch(name))
    unmatched = tuple(name for name in left if name not in passed and not pattern.fullmatch(name))
    problems += [
        f"{name} is {list(tensors[name].shape)}: only one scale for the whole layer can be carried as it is"
        for name in ignored
        if name.endswith((".k_scale", ".v_scale")) and math.prod(tensors[name].shape) != 1
    ]
    problems += [
        f"{name} {tensors[name].dtype} {list(tensors[name].shape)} has no role in family {model.family}"
        for name in unmatched
    ]
    return Census(tuple(uses), len(tensors), ignored, tuple(aliased), unmatched, tuple(sorted(absent)), tuple(problems))


def _in_order(form: _Form, base: str, read: Read | None) -> bool:
    """Does each column of an instance lie in the scale group of its place, as far as is known?"""
    if read is None:
        return False
    group = max(part.stored.block[1] for part in form.parts if part.stored.shared)
    (index,) = (part for part in form.parts if part.stored.rewritten == "groups")
    words = read(base + index.suffix)
    unset = np.iinfo(words.dtype).max  # compressed-tensors' -1 throughout: it says nothing
    return bool((words == unset).all()) or np.array_equal(words, np.arange(len(words)) // group)


def _absent(model: Model, tensors: Mapping[str, TensorLike]) -> tuple[set[str], set[tuple[str, str]]]:
    """(optional groups of roles that the checkpoint has nothing of, options it does not use).

    Of an option's rivals the stored one is kept; where none is stored, the first, so that it is reported missing.
    """
    groups: dict[str, bool] = {}
    options: dict[str, dict[str, bool]] = {}
    for role in model.roles:
        if role.group is None and role.either is None:
            continue
        there = any(_stored_under(stem(n), tensors) for n in role.outermost())
        if role.group is not None:
            groups[role.group] = groups.get(role.group, False) or there
        if role.either is not None:
            name, option = role.either
            rivals = options.setdefault(name, {})
            rivals[option] = rivals.get(option, False) or there
    unused = set()
    for name, rivals in options.items():
        kept = [option for option, there in rivals.items() if there] or list(rivals)[:1]
        unused |= {(name, option) for option in rivals if option not in kept}
    return {group for group, there in groups.items() if not there}, unused


def _stored_under(base: str, tensors: Mapping[str, TensorLike]) -> list[str]:
    """What is stored under an instance's stem, whichever known suffix it has."""
    return [base + s for s in _known_suffixes() if base + s in tensors]


@cache
def _known_suffixes() -> tuple[str, ...]:
    suffixes = {""}
    for fmt in formats().values():
        for stored in fmt.stored:
            suffixes |= {stored.suffix, stored.suffix.removeprefix(".weight")}
    return tuple(sorted(suffixes))


def _mismatch(
    name: str, tensors: Mapping[str, TensorLike], logical: tuple[int, ...], role: Role, forms: list[_Form]
) -> str:
    """One sentence on an instance that no format explains."""
    base = stem(name)
    there = _stored_under(base, tensors)
    if not there:
        return f"{name} is missing (config.json implies {role.count()} of {role.name})"
    close = _closest(base, there, tensors, forms)
    if close:
        stored, _ = close[0]
        either = "; or as ".join(f"{form.format.name}, but {wrong}" for form, wrong in close)
        return f"{base}{stored.parts[0].suffix} is stored as {either}"
    first = tensors[there[0]]
    tried = [form.format.name for form in forms]
    names = ", ".join(tried)
    other = [f.name for f in formats().values() if f.name not in tried and base + f.stored[0].suffix in there]
    if other:
        names += f"; {', '.join(other)} only where quantization_config says so"
    if len(there) > 1:
        shown = ", ".join(f"{n.removeprefix(base)} {tensors[n].dtype} {list(tensors[n].shape)}" for n in there)
        return f"{base} is stored as {shown}, which no known format ({names}) makes of a {list(logical)}"
    what = f"{there[0]} is {first.dtype} {list(first.shape)}"
    if any(first.dtype in form.parts[0].stored.dtypes for form in forms if len(form.parts) == 1):
        return f"{what}, but config.json implies {list(logical)}"
    return f"{what}, which no known format ({names}) stores a {list(logical)} as"


def _closest(
    base: str, there: list[str], tensors: Mapping[str, TensorLike], forms: list[_Form]
) -> list[tuple[_Form, str]]:
    """The forms whose values fit and that know everything that is stored, so that only a companion is missing or
    misshapen, with what is wrong; of several, those with one wrong companion."""
    found: list[tuple[_Form, list[str]]] = []
    for form in forms:
        values = tensors.get(base + form.parts[0].suffix)
        if values is None or not _fits(values, form.parts[0], form.shapes[0]):
            continue
        if not {base + part.suffix for part in form.parts}.issuperset(there):
            continue
        wrong = [
            _expected(base + part.suffix, tensors.get(base + part.suffix), part, shape)
            for part, shape in zip(form.parts, form.shapes, strict=True)
            if not _fits(tensors.get(base + part.suffix), part, shape)
        ]
        if wrong:
            found.append((form, wrong))
    if len(found) == 1 and len(there) > 1:
        return [(form, ", and ".join(wrong)) for form, wrong in found]
    fewest = min((len(wrong) for _, wrong in found), default=0)
    return [(form, wrong[0]) for form, wrong in found if len(wrong) == fewest and (fewest == 1 or len(there) == 1)]


def _fits(tensor: TensorLike | None, part: Part, shape: tuple[int, ...]) -> bool:
    if tensor is None:
        return part.stored.optional
    return tensor.dtype in part.stored.dtypes and tuple(tensor.shape) == shape


def _expected(name: str, tensor: TensorLike | None, part: Part, shape: tuple[int, ...]) -> str:
    wanted = f"{' or '.join(part.stored.dtypes)} {list(shape)}"
    if tensor is None:
        return f"{name} ({wanted}) is missing"
    return f"{name} is {tensor.dtype} {list(tensor.shape)} instead of {wanted}"


def use_instances(model: Model, use: Use) -> Iterator[str]:
    """Dense names of the instances a use covers."""
    names = model.roles[use.role].instances()
    if use.instances is None:
        yield from names
        return
    wanted = set(use.instances)
    yield from (name for number, name in enumerate(names) if number in wanted)
