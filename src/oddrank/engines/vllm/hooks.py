"""What the plugin installs in vLLM, all of it or nothing.

Extension points of vLLM's own where there are some: an entry a model architecture in MODELS_CONFIG_MAP (runs once per
served model, just before vLLM checks the heads, and knows the TP size), its registries of model loaders and of layers.
The one patch is in patches.py. Every hook may run again in another process on a config that was already changed.
"""

from __future__ import annotations

from typing import Any

from oddrank.engines.vllm import layout_of_vllm, patches
from oddrank.engines.vllm.config import apply, is_applied
from oddrank.engines.vllm.planning import Pair, checkpoint_folder, plan_pair
from oddrank.engines.vllm.settings import Settings
from oddrank.errors import OddrankError
from oddrank.layout.plan import Plan

_installed = False


def install() -> None:
    """Install every hook. Raises OddrankError, with nothing installed, where this vLLM lacks one of the places."""
    global _installed
    if _installed:
        return
    layout_of_vllm.require()
    from vllm.model_executor.layers.linear import ColumnParallelLinear
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
    from vllm.model_executor.model_loader import register_model_loader
    from vllm.model_executor.models import ModelRegistry
    from vllm.model_executor.models.config import MODELS_CONFIG_MAP, VerifyAndUpdateConfig

    from oddrank.engines.vllm.columns import WholeColumnLinear
    from oddrank.engines.vllm.loader import FORMATS, PlannedModelLoader
    from oddrank.engines.vllm.vocabulary import PaddedLMHead, PaddedVocabEmbedding

    # vLLM looks a base model's name up under its causal model's entry, but only where it has none of its own
    named = {a for a in ModelRegistry.get_supported_archs() if not a.endswith("Model") or a.endswith("LMHeadModel")}
    for architecture in {*named, *MODELS_CONFIG_MAP}:
        stock = MODELS_CONFIG_MAP.get(architecture, VerifyAndUpdateConfig)
        MODELS_CONFIG_MAP[architecture] = planning_entry(stock)
    for load_format in FORMATS:
        register_model_loader(load_format)(PlannedModelLoader)
    ColumnParallelLinear.register_oot(WholeColumnLinear)
    VocabParallelEmbedding.register_oot(PaddedVocabEmbedding)
    ParallelLMHead.register_oot(PaddedLMHead)
    patches.plan_drafters()
    _installed = True


def planning_entry(stock: type) -> type:
    """A MODELS_CONFIG_MAP entry that plans the served model and then does what the stock entry does."""

    class Planned(stock):  # type: ignore[misc]
        @staticmethod
        def verify_and_update_config(vllm_config: Any) -> None:
            plan_target(vllm_config)
            stock.verify_and_update_config(vllm_config)  # type: ignore[attr-defined]

    Planned.__name__ = Planned.__qualname__ = f"Planned{stock.__name__}"
    return Planned


def plan_target(vllm_config: Any) -> None:
    """Plan the model of a VllmConfig for its TP size and write the plan into its config. Raises OddrankError."""
    model, ranks = vllm_config.model_config, vllm_config.parallel_config.tensor_parallel_size
    spec = vllm_config.speculative_config
    drafter = getattr(spec, "draft_model_config", None) if spec is not None else None
    if is_applied(model) or model is drafter:
        return
    pair = served_pair(model, drafter, ranks, vllm_config.load_config)
    if pair is None or (pair.target.is_identity() and (pair.drafter is None or pair.drafter.is_identity())):
        return
    stream_weights(vllm_config.load_config, pair)
    if pair.target.is_identity():
        return
    refuse_what_padding_breaks(vllm_config, pair.target)
    apply(model, pair.target, _folder(model, vllm_config.load_config))
    replicate_vision(model, ranks)
    _say(model, pair.target)


def plan_drafter(spec: Any) -> None:
    """Plan the draft model of a SpeculativeConfig, together with its target. Raises OddrankError."""
    drafter, target = spec.draft_model_config, spec.target_model_config
    if drafter is None or drafter is target or is_applied(drafter) or spec.draft_parallel_config is None:
        return
    ranks = spec.draft_parallel_config.tensor_parallel_size
    pair = served_pair(target, drafter, spec.target_parallel_config.tensor_parallel_size, None)
    if pair is None or pair.drafter is None or pair.drafter.is_identity():
        return
    if ranks != pair.drafter.tp:
        raise OddrankError(
            f"the draft model {drafter.model} runs at TP={ranks} and its target at TP={pair.drafter.tp}; both are "
            "planned together only at one size. Leave draft_tensor_parallel_size out, or set ODDRANK_DRAFTER=off."
        )
    apply(drafter, pair.drafter, _folder(drafter, None))
    _say(drafter, pair.drafter)


