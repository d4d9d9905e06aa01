"""What a stream of padded weights is measured against: the same tensors, each that changes copied once."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from oddrank.transform.recipe import Recipe

Named = Iterable[tuple[str, Any]]


def copied(tensors: Named, made: Mapping[str, Recipe]) -> Iterator[tuple[str, Any]]:
    """`tensors` with every one that changes copied into a tensor of its new shape, rows to rows, by numpy."""
    for name, tensor in tensors:
        recipe = made.get(name)
        if recipe is None or recipe.unchanged:
            yield name, tensor
            continue
        source = tensor.view(torch.uint8 if tensor.element_size() == 1 else torch.uint16).numpy()
        out = np.zeros(recipe.shape, source.dtype)
        common = tuple(slice(0, min(a, b)) for a, b in zip(recipe.shape, source.shape, strict=True))
        out[common] = source[common]
        yield name, torch.from_numpy(out).view(tensor.dtype)
        del source, out  # what is kept over the next tensors decides which pages the allocator hands out


def seconds(tensors: Named) -> float:
    """How long it takes to go through them, touching each."""
    start = time.perf_counter()
    for _, tensor in tensors:
        tensor.view(-1)[:1].clone()
    return time.perf_counter() - start
