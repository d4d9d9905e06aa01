"""vLLM's own loader, whose weights pass through the plan's stream on their way to the model."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from typing import Any

from vllm.distributed import get_tensor_model_parallel_rank
from vllm.logger import init_logger
from vllm.model_executor.model_loader.default_loader import DefaultModelLoader

from oddrank.engines.vllm import marker
from oddrank.engines.vllm.settings import Settings
from oddrank.errors import OddrankError
from oddrank.layout.plan import Plan
from oddrank.transform.stream import Stream

logger = init_logger(f"vllm.{__name__}")  # a child of vLLM's logger, which carries its format and level

_EXPERT = re.compile(r"\.experts\.\d+\.")


FORMATS = {"oddrank_auto": "auto", "oddrank_hf": "hf", "oddrank_safetensors": "safetensors"}
"""The load format that a planned model is given -> the stock one it stands for."""


class PlannedModelLoader(DefaultModelLoader):  # type: ignore[misc]  # vLLM is not there when types are checked
    """DefaultModelLoader under load formats of its own, so that a serve without a plan never meets it. A model without
    a plan beside one that has one (a drafter) gets its iterator untouched."""

    def __init__(self, load_config: Any) -> None:
        stock = copy.copy(load_config)
        stock.load_format = FORMATS[load_config.load_format]
        super().__init__(stock)

    def get_all_weights(self, model_config: Any, model: Any) -> Iterator[tuple[str, Any]]:
        plan = marker.plan_of(model_config.hf_config)
        stock: Iterator[tuple[str, Any]] = super().get_all_weights(model_config, model)
        if plan is None:
            return stock
        check_attention(model, plan)
        if list(getattr(model, "secondary_weights", ())):
            raise OddrankError(
                f"{type(model).__name__} reads weights from a second place, which the plan of {plan.name} knows "
                "nothing about. Serve it at a size that stock vLLM takes."
            )
        strict = Settings.from_environment().strict
        return self._streamed(Stream(plan, stock, "strict" if strict else "warn", self._optional(model)))

    def _streamed(self, stream: Stream[Any]) -> Iterator[tuple[str, Any]]:
        yield from stream
        changed = [t for t in stream.tallies if t.source_shape != t.shape]
        if get_tensor_model_parallel_rank() != 0:
            return
        logger.info(
            "oddrank: %d tensors of %s streamed for TP=%d, %d of them padded; coverage complete",
            sum(t.count for t in stream.tallies), stream.plan.name, stream.plan.tp, sum(t.count for t in changed),
        )  # fmt: skip
        for tally in changed:
            logger.debug(
                "oddrank: %s: %d, %s -> %s", tally.role, tally.count, list(tally.source_shape), list(tally.shape)
            )

    def _optional(self, model: Any) -> Callable[[str], bool]:
        """Names that vLLM may leave out of the stream: other ranks' experts, shards the model says it does not use."""
        unused = getattr(model, "is_unused_checkpoint_weight", None)
        others_experts = self.local_expert_ids is not None

        def optional(name: str) -> bool:
            return (others_experts and _EXPERT.search(name) is not None) or (unused is not None and bool(unused(name)))

        return optional


def check_attention(model: Any, plan: Plan) -> None:
    """Raises OddrankError where the model's attention layers did not take their sizes from the changed config.

    That is how model code shows that ignores a field the plan changes (a head_dim computed from the number of heads).
    """
    from vllm.model_executor.layers.attention import Attention

    planned = plan.virtual().counts()
    wanted = {
        (planned[cache.readers] // plan.tp, max(1, planned[cache.axis] // plan.tp), cache.width // 2)
        for cache in plan.model.kv
        if cache.axis is not None  # a latent that all heads share is no layer of this class
    }
    for name, layer in model.named_modules():
        if not isinstance(layer, Attention) or not wanted:
            continue
        has = (layer.num_heads, layer.num_kv_heads, layer.head_size)
        if has not in wanted:
            planned_sizes = " or ".join(f"{q}, {k} and {d}" for q, k, d in sorted(wanted))
            raise OddrankError(
                f"{type(model).__name__} built {name} with {has[0]} query heads, {has[1]} KV heads and head_dim "
                f"{has[2]} per rank; the plan of {plan.name} at TP={plan.tp} has {planned_sizes}. This "
                "model code does not read the sizes from the config fields that the plan changes, so it cannot run "
                "it; try --model-impl transformers, whose code does, or pad the checkpoint on disk (oddrank pad)."
            )
