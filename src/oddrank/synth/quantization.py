"""What a release's config says about its storage, in the dialect of the tool that made it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from oddrank.synth import schemes
from oddrank.synth.release import Release, Stored
from oddrank.synth.schemes import Scheme

Config = dict[str, Any]

_LINEAR = frozenset(
    (
        "attention", "delta_net", "delta_net_gate", "mlp", "shared", "expert", "router", "shared_gate", "lm_head",
        "mtp_fc", "draft_fc", "kernel_projection", "selector", "projection", "vision", "conv", "embedding",
    )
)  # fmt: skip
"""Kinds that are modules with a weight, which a list of exceptions may name."""

_PRODUCER = {"name": "modelopt", "version": "0.43.0"}


def quantization_config(release: Release) -> Config | None:
    """`quantization_config` of config.json; None in bf16."""
    match release.format:
        case "bf16":
            return None
        case "fp8-block":
            return {
                "activation_scheme": "dynamic",
                "fmt": "e4m3",
                "modules_to_not_convert": list(_plain(release)),
                "quant_method": "fp8",
                "weight_block_size": [128, 128],
            }
        case "nvfp4-mixed":
            return {
                "ignore": _modelopt_ignore(release),
                "producer": _PRODUCER,
                "quant_algo": "MIXED_PRECISION",
                "quant_method": "modelopt",
                "quantized_layers": _quantized_layers(release),
            }
        case "mxfp4":
            return _quark(release)
        case "mxfp4-experts":
            left = ["model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head"]
            return {"modules_to_not_convert": left, "quant_method": "mxfp4"}
        case "gptq" | "gptq-int8":
            return _gptq(release)
        case "awq":
            return {
                "bits": 4,
                "group_size": release.group,
                "modules_to_not_convert": [m for m in _plain(release) if "embed" not in m],
                "quant_method": "awq",
                "version": "gemm",
                "zero_point": True,
            }
        case "auto-round" | "auto-round-awq":
            return _auto_round(release)
        case "int8" | "int4-ct" | "int4-ct-asym" | "int8-ct" | "mxfp8":
            return _one_scheme(release)
        case "fp8-ct":
            return _per_channel(release)
        case _:
            return _compressed_tensors(release)


def hf_quant_config(release: Release) -> Config | None:
    """ModelOpt's own file, hf_quant_config.json; None in other formats."""
    if release.format != "nvfp4-mixed":
        return None
    return {
        "producer": _PRODUCER,
        "quantization": {
            "exclude_modules": _modelopt_ignore(release),
            "kv_cache_quant_algo": None,
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": _quantized_layers(release),
        },
    }


def _module(stored: Stored) -> str:
    return stored.logical.name.removesuffix(".weight")


def _plain(release: Release) -> Iterator[str]:
    """Modules whose weight stays bf16."""
    for stored in release.stored():
        is_module = stored.logical.kind in _LINEAR and stored.logical.name.endswith(".weight")
        if is_module and (stored.scheme is None or stored.scheme is schemes.DENSE):
            yield _module(stored)


def _modelopt_ignore(release: Release) -> list[str]:
    wild = ("linear_attn.in_proj_a", "linear_attn.in_proj_b", "mlp.gate", "mlp.shared_expert_gate")
    present = {name.split(".layers.")[-1].partition(".")[2] for name in _plain(release)}
    found = [f"*.{name}" for name in wild if name in present]
    return [*found, "mtp*", *(["model.visual*"] if release.wrapped else [])]


def _quantized_layers(release: Release) -> Config:
    said: dict[str, Config] = {
        schemes.FP8_TENSOR.name: {"quant_algo": "FP8"},
        schemes.NVFP4.name: {"group_size": 16, "quant_algo": "NVFP4"},
    }
    return {_module(s): said[s.scheme.name] for s in release.stored() if s.scheme is not None and s.scheme.name in said}


def _values(bits: int, **more: object) -> Config:
    base: Config = {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": None,
        "num_bits": bits,
        "observer": "memoryless_minmax",
        "observer_kwargs": {},
        "strategy": "tensor",
        "symmetric": True,
        "type": "float",
    }
    return base | more


_CT_TARGETS = {
    "attention": r"re:.*self_attn\.(q|k|v|o)_proj$",
    "delta_net": r"re:.*linear_attn\.(in_proj_qkv|in_proj_z|out_proj)$",
    "shared": r"re:.*mlp\.shared_expert\.(gate|up|down)_proj$",
    "mlp": r"re:.*mlp\.(gate|up|down)_proj$",
    "expert": r"re:.*mlp\.experts\.\d+\.(gate|up|down)_proj$",
}


