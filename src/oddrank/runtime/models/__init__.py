"""Models, one file a family, and the registry that finds them."""

from collections.abc import Mapping
from typing import Any

from oddrank.errors import OddrankError
from oddrank.runtime.expert_options import ExpertOptions
from oddrank.runtime.experts.share import ExpertShare
from oddrank.runtime.models.build import Build, Slice
from oddrank.runtime.models.config import ModelConfig
from oddrank.runtime.models.glm4_moe import Glm4MoE
from oddrank.runtime.models.gpt_oss import GptOss
from oddrank.runtime.models.llama import Llama
from oddrank.runtime.models.mistral import Mistral
from oddrank.runtime.models.mixtral import Mixtral
from oddrank.runtime.models.qwen2 import Qwen2
from oddrank.runtime.models.qwen3 import Qwen3
from oddrank.runtime.models.qwen3_5 import Qwen3_5
from oddrank.runtime.models.qwen3_5_moe import Qwen3_5MoE
from oddrank.runtime.models.qwen3_moe import Qwen3MoE
from oddrank.runtime.models.seed_oss import SeedOss
from oddrank.runtime.parallel.group import Group
from oddrank.runtime.precision import Precision

MODELS: dict[str, type[Llama]] = {
    "llama": Llama,
    "mistral": Mistral,
    "qwen2": Qwen2,
    "qwen3": Qwen3,
    "qwen3_5": Qwen3_5,
    "qwen3_5_moe": Qwen3_5MoE,
    "qwen3_moe": Qwen3MoE,
    "mixtral": Mixtral,
    "gpt_oss": GptOss,
    "glm4_moe": Glm4MoE,
    "seed_oss": SeedOss,
}
"""Family name -> the model that runs it."""

_TABLE = "embed_tokens."


def build_model(
    family: str,
    raw_config: Mapping[str, Any],
    part: Slice,
    group: Group,
    precision: Precision,
    experts: ExpertOptions = ExpertOptions(),  # noqa: B008 (immutable)
) -> Llama:
    """One rank of a model, without weights. OddrankError for a family that the runtime has no model of.

    raw_config: the checkpoint's config.json. experts: where routed experts live and who computes them. All ranks call
    it at the same time (see ParallelLMHead).
    """
    if family not in MODELS:
        raise OddrankError(
            f"The runtime has no model of family {family}. It runs: {', '.join(MODELS)}. A new one is one file "
            "in oddrank/runtime/models."
        )
    made = MODELS[family]
    prefix = next((n.partition(_TABLE)[0] for n in part.names() if _TABLE in n), None)
    if prefix is None:
        raise OddrankError(f"The checkpoint's plan has no {_TABLE}weight, so it is not a decoder of family {family}.")
    config = made.CONFIG.read(raw_config, made.DEFAULTS)
    return made(Build(config, part, group, precision, prefix, ExpertShare(experts, group)))


__all__ = ["MODELS", "Build", "Llama", "ModelConfig", "Slice", "build_model"]
