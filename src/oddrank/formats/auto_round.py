"""AutoRound (`quant_method: auto-round`): integers packed as GPTQ or as AWQ does, named by `packing_format`.

`auto_round:auto_gptq` keeps zero points less one, `auto_round` and `auto_round:gptqmodel` as they are; only the last
has a g_idx. `extra_config` changes bits and groups of single layers. Its fp8 and microscaling formats have files of
their own here. Source: auto-round 0.16.1 (export/export_to_autoround, inference/backend).
"""

from __future__ import annotations

from typing import Any

from oddrank.errors import OddrankError
from oddrank.formats import awq, gptq
from oddrank.formats.base import About, Format
from oddrank.formats.integers import USUAL

ABOUT = About(
    "AutoRound", "packed as GPTQ (`auto_round:auto_gptq`, `auto_round:gptqmodel`) or as AWQ (`auto_round:auto_awq`)"
)

LESS_ONE = ("auto", "auto_round:auto_gptq", "auto_round:gptq")
AS_THEY_ARE = ("auto_round", "auto_round:gptqmodel")
AWQ = ("auto_round:auto_awq", "auto_round:awq")
OTHERS = ("auto_round:llm_compressor", "auto_round:fp8")
METHODS = ("auto-round", "auto_round", "intel/auto-round")


def forms(quantization: dict[str, Any]) -> tuple[Format, ...]:
    if not quantization:
        return gptq.made(4, USUAL), gptq.made(4, USUAL, v2=True), awq.made(USUAL)
    if quantization.get("quant_method") not in METHODS:
        return ()
    packing = str(quantization.get("packing_format") or "auto_round:auto_gptq")
    if packing in OTHERS or packing.startswith("auto_round:fp8") or quantization.get("data_type", "int") != "int":
        return ()
    if packing in AWQ:
        return awq.in_config(quantization, "AutoRound packed as AWQ")
    if packing not in LESS_ONE + AS_THEY_ARE:
        raise OddrankError(
            f'quantization_config says AutoRound with the packing_format "{packing}", which oddrank does not know; it '
            f"knows {', '.join((*LESS_ONE, *AS_THEY_ARE, *AWQ))}. Export the model in one of those."
        )
    return gptq.in_config(quantization, "extra_config", "AutoRound", v2=packing in AS_THEY_ARE)
