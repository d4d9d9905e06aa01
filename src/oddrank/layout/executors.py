"""Executors: who runs the plan. An executor is a set of constraints, nothing else.

Facts about vLLM were read from vLLM 0.32's model code.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from oddrank.errors import OddrankError
from oddrank.geometry import Model
from oddrank.geometry.axis import MOST


class Executor(msgspec.Struct, frozen=True):
    """A set of constraints on layouts.

    equal_ranks: every rank has the same number of slots on every axis, and follower slot i reads leader slot
        i // g. The result exists as a virtual checkpoint.
    width_multiple: channels per rank where a width must be padded or cut unevenly (kernels like aligned rows).
    vocab_multiple: rows per rank, padded in the executor's own buffers; 0 = it cuts the vocabulary anywhere.
    copies_kv: makes KV copies itself where the ranks are a multiple of the KV heads.
    finest_block: the smallest block of scales its kernels take where they take a finer one than stored; 0 = none.
    families, formats: what it has models and kernels for (formats by kind, the first word of their names); empty = not
        known here (an engine of its own).
    reader: whose classes read the changed config.
    handles: crosstalk operations it computes over the real units of all ranks.
    """

    name: str
    equal_ranks: bool
    width_multiple: int
    vocab_multiple: int
    copies_kv: bool
    reader: str
    finest_block: int = 0
    families: tuple[str, ...] = ()
    formats: tuple[str, ...] = ()
    handles: tuple[str, ...] = ()

    def has(self, model: Model) -> bool:
        """Does it have a model of this family, as far as is known here?"""
        return not self.families or model.family in self.families


VLLM = Executor(
    "vllm",
    equal_ranks=True,
    width_multiple=64,
    vocab_multiple=64,
    copies_kv=True,
    reader="vllm",
)
RUNTIME = Executor(
    "runtime",
    equal_ranks=False,
    width_multiple=64,
    vocab_multiple=0,
    copies_kv=False,
    reader="transformers",
    finest_block=64,
    families=(
        "llama",
        "mistral",
        "qwen2",
        "qwen3",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_moe",
        "mixtral",
        "gpt_oss",
        "glm4_moe",
        "seed_oss",
    ),
    formats=("dense", "fp8", "int4", "int8", "mxfp4", "mxfp8", "nvfp4"),
    handles=("rms_norm", "slopes", "top_k"),
)
EXECUTORS: Mapping[str, Executor] = {e.name: e for e in (RUNTIME, VLLM)}


class Constraints(msgspec.Struct, frozen=True):
    """What the user asked for beyond the executor's own constraints.

    gqa: query slots per KV slot. kv_bytes: KV-cache bytes per token, layer and rank. block: rewrite every block
    scale in blocks of this size.
    exact: axis -> planned total. multiple: axis -> the per-rank count must be a multiple.
    """

    gqa: int | None = None
    kv_bytes: int | None = None
    block: int | None = None
    exact: dict[str, int] = msgspec.field(default_factory=dict)
    multiple: dict[str, int] = msgspec.field(default_factory=dict)

    @classmethod
    def parse(cls, given: Mapping[str, int], model: Model) -> Constraints:
        """Sort `name=value` pairs by name. Raises OddrankError for a name this model has no use for."""
        axes = {a.name for a in model.axes if a.kind != "experts"}  # cut inside, so their number never changes
        heads = {a.name for a in model.axes if a.kind == "heads"}
        # a latent that all heads share has no KV heads to group by, and the same bytes in any layout
        shared = bool(model.kv) and all(cache.axis is None for cache in model.kv)
        named = ("block",) if shared else ("gqa", "kv_bytes", "block")
        cached = {cache.axis for cache in model.kv}
        ratio = max((model.ratio(pair) for pair in model.pairs if pair.leader in cached), default=0)
        exact: dict[str, int] = {}
        multiple: dict[str, int] = {}
        for key, value in given.items():
            if value < 1:
                raise OddrankError(f"constraint {key}={value}: the value must be a positive whole number.")
            limit = MOST["heads" if key == "gqa" or key.removesuffix("_multiple") in heads else "width"]
            if value > limit:
                raise OddrankError(f"constraint {key}={value} is beyond any model; at most {limit}.")
            if key == "gqa" and ratio and value > 2 * ratio:
                raise OddrankError(
                    f"constraint gqa={value}: the model's KV heads serve at most {ratio} query heads each, so most of "
                    f"{value} query slots a KV slot would be dummies. At most gqa={2 * ratio}; gqa={ratio} has none."
                )
            if key in named:
                continue
            if key in axes:
                exact[key] = value
            elif key.removesuffix("_multiple") in axes and key.endswith("_multiple"):
                multiple[key.removesuffix("_multiple")] = value
            else:
                names = [*named, *sorted(axes), *(f"{a}_multiple" for a in sorted(axes))]
                raise OddrankError(f"constraint {key}={value} is not one this model has: {', '.join(names)}.")
        return cls(given.get("gqa"), given.get("kv_bytes"), given.get("block"), exact, multiple)
