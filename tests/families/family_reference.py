"""Tiny random models of any family in float64: named and shaped by transformers' own `save_pretrained`, which writes
a checkpoint as it is published, and computed by transformers with every float a float64."""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
import transformers
from proof.tiny import F64, Weights, true_float64
from safetensors.torch import load_file

Config = dict[str, Any]
Shapes = dict[str, tuple[int, ...]]

transformers.utils.logging.set_verbosity_error()
transformers.utils.logging.disable_progress_bar()


def module_of(c: Config) -> str:
    """transformers' module for a config."""
    return str(c["model_type"]).removesuffix("_text")


def _config(c: Config) -> Any:
    made = type(transformers.AutoConfig.for_model(c["model_type"])).from_dict({**c, "dtype": "float64"})
    made._attn_implementation = "eager"
    made._experts_implementation = "eager"
    return made


def _class(c: Config) -> Any:
    return getattr(transformers, c["architectures"][0])


@contextlib.contextmanager
def _quietly(c: Config) -> Iterator[None]:
    with true_float64(module_of(c)), torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def tensor_shapes(c: Config) -> Shapes:
    """Name -> shape of every tensor that transformers saves for this config."""
    return dict(_tensor_shapes(repr(sorted(c.items())), _Hashless(c)))


class _Hashless:
    """A config that the cache takes for equal; its key is beside it."""

    def __init__(self, c: Config) -> None:
        self.config = c

    def __hash__(self) -> int:
        return 0

    def __eq__(self, other: object) -> bool:
        return True


@cache
def _tensor_shapes(key: str, c: _Hashless) -> tuple[tuple[str, tuple[int, ...]], ...]:
    with _quietly(c.config), tempfile.TemporaryDirectory() as folder:
        _class(c.config)(_config(c.config)).save_pretrained(folder)
        saved = {n: t for file in Path(folder).glob("*.safetensors") for n, t in load_file(file).items()}
    return tuple((name, tuple(tensor.shape)) for name, tensor in sorted(saved.items()))


def transformers_logits(c: Config, weights: Mapping[str, F64], tokens: list[int]) -> F64:
    """[tokens, vocab]: transformers' logits for one sequence; it expects every tensor, and none is missing."""
    with _quietly(c):
        state = {name: torch.from_numpy(np.ascontiguousarray(w)) for name, w in weights.items()}
        model, info = _class(c).from_pretrained(
            None, config=_config(c), state_dict=state, output_loading_info=True, dtype=torch.float64,
            attn_implementation="eager", experts_implementation="eager",
        )  # fmt: skip
        assert not any(info.values()), info
        out = model.eval()(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    assert out.dtype == torch.float64
    return out.numpy().copy()


def unchecked(c: Config) -> contextlib.AbstractContextManager[Any]:
    """Inside, the config class for `c` takes any number of heads. Some refuse what does not divide the hidden size,
    even where head_dim is written out; their models compute all the same."""
    cls = type(transformers.AutoConfig.for_model(c["model_type"]))
    others = [v for v in cls.__class_validators__ if v.__name__ != "validate_architecture"]
    return mock.patch.object(cls, "__class_validators__", others)


def random_weights(c: Config, shapes: Shapes, rng: np.random.Generator) -> Weights:
    """Weights with which every head, channel and row matters: logits of order one, attention far from uniform, router
    logits well apart."""
    offset = module_of(c) in ("qwen3_next", "gemma3")  # norms multiply by 1 + weight
    made: Weights = {}
    for name, shape in shapes.items():
        noise = rng.standard_normal(shape)
        if name.endswith("linear_attn.norm.weight"):
            made[name] = 1.0 + 0.3 * noise
        elif "norm" in name or name.endswith(("scale", "layer_scalar")):
            made[name] = 0.3 * noise if offset else 1.0 + 0.3 * noise
        elif name.endswith("A_log"):
            made[name] = np.log(rng.uniform(0.2, 3.0, shape))
        elif name.endswith(("bias", "sinks", "conv1d.weight")):
            made[name] = 0.5 * noise
        elif "embed_tokens" in name:
            made[name] = noise
        else:
            strong = ("q_proj", "k_proj", "qkv", "q_b_proj", "kv_a", "gate.weight", "router")
            inputs = shape[-2] if name.endswith("gate_up_proj") and _transposed(c) else shape[-1]
            made[name] = (2.0 if any(s in name for s in strong) else 1.0) * noise / np.sqrt(inputs)
    return made


def _transposed(c: Config) -> bool:
    return module_of(c) == "gpt_oss"
