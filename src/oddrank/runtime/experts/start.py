"""Setting the experts of a loaded model going: with the backend asked for, or with the one that measures best."""

import logging
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from oddrank.errors import OddrankError
from oddrank.runtime.experts.backends import BACKENDS, able
from oddrank.runtime.experts.layer import Experts
from oddrank.runtime.experts.share import ExpertShare
from oddrank.runtime.layers.module import Module
from oddrank.runtime.step import Step
from oddrank.runtime.threads import torch_threads
from oddrank.words import counted

_PROMPT, _TOKENS, _WARM = 32, 8, 2
"""What is measured: a prompt of this many tokens and an answer of this many, after an answer of `_WARM` tokens."""

_KEPT = 0.15
"""Of the device's free memory, what resident experts must leave for keys, values and activations."""

log = logging.getLogger(__name__)


class Runs(Protocol):
    """A model, as far as starting its experts needs it."""

    def modules(self) -> Iterator[Module]: ...
    def new_cache(self, slots: int) -> Any: ...
    def __call__(self, step: Step, cache: Any) -> Tensor: ...
    def logits(self, hidden: Tensor) -> Tensor: ...


class Measured(NamedTuple):
    """Seconds of the slowest rank: for a prompt of _PROMPT tokens, for a token of the answer (the median)."""

    kind: str
    prompt: float
    token: float

    @property
    def total(self) -> float:
        return self.prompt + _TOKENS * self.token

    def __str__(self) -> str:
        return f"{self.kind} {1e3 * self.token:.1f} ms a token, {1e3 * self.prompt:.0f} ms for the prompt"


def start_experts(model: Runs) -> str:
    """Have every expert layer of `model` compute with the backend that the options name. Returns, and logs on every
    rank, what that is, and for "auto" why; "" for a model without experts.

    All ranks call it at the same time. "auto" runs the model on a prompt and an answer with each backend; all ranks
    choose the same, by the slowest rank's times.
    """
    layers = [module for module in model.modules() if isinstance(module, Experts)]
    if not layers:
        return ""
    share = layers[0].share
    why = _measure(layers, model, share) if share.options.kind == "auto" else ""
    if not why:
        _use(layers, share.options.kind)
    said = f"experts: {_describe(layers, share)}{why}"
    log.info(said)
    return said


def device_nbytes(model: Module) -> int:
    """Bytes that a started model holds on the rank's device: without banks in the host memory of a GPU's rank, with the
    caches of what is in them."""
    layers = [module for module in model.modules() if isinstance(module, Experts)]
    elsewhere = sum(layer.held() for layer in layers)
    shared = sum(share.nbytes() for share in {id(layer.share): layer.share for layer in layers}.values())
    return model.nbytes() - elsewhere + sum(layer.device_nbytes() for layer in layers) + shared


def _use(layers: Sequence[Experts], kind: str) -> None:
    for layer in layers:
        layer.use(kind)


def _measure(layers: Sequence[Experts], runs: Runs, share: ExpertShare) -> str:
    kinds = [kind for kind in BACKENDS if all(kind in able(layer.layouts) for layer in layers)]
    if not kinds:
        raise OddrankError("No backend computes the experts of all layers: some are stored in ways the others are not.")
    left_out = ""
    if not _all_fit(layers, share) and "resident" in kinds:
        kinds.remove("resident")
        left_out = "; resident left out: the device of some rank has no room for all experts"
    found = []
    for kind in kinds:
        _use(layers, kind)
        found.append(_slowest(kind, _seconds(runs, share), share))
    best = min(found, key=lambda measured: measured.total)
    _use(layers, best.kind)
    for layer in layers:
        layer.settle()
    return f". auto measured a prompt of {_PROMPT} and {_TOKENS} tokens: {'; '.join(map(str, found))}{left_out}"


def _all_fit(layers: Sequence[Experts], share: ExpertShare) -> bool:
    """Whether every rank's device has room for all experts."""
    fits = True
    if share.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(share.device)
        fits = sum(layer.held() for layer in layers) <= free * (1 - _KEPT)
    said = share.group.all_gather_list(torch.tensor([int(fits)], device=share.device))
    return all(bool(one) for one in said)


@torch.inference_mode()
def _seconds(runs: Runs, share: ExpertShare) -> tuple[float, float]:
    """For the prompt, and for a token of the answer."""
    cache = runs.new_cache(1)
    _answer(runs, share, cache, _PROMPT, _WARM)
    return _answer(runs, share, runs.new_cache(1), _PROMPT, _TOKENS)


def _answer(runs: Runs, share: ExpertShare, cache: Any, prompt: int, tokens: int) -> tuple[float, float]:
    """The tokens are made up and differ, so that experts are chosen as a text would."""
    device = share.device
    numbers = [7 * i % 251 for i in range(prompt + tokens)]
    times = [_now(device)]
    for at in range(tokens + 1):
        new, cached = (numbers[:prompt], 0) if at == 0 else (numbers[prompt + at - 1 : prompt + at], prompt + at - 1)
        step = Step.of([(0, new, cached)], device)
        with torch_threads(torch.get_num_threads() if at == 0 else 1):
            runs.logits(runs(step, cache)[-1:])
        times.append(_now(device))
    steps = [b - a for a, b in pairwise(times)]
    return steps[0], median(steps[1:])


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _slowest(kind: str, mine: tuple[float, float], share: ExpertShare) -> Measured:
    times = share.group.all_gather_list(torch.tensor([mine], dtype=torch.float64, device=share.device))
    prompt, token = torch.cat(times).amax(0).tolist()
    return Measured(kind, prompt, token)


def _describe(layers: Sequence[Experts], share: ExpertShare) -> str:
    backend, experts = layers[0].backend, layers[0].layouts[0].experts
    size = sum(layer.held() for layer in layers)
    parts = [f"{backend.name}, {counted(len(layers), 'layer')} of {experts}, {_bytes(size)}"]
    parts.append(f"on {share.device}" if backend.on_device else "in host memory")
    if backend.caches:
        slots = share.slots(experts)
        parts.append(f"with {slots} of each layer cached on {share.device} ({_bytes(size * slots // experts)})")
    if backend.name in ("cpu", "hybrid"):
        parts.append(f"computed on {counted(share.pool.size, 'thread')}")
    return " ".join(parts)


def _bytes(n: int) -> str:
    return f"{n / 1e9:.1f} GB" if n >= 1e9 else f"{n / 1e6:.1f} MB"
