"""Tiny models of vLLM's families whose projections are stored as integers, and what those mean.

As in tiny_models.py, 3 divides neither heads nor widths, and every rank of TP=3 gets trained ones. Widths are multiples
of 32 columns, which vLLM's kernel for int4 on a CPU wants.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from formats import dialects
from formats.codec import F64, Parts, Raw, numbers
from formats.dialects import F32
from formats.integers import Packed, auto_round, awq, ct, gptq
from formats.packed_models import tensor
from safetensors.torch import load_file, save_file
from tiny_models import write_tiny
from transformers import AutoModelForCausalLM

GROUP = 32
"""Columns of a scale group."""

HEADS, KV_HEADS, WIDTH = 10, 5, 448
SIZES = {"num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS, "hidden_size": 640, "intermediate_size": WIDTH}


class Storage(NamedTuple):
    """quantize: matrix [N, K] -> stored tensors by suffix. decode: back."""

    quantize: Callable[[F32], dict[str, Raw]]
    decode: Callable[[Parts], F64]


class Kind(NamedTuple):
    """A family, its quantization_config, and the storage of each layer, in turn."""

    family: str
    config: dict[str, Any]
    layers: tuple[Storage, ...]

    def of(self, name: str) -> Storage:
        """The storage of a tensor "model.layers.1...."."""
        return self.layers[int(name.split(".")[2]) % len(self.layers)]


def _one(family: str, packing: Packed) -> Kind:
    return Kind(family, packing.config, (Storage(packing.quantize, packing.decode),))


def _compressed(family: str, form: str, groups: Sequence[tuple[dict[str, Any], Storage]]) -> Kind:
    """compressed-tensors, a config group for each layer in turn."""
    said = {f"group_{i}": group | {"targets": [rf"re:.*layers\.{i}\..*"]} for i, (group, _) in enumerate(groups)}
    config = {"quant_method": "compressed-tensors", "format": form, "config_groups": said, "ignore": ["lm_head"]}
    return Kind(family, config, tuple(storage for _, storage in groups))


def _packed_groups(family: str, *packings: Packed) -> Kind:
    return _compressed(
        family,
        "pack-quantized",
        [(p.config["config_groups"]["group_0"], Storage(p.quantize, p.decode)) for p in packings],
    )


def _w8a8(family: str) -> Kind:
    """int8 with a scale per row; vLLM quantizes activations per token as it runs."""
    weights = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    group = {"weights": weights, "input_activations": weights | {"strategy": "token", "dynamic": True}}
    storage = Storage(
        lambda x: dialects.ct_int8(x, 0.0),
        lambda parts: parts[".weight"].words.view(np.int8) * numbers(parts[".weight_scale"]),
    )
    return _compressed(family, "int-quantized", [(group, storage)] * 2)


KINDS: dict[str, Kind] = {
    "gptq": _one("qwen2", gptq(4, GROUP, symmetric=True)),
    "awq": _one("qwen3", awq(GROUP)),
    "auto-round": _one(
        "qwen3",
        gptq(4, GROUP, symmetric=True, index=False,
             config=auto_round("auto_round:auto_gptq", group_size=GROUP, sym=True)),
    ),
    "int4": _packed_groups(
        "llama", ct(4, GROUP), ct(4, GROUP, symmetric=False), ct(4, 0), ct(4, 0, symmetric=False)
    ),
    "w8a8": _w8a8("qwen3"),
    "gptq-int8": _one("qwen2", gptq(8, GROUP, symmetric=True)),
    "gptq-asym": _one("qwen2", gptq(4, GROUP)),
    "int8": _packed_groups("llama", ct(8, GROUP), ct(8, 0)),
}  # fmt: skip


def write_quantized(name: str, folder: Path) -> Path:
    """A random model in fp16 with quantized projections. Beside it, dense and in fp64: what those mean."""
    kind = KINDS[name]
    write_tiny(kind.family, folder, torch.float16, num_hidden_layers=max(2, len(kind.layers)), **SIZES)
    config = json.loads((folder / "config.json").read_text())
    stored: dict[str, torch.Tensor] = {}
    meant: dict[str, torch.Tensor] = {}
    for key, weight in load_file(folder / "model.safetensors").items():
        if key.endswith("_proj.weight"):
            parts = kind.of(key).quantize(np.ascontiguousarray(weight.float().numpy()))
            stored |= {key.removesuffix(".weight") + suffix: tensor(raw) for suffix, raw in parts.items()}
            meant[key] = torch.from_numpy(np.ascontiguousarray(kind.of(key).decode(parts)))
        else:
            stored[key], meant[key] = weight, weight.double()
    for at, tensors, said in ((folder, stored, {"quantization_config": kind.config}), (meaning(folder), meant, {})):
        at.mkdir(exist_ok=True)
        (at / "config.json").write_text(json.dumps(config | said))
        save_file(tensors, at / "model.safetensors", metadata={"format": "pt"})
    return folder


def meaning(folder: Path) -> Path:
    """Where the dense model is."""
    return folder.with_name(f"{folder.name}-meant")


def dense_model(folder: Path) -> torch.nn.Module:
    """transformers' own, in fp64, with the weights that the stored integers mean."""
    model: torch.nn.Module = AutoModelForCausalLM.from_pretrained(
        meaning(folder), dtype=torch.float64, attn_implementation="eager"
    )
    return model.eval()
