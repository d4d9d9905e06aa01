"""Tiny random models in float64: their weights, and transformers' logits for them in true float64.

transformers computes norms, rotary tables and (in eager attention) the softmax in float32 whatever the model's dtype.
Here those casts go to float64, for the reference and for the padded model alike.
"""

from __future__ import annotations

import contextlib
import importlib
import warnings
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import numpy.typing as npt
import torch
import transformers
from layout.shapes import Config, config, tensor_table

F64 = npt.NDArray[np.float64]
Weights = dict[str, F64]


class Memory:
    """Stands in for a checkpoint: float64 weights in memory, seen as raw words."""

    def __init__(self, weights: Mapping[str, F64]) -> None:
        self.weights = dict(weights)

    def array(self, name: str) -> npt.NDArray[np.uint64]:
        return self.weights[name].view(np.uint64)


def random_weights(c: Config, rng: np.random.Generator) -> Weights:
    """Weights with which every head, channel and row matters: logits of order one, attention far from uniform."""
    made: Weights = {}
    for name, tensor in tensor_table(c, "F64").items():
        if name.endswith("norm.weight"):
            made[name] = 1.0 + 0.3 * rng.standard_normal(tensor.shape)
        elif name.endswith(".bias"):
            made[name] = 0.5 * rng.standard_normal(tensor.shape)
        elif name == "model.embed_tokens.weight":
            made[name] = rng.standard_normal(tensor.shape)
        else:
            scale = 2.0 if ".q_proj" in name or ".k_proj" in name else 1.0
            made[name] = scale * rng.standard_normal(tensor.shape) / np.sqrt(tensor.shape[-1])
    return made


SHAPES = (
    # q, kv, head_dim, mlp, vocab
    (6, 2, 4, 22, 40),
    (9, 3, 4, 18, 41),
    (8, 4, 4, 15, 33),
    (12, 2, 2, 20, 48),
    (4, 4, 4, 9, 64),
    (10, 2, 4, 31, 50),
)


def random_config(variant: str, rng: np.random.Generator) -> Config:
    """A tiny config of one of SHAPES; tied or not; with head_dim apart from hidden / heads where the family allows."""
    q, kv, d, mlp, vocab = SHAPES[rng.integers(len(SHAPES))]
    hidden = q * d
    if variant in ("mistral", "qwen3", "qwen3+qkv_bias+o_bias"):
        hidden = int(rng.choice([q * d, 2 * q + 5, 28]))
    elif variant.startswith("llama"):
        hidden = int(rng.choice([q * d, 2 * q, 3 * q]))
    more = {}
    if variant == "mistral" and rng.random() < 0.3:
        more["sliding_window"] = 4
    return config(
        variant,
        q=q,
        kv=kv,
        head_dim=d,
        hidden=hidden,
        mlp=mlp,
        vocab=vocab,
        tied=bool(rng.random() < 0.3),
        layers=2,
        torch_dtype="float64",
        **more,
    )


class _Float64Torch:
    """`torch` with every float type a float64."""

    float32 = float = float64 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def true_float64(model_type: str) -> Iterator[None]:
    """Inside, transformers' code for `model_type` knows no float32."""
    modules = [
        importlib.import_module(f"transformers.models.{model_type}.modeling_{model_type}"),
        importlib.import_module("transformers.modeling_rope_utils"),
    ]
    with contextlib.ExitStack() as stack:
        for module in modules:
            stack.enter_context(mock.patch.object(module, "torch", _Float64Torch()))
        stack.enter_context(mock.patch.object(torch.Tensor, "float", torch.Tensor.double))
        default = torch.get_default_dtype()
        torch.set_default_dtype(torch.float64)
        try:
            yield
        finally:
            torch.set_default_dtype(default)


def transformers_config(c: Config) -> Any:
    """The config as transformers' own class reads it from config.json."""
    cls = transformers.AutoConfig.for_model(c["model_type"]).__class__
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return cls.from_dict({**c, "dtype": "float64"})


def transformers_logits(c: Config, weights: Mapping[str, F64], tokens: list[int]) -> F64:
    """[tokens, vocab]: transformers' logits for one sequence, all in float64; the state dict must fit exactly."""
    with true_float64(c["model_type"]), torch.inference_mode():
        made = transformers_config(c)
        made._attn_implementation = "eager"
        cls = getattr(transformers, c["architectures"][0])
        with mock.patch.object(cls, "init_weights", lambda self: None):  # every weight is loaded below
            model = cls(made)
        state = {name: torch.from_numpy(np.ascontiguousarray(w)) for name, w in weights.items()}
        if c.get("tie_word_embeddings"):
            state.setdefault("lm_head.weight", state["model.embed_tokens.weight"])
        model.load_state_dict(state, strict=True, assign=True)
        model.eval()
        out = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0]
    assert out.dtype == torch.float64
    return out.numpy().copy()


def interpreter_facts(c: Config) -> SimpleNamespace:
    """What the arithmetic needs beyond weights, by each family's documented defaults."""
    heads = c["num_attention_heads"]
    return SimpleNamespace(
        layers=c["num_hidden_layers"],
        hidden=c["hidden_size"],
        head_dim=c.get("head_dim") or c["hidden_size"] // heads,
        theta=c["rope_theta"],
        eps=c["rms_norm_eps"],
        tied=bool(c.get("tie_word_embeddings")),
        vocab=c["vocab_size"],
        window=c.get("sliding_window"),
        qk_norm=c["model_type"] == "qwen3",
    )
