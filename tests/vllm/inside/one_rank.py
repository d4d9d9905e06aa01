"""One rank of a model of three, built and loaded in this process alone, by vLLM's own code.

vLLM's groups are stand-ins that know their size and rank and move nothing. Kernels that this machine has not (fp8, FP4)
are stand-ins too: what a layer's quantization method creates and accepts while loading does not depend on them.
"""

import importlib
import pkgutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import vllm.distributed.parallel_state as state
import vllm.model_executor.kernels.linear as linear_kernels
import vllm.model_executor.layers.fused_moe as fused_moe
from vllm.config import set_current_vllm_config
from vllm.model_executor.layers.quantization import get_quantization_config
from vllm.model_executor.model_loader import get_model_loader
from vllm.model_executor.model_loader.utils import initialize_model
from vllm.utils.torch_utils import set_default_torch_dtype

MARKS = (0x55, 0xAA)
"""Bytes that fill every parameter before it is loaded, once each: what still holds both was not written."""

METHODS = ("fp8", "modelopt", "modelopt_mixed", "compressed-tensors", "quark")
GROUPS = ("_TP", "_PP", "_DP", "_EP", "_PCP", "_DCP", "_WORLD")


def _group(rank: int, size: int) -> Any:
    group = mock.MagicMock(name=f"group of {size}")
    group.world_size, group.rank_in_group, group.rank, group.local_rank = size, rank, rank, rank
    group.ranks, group.first_rank, group.last_rank = list(range(size)), 0, size - 1
    group.is_first_rank, group.is_last_rank = rank == 0, rank == size - 1
    group.device_group.size.return_value, group.device_group.rank.return_value = size, rank
    return group


@contextmanager
def rank_of(rank: int, ranks: int) -> Iterator[None]:
    """vLLM believes to be this rank of a tensor-parallel group."""
    made = {name: _group(0, 1) for name in GROUPS} | {n: _group(rank, ranks) for n in ("_TP", "_EP", "_WORLD")}
    with mock.patch.multiple(state, **made):
        yield


@contextmanager
def any_kernel() -> Iterator[None]:
    """Every choice of a kernel finds one."""
    for name in METHODS:
        get_quantization_config(name)
    for found in pkgutil.walk_packages(fused_moe.__path__, fused_moe.__name__ + "."):
        if ".oracle" in found.name:
            importlib.import_module(found.name)
    chosen = [n for n in dir(linear_kernels) if n.startswith(("init_", "choose_")) and n.endswith("_kernel")]
    patches = []
    for module in [m for n, m in sys.modules.items() if n.startswith("vllm.") and m is not None]:
        for name in [n for n in vars(module) if n in chosen]:
            patches.append(mock.patch.object(module, name, lambda *_, **__: mock.MagicMock(__name__="stand-in")))
        if hasattr(module, "verify_marlin_supported"):  # asks for a GPU
            patches.append(mock.patch.object(module, "verify_marlin_supported"))
        for name in [n for n in vars(module) if n.startswith("select_") and n.endswith("_moe_backend")]:
            patches.append(mock.patch.object(module, name, partial(_first, getattr(module, name))))
    for patch in patches:
        patch.start()
    try:
        yield
    finally:
        for patch in patches:
            patch.stop()


def _first(select: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
    """What a choice of a backend for experts returns: one that stands for itself, with a stand-in of its kernel."""
    backends = [v for n, v in vars(sys.modules[select.__module__]).items() if n.endswith("MoeBackend")]
    named = [b for kind in backends for b in kind if b.name in ("MARLIN", "TRITON", "CPU")]
    return (named[0] if named else mock.MagicMock()), mock.MagicMock()


def load(config: Any, model_config: Any) -> tuple[Any, set[str]]:
    """(model, names of the parameters of which every byte was written) of one ModelConfig of a VllmConfig."""
    config.compilation_config.static_forward_context.clear()
    with set_current_vllm_config(config), set_default_torch_dtype(model_config.dtype):
        model = initialize_model(vllm_config=config, model_config=model_config)
        stored = {name: _bytes(p) for name, p in model.named_parameters()}
        untouched = {}
        for mark in MARKS:
            for part in stored.values():
                part.fill_(mark)
            get_model_loader(config.load_config).load_weights(model, model_config)
            untouched[mark] = {name: part == mark for name, part in stored.items()}
    first, second = (untouched[mark] for mark in MARKS)
    return model, {name for name in stored if not (first[name] & second[name]).any()}


def _bytes(parameter: torch.Tensor) -> torch.Tensor:
    return parameter.data.view(-1).view(torch.uint8)


def pages(config: Any) -> dict[str, int]:
    """KV-cache bytes of a page, by the kind of cache, of the layers built last."""
    return {
        f"{type(spec).__name__} {name}": spec.page_size_bytes
        for name, layer in config.compilation_config.static_forward_context.items()
        if (spec := getattr(layer, "get_kv_cache_spec", lambda _: None)(config)) is not None
    }
