"""A plan written into vLLM's ModelConfig: the counts of the virtual checkpoint where the stock ones stood."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from oddrank.checkpoint.jsonfile import read_object
from oddrank.engines.vllm import marker
from oddrank.errors import OddrankError
from oddrank.layout.plan import Plan
from oddrank.transform.config import virtual_quantization

IGNORES_HEAD_DIM = {
    "Qwen2ForCausalLM": ("LlamaForCausalLM", {"qkv_bias": True, "attention_bias": False, "mlp_bias": False}),
}
"""vLLM classes that compute head_dim as hidden_size / num_attention_heads whatever the config says -> the class with
the same arithmetic that reads it, and the switches it needs (read from vLLM 0.32's qwen2.py and llama.py)."""


def is_applied(model_config: Any) -> bool:
    """Has a plan been written into this config, here or in the process it came from?"""
    return getattr(model_config.hf_config, marker.NAME, None) is not None


def apply(model_config: Any, plan: Plan, folder: Path) -> None:
    """Write `plan` into a ModelConfig, once; nothing where the plan is the identity.

    Raises OddrankError where the config is not the one the plan was made for (hf_overrides, another revision).
    """
    if plan.is_identity() or is_applied(model_config):
        return
    stock, planned = plan.model.stock(), plan.virtual().counts()
    _check_stock(model_config, plan, stock, folder)
    fixed = dict(plan.model.config_fixed)
    changed = {key: planned[axis] for key, axis in plan.model.config_axes} | fixed
    quantization = virtual_quantization(plan, read_object(folder / "config.json").get("quantization_config"))
    for config in _configs(model_config):
        for key, value in changed.items():
            if config is model_config.hf_text_config or hasattr(config, key):
                setattr(config, key, value)
        if quantization is not None and hasattr(config, "quantization_config"):
            config.quantization_config = quantization
        marker.mark(config, plan)
    heads = planned[dict(plan.model.config_axes)["num_attention_heads"]]
    if model_config.architecture in IGNORES_HEAD_DIM and fixed.get("head_dim", 0) * heads != plan.model.hidden:
        _respell(model_config)
    model_config.model_arch_config = model_config.get_model_arch_config()


def _respell(model_config: Any) -> None:
    name, switches = IGNORES_HEAD_DIM[model_config.architecture]
    for config in _configs(model_config):
        for key, value in switches.items():
            setattr(config, key, value)
    model_config.hf_config.architectures = [name]
    # what ModelConfig keeps of the class it was going to use
    model_config._model_info, model_config._architecture = model_config.registry.inspect_model_cls([name], model_config)


def _configs(model_config: Any) -> Iterator[Any]:
    """Every config object that model code may read its sizes from: the model's, its text part, and what a wrapper
    for speculative heads wraps."""
    seen: list[Any] = []
    for config in (
        model_config.hf_config,
        model_config.hf_text_config,
        getattr(model_config.hf_config, "model", None),
    ):
        if config is not None and not isinstance(config, (str, dict)) and all(config is not s for s in seen):
            seen.append(config)
    return iter(seen)


def _check_stock(model_config: Any, plan: Plan, stock: dict[str, int], folder: Path) -> None:
    text = model_config.hf_text_config
    for key, axis in plan.model.config_axes:
        given = getattr(text, key, None)
        if given is not None and given != stock[axis]:
            raise OddrankError(
                f"vLLM's config of {folder} has {key} = {given}; config.json there says {stock[axis]}, which is what "
                f"the plan at TP={plan.tp} was made for. Leave {key} out of --hf-overrides, or serve with ODDRANK=0."
            )
