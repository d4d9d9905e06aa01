"""Models, one file a family, and the registry that finds them."""

from collections.abc import Mapping
from typing import Any

from oddrank.errors import OddrankError
from oddrank.runtime.models.build import Build, Slice
from oddrank.runtime.models.config import ModelConfig
from oddrank.runtime.models.llama import Llama
from oddrank.runtime.models.mistral import Mistral
from oddrank.runtime.models.qwen2 import Qwen2
from oddrank.runtime.models.qwen3 import Qwen3
from oddrank.runtime.parallel.group import Group
from oddrank.runtime.precision import Precision

MODELS: dict[str, type[Llama]] = {"llama": Llama, "mistral": Mistral, "qwen2": Qwen2, "qwen3": Qwen3}
"""Family name -> the model that runs it."""

_TABLE = "embed_tokens.weight"


def build_model(family: str, raw_config: Mapping[str, Any], part: Slice, group: Group, precision: Precision) -> Llama:
    """One rank of a model, without weights. OddrankError for a family that the runtime has no model of.

    raw_config: the checkpoint's config.json. All ranks call it at the same time (see ParallelLMHead).
    """
    if family not in MODELS:
        raise OddrankError(
            f"The runtime has no model of family {family}. It runs: {', '.join(MODELS)}. A new one is one file "
            "in oddrank/runtime/models."
        )
    made = MODELS[family]
    prefix = next((n.removesuffix(_TABLE) for n in part.names() if n.endswith(_TABLE)), None)
    if prefix is None:
        raise OddrankError(f"The checkpoint's plan has no {_TABLE}, so it is not a decoder of family {family}.")
    return made(Build(ModelConfig.read(raw_config, made.DEFAULTS), part, group, precision, prefix))


__all__ = ["MODELS", "Build", "Llama", "ModelConfig", "Slice", "build_model"]