def _per_channel(release: Release) -> Config:
    """compressed-tensors' FP8_DYNAMIC: every linear layer but those it lists."""
    return {
        "config_groups": {
            "group_0": {
                "format": "float-quantized",
                "input_activations": _values(8, strategy="token", dynamic=True, observer=None),
                "output_activations": None,
                "targets": ["Linear"],
                "weights": _values(8, strategy="channel"),
            }
        },
        "format": "float-quantized",
        "global_compression_ratio": None,
        "ignore": [m for m in _plain(release) if "embed" not in m],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def _compressed_tensors(release: Release) -> Config:
    kinds = {s.logical.kind for s in release.stored() if s.scheme is not None}

    def targets(scheme: Scheme) -> list[str]:
        return [_CT_TARGETS[k] for k, s in release.recipe.body.items() if s is scheme and k in kinds]

    if release.format == "nvfp4-ct":
        fp8 = schemes.FP8_CHANNEL
        weights = _values(8, strategy="channel")
        activations = _values(8, strategy="token", dynamic=True, observer=None)
    else:
        fp8 = schemes.FP8_BLOCK_CT
        weights = _values(8, strategy="block", block_structure=[128, 128])
        activations = _values(8, strategy="group", group_size=128, dynamic=True, observer=None)
    e4m3 = "torch.float8_e4m3fn"
    return {
        "config_groups": {
            "group_0": {
                "format": "float-quantized",
                "input_activations": activations,
                "output_activations": None,
                "targets": targets(fp8),
                "weights": weights,
            },
            "group_1": {
                "format": "nvfp4-pack-quantized",
                "input_activations": _values(
                    4,
                    strategy="tensor_group",
                    group_size=16,
                    dynamic="local",
                    observer="static_minmax",
                    scale_dtype=e4m3,
                ),
                "output_activations": None,
                "targets": targets(schemes.NVFP4_CT),
                "weights": _values(4, strategy="tensor_group", group_size=16, scale_dtype=e4m3),
            },
        },
        "format": "mixed-precision",
        "global_compression_ratio": None,
        "ignore": [*(m for m in _plain(release) if not m.startswith("mtp.") and "embed" not in m), "re:^mtp.*"],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def _one_scheme(release: Release) -> Config:
    """compressed-tensors with every linear layer alike."""
    per_group: Config = {"group_size": release.group, "strategy": "group", "type": "int"}
    weights, activations, fmt = {
        "int8": (
            _values(8, type="int", strategy="channel"),
            _values(8, type="int", strategy="token", dynamic=True, observer=None),
            "int-quantized",
        ),
        "int4-ct": (_values(4, **per_group), None, "pack-quantized"),
        "int4-ct-asym": (_values(4, **per_group | {"symmetric": False}), None, "pack-quantized"),
        "int8-ct": (_values(8, type="int", strategy="channel"), None, "pack-quantized"),
        "mxfp8": (
            _values(8, group_size=32, strategy="group", scale_dtype="torch.uint8"),
            _values(8, group_size=32, strategy="group", dynamic=True, observer=None, scale_dtype="torch.uint8"),
            "mxfp8-quantized",
        ),
    }[release.format]
    return {
        "config_groups": {
            "group_0": {
                "format": fmt,
                "input_activations": activations,
                "output_activations": None,
                "targets": ["Linear"],
                "weights": weights,
            }
        },
        "format": fmt,
        "global_compression_ratio": None,
        "ignore": [m for m in _plain(release) if "embed" not in m],
        "kv_cache_scheme": None,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
    }


def _gptq(release: Release) -> Config:
    inside = [m for m in _plain(release) if "embed" not in m and m != "lm_head"]
    return {
        "bits": 8 if release.format == "gptq-int8" else 4,
        "checkpoint_format": "gptq",
        "damp_percent": 0.01,
        "desc_act": False,
        # GPTQModel's patterns; "-:" leaves a module as it was
        "dynamic": {f"-:^{re.escape(m)}$": {} for m in inside},
        "group_size": release.group,
        "lm_head": False,
        "quant_method": "gptq",
        "static_groups": False,
        "sym": True,
        "true_sequential": True,
    }


def _auto_round(release: Release) -> Config:
    awq = release.format == "auto-round-awq"
    return {
        "autoround_version": "0.16.1",
        "bits": 4,
        "block_name_to_quantize": "model.layers",
        "data_type": "int",
        "group_size": release.group,
        "packing_format": "auto_round:auto_awq" if awq else "auto_round:auto_gptq",
        "quant_method": "auto-round",
        "sym": not awq,
    }


def _quark_values(dtype: str, **more: object) -> Config:
    base: Config = {
        "ch_axis": -1,
        "dtype": dtype,
        "group_size": 32,
        "is_dynamic": False,
        "is_scale_quant": False,
        "mx_element_dtype": None,
        "observer_cls": "PerBlockMXObserver",
        "qscheme": "per_group",
        "round_method": "half_even",
        "scale_calculation_mode": "even",
        "scale_format": "e8m0",
        "scale_type": "float",
        "symmetric": None,
    }
    return base | more


def _quark_layer(values: Config) -> Config:
    return {
        "bias": None,
        "input_tensors": values | {"is_dynamic": True},
        "output_tensors": None,
        "target_device": None,
        "weight": values,
    }


def _quark(release: Release) -> Config:
    per_channel = _quark_values(
        "fp8_e4m3",
        ch_axis=0,
        group_size=None,
        observer_cls="PerChannelMinMaxObserver",
        qscheme="per_channel",
        scale_calculation_mode=None,
        scale_format=None,
        symmetric=True,
    )
    exclude = [m for m in _plain(release) if "embed" not in m and not m.endswith("conv1d")]
    return {
        "algo_config": None,
        "exclude": exclude,
        "export": {
            "kv_cache_group": [],
            "min_kv_scale": 0.0,
            "pack_method": "reorder",
            "weight_format": "real_quantized",
            "weight_merge_groups": None,
        },
        "global_quant_config": _quark_layer(_quark_values("fp4")),
        "kv_cache_quant_config": {},
        "layer_quant_config": {"mtp.layers.0.*": _quark_layer(per_channel)},
        "layer_type_quant_config": {},
        "quant_method": "quark",
        "quant_mode": "eager_mode",
    }
