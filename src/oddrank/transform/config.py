"""The config of the virtual checkpoint: the stock config with the planned counts, in a form its reader loads."""

from __future__ import annotations

import copy
import functools
import operator
from typing import Any

from oddrank.families import families
from oddrank.layout.plan import Plan


def virtual_config(plan: Plan, config: dict[str, Any], reader: str | None = None) -> dict[str, Any]:
    """config.json for the plan's virtual checkpoint; `config` itself where the plan is the identity.

    reader: "transformers" or "vllm", whose classes will read it (default: the executor's). Values that were
    implied (head_dim) are written out, and a config that the reader's own class would refuse or misread is
    spelled as another architecture with the same arithmetic. Raises OddrankError where there is none.
    """
    if plan.is_identity():
        return config
    result = copy.deepcopy(config)
    text = result
    for key in plan.model.config_path:
        text = text[key]
    counts = plan.virtual().counts()
    for key, axis in plan.model.config_axes:
        *path, last = key.split(".")
        functools.reduce(operator.getitem, path, text)[last] = counts[axis]
    text.update(plan.model.config_fixed)
    quantization = virtual_quantization(plan, result.get("quantization_config"))
    if quantization is not None:
        result["quantization_config"] = quantization
    family = families()[plan.model.family]
    spelled = family.respell(dict(text), reader or plan.executor_facts().reader)
    text.clear()
    text.update(spelled)
    return result


def virtual_quantization(plan: Plan, stock: object) -> dict[str, Any] | None:
    """`quantization_config` of the virtual checkpoint where it differs from the stock one, else None.

    It differs where block scales are rewritten in finer blocks: Hugging Face's `weight_block_size` (128 x 128 where it
    is not given), and the `block_structure` of compressed-tensors' groups.
    """
    block = dict(plan.refined).get("*")
    if block is None or not isinstance(stock, dict):
        return None
    quantization: dict[str, Any] = copy.deepcopy(stock)
    if quantization.get("quant_method") == "fp8":
        quantization.setdefault("weight_block_size", [128, 128])
    groups = quantization.get("config_groups")
    weights = [g.get("weights") for g in groups.values() if isinstance(g, dict)] if isinstance(groups, dict) else []
    for holder, key in ((quantization, "weight_block_size"), *((w, "block_structure") for w in weights)):
        if isinstance(holder, dict) and isinstance(holder.get(key), list):
            holder[key] = [min(block, n) for n in holder[key]]
    return quantization
