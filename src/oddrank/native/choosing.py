"""Tokens drawn from logits, and the likeliest ones."""

import ctypes
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from oddrank.native.calls import call
from oddrank.native.compiled import Library
from oddrank.native.operations import INT, fields

_ALONE = 1 << 19
"""Logits that one thread looks at before another would be awake."""


class Choice(ctypes.Structure):
    """choosing.cpp's."""

    _fields_ = (
        *((name, ctypes.c_double) for name in ("temperature", "top_p", "min_p", "point")),
        ("top_k", ctypes.c_int64),
    )


class ChooseArguments(ctypes.Structure):
    """choosing.cpp's."""

    _fields_ = fields("rows how tokens largest", "count vocab", ("threads", INT))


class LikeliestArguments(ctypes.Structure):
    """choosing.cpp's."""

    _fields_ = fields("rows wanted ids logprobs wanted_logprobs", "count vocab top", ("threads", INT))


class How(NamedTuple):
    """How one token is drawn: as oddrank.runtime.request.Sampling says. point: from 0 to below 1, where in the
    probabilities of those that may come, laid end to end: in the vocabulary's order, or the likeliest first where some
    are cut."""

    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    point: float = 0.0
    top_k: int = 0


def choose(library: Library, rows: Sequence[Tensor], how: Sequence[How], threads: int) -> tuple[list[int], list[float]]:
    """A token for each row of logits, fp32 [vocab], and the row's largest logit: where that is no finite number the
    token is -1."""
    count, vocab = len(rows), len(rows[0])
    tokens, largest = (ctypes.c_int64 * count)(), (ctypes.c_float * count)()
    pointers, choices = _addresses(rows), (Choice * count)(*(Choice(*each) for each in how))
    arguments = ChooseArguments(
        ctypes.addressof(pointers), ctypes.addressof(choices), ctypes.addressof(tokens), ctypes.addressof(largest),
        count, vocab, _threads(count * vocab, threads),
    )  # fmt: skip
    call(library.operation("choose"), arguments, pointers, choices, tokens, largest, rows)
    return list(tokens), list(largest)


def likeliest(
    library: Library, rows: Sequence[Tensor], tokens: Sequence[int], top: int, threads: int
) -> tuple[list[float], list[list[tuple[int, float]]]]:
    """Of each row of logits, fp32 [vocab], the logprob of a token, in nats, and the likeliest tokens with theirs, of
    equals the lower first. NaN where the largest logit is no finite number."""
    count, vocab = len(rows), len(rows[0])
    top = min(top, vocab)
    ids, logprobs = torch.empty(count, top, dtype=torch.int64), torch.empty(count, top)
    pointers, wanted, found = _addresses(rows), (ctypes.c_int64 * count)(*tokens), (ctypes.c_float * count)()
    arguments = LikeliestArguments(
        ctypes.addressof(pointers), ctypes.addressof(wanted), ids.data_ptr(), logprobs.data_ptr(),
        ctypes.addressof(found), count, vocab, top, _threads(count * vocab, threads),
    )  # fmt: skip
    call(library.operation("likeliest"), arguments, pointers, wanted, ids, logprobs, found, rows)
    return list(found), [list(zip(i, p, strict=True)) for i, p in zip(ids.tolist(), logprobs.tolist(), strict=True)]


def _addresses(rows: Sequence[Tensor]) -> "ctypes.Array[ctypes.c_void_p]":
    return (ctypes.c_void_p * len(rows))(*(row.data_ptr() for row in rows))


def _threads(logits: int, threads: int) -> int:
    return threads if logits >= _ALONE else 1