def served_pair(target: Any, drafter: Any, ranks: int, load_config: Any) -> Pair | None:
    """The plans of a target and its drafter; None where oddrank has nothing to say and stock vLLM takes the size.

    Raises OddrankError with both reasons where stock vLLM will refuse the size too.
    """
    settings = Settings.from_environment()
    try:
        mine = _folder(target, load_config)
        its = None if drafter is None or not drafter.model else _folder(drafter, load_config)
        return plan_pair(mine, its, ranks, settings)
    except OddrankError as error:
        heads = target.model_arch_config.total_num_attention_heads
        if heads % ranks == 0 and not settings.constraints and settings.plan_tp is None:
            _logger().warning("oddrank: no plan for %s, left to stock vLLM: %s", target.model, error)
            return None
        if heads % ranks == 0:
            raise OddrankError(f"oddrank has no plan for {target.model} that meets its settings: {error}") from None
        raise OddrankError(
            f"vLLM does not serve {target.model} at TP={ranks} as it is ({heads} attention heads), and oddrank has no "
            f"plan for it: {error}"
        ) from None


def stream_weights(load_config: Any, pair: Pair) -> None:
    """Have the weights loaded through the plan's stream. Raises OddrankError for a load format that cannot be."""
    from oddrank.engines.vllm.loader import FORMATS

    given = str(load_config.load_format)
    stock = {ours: theirs for theirs, ours in FORMATS.items()}
    if given in stock:
        load_config.load_format = stock[given]
    elif given not in (*FORMATS, "dummy"):
        raise OddrankError(
            f"--load-format {given} does not read safetensors through vLLM's default loader, so "
            f"{_changed(pair.target)} cannot be streamed with it. Use {', '.join(stock)}; "
            "or `oddrank pad` the checkpoint once and serve that."
        )


def refuse_what_padding_breaks(vllm_config: Any, plan: Plan) -> None:
    """Raises OddrankError for vLLM features that do not go with padded weights, naming what serves instead."""
    if vllm_config.lora_config is not None:
        raise OddrankError(
            f"LoRA adapters have the trained sizes and cannot be added to {_changed(plan)}. Merge the adapter into the "
            "checkpoint, or serve at a size that needs no padding: `oddrank plan MODEL --tp 1-16 --executor vllm` "
            "lists them."
        )


def replicate_vision(model_config: Any, ranks: int) -> None:
    """Keep a vision tower whole on every rank (vLLM's data mode) where its heads do not divide."""
    multimodal = getattr(model_config, "multimodal_config", None)
    vision = getattr(model_config.hf_config, "vision_config", None)
    heads = getattr(vision, "num_heads", None) or getattr(vision, "num_attention_heads", None)
    if multimodal is None or not heads or heads % ranks == 0 or multimodal.mm_encoder_tp_mode == "data":
        return
    multimodal.mm_encoder_tp_mode = "data"
    _logger().info(
        "oddrank: the vision tower's %d heads do not divide by %d, so every rank holds it whole "
        "(--mm-encoder-tp-mode data)", heads, ranks,
    )  # fmt: skip


def _folder(model_config: Any, load_config: Any) -> Any:
    download = getattr(load_config, "download_dir", None)
    return checkpoint_folder(model_config.model, model_config.revision, download)


def _changed(plan: Plan) -> str:
    stock, planned = plan.model.stock(), plan.virtual().counts()
    changed = ", ".join(f"{a} {stock[a]} -> {n}" for a, n in planned.items() if n != stock[a])
    return f"{plan.name} at TP={plan.tp} ({changed or 'in other blocks'})"


def _say(model_config: Any, plan: Plan) -> None:
    _logger().info("oddrank: %s is served as %s", model_config.model, _changed(plan))


def _logger() -> Any:
    from vllm.logger import init_logger

    return init_logger(f"vllm.{__name__}")
