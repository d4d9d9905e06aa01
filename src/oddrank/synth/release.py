"""Releases: a family in a format, as somebody published it. Which tensors are quantized, and how."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from oddrank.errors import OddrankError
from oddrank.synth import integers, schemes
from oddrank.synth.gemmas import gemma_table
from oddrank.synth.mixtures import mixture_table
from oddrank.synth.schemes import Part, Scheme
from oddrank.synth.sizes import SIZES, Drafter, Gemma, Hybrid, Mixture, Size
from oddrank.synth.tables import Logical, dense_table, drafter_table, hybrid_table
from oddrank.synth.values import MATRICES, matrix_shape


class Recipe(msgspec.Struct, frozen=True):
    """A format: scheme by tensor kind, for the model and for its MTP layer; what is not named stays bf16.

    stacked, mtp_stacked: experts in two tensors a layer (only gpt-oss's are ever quantized). layer_files: a file per
    layer, as this format's hybrid releases have.
    """

    body: dict[str, Scheme]
    mtp: dict[str, Scheme]
    stacked: bool
    mtp_stacked: bool
    layer_files: bool = False


def _every(scheme: Scheme, *more: str) -> dict[str, Scheme]:
    return dict.fromkeys(("attention", "delta_net", "mlp", "shared", "expert", *more), scheme)


def _nvfp4_ct(fp8: Scheme) -> Recipe:
    body = dict.fromkeys(("attention", "delta_net", "shared"), fp8) | dict.fromkeys(("mlp", "expert"), schemes.NVFP4_CT)
    return Recipe(body, {}, stacked=False, mtp_stacked=True)


FORMATS: dict[str, Recipe] = {
    "bf16": Recipe({}, {}, stacked=True, mtp_stacked=True),
    "fp8-block": Recipe(
        _every(schemes.FP8_BLOCK), _every(schemes.FP8_BLOCK), stacked=False, mtp_stacked=False, layer_files=True
    ),
    "nvfp4-mixed": Recipe(
        dict.fromkeys(("attention", "delta_net"), schemes.FP8_TENSOR)
        | dict.fromkeys(("mlp", "shared", "expert", "lm_head"), schemes.NVFP4),
        {},
        stacked=False,
        mtp_stacked=True,
    ),
    "nvfp4-ct": _nvfp4_ct(schemes.FP8_CHANNEL),
    "nvfp4-ct-block": _nvfp4_ct(schemes.FP8_BLOCK_CT),
    "int8": Recipe(_every(schemes.INT8_CHANNEL), {}, stacked=False, mtp_stacked=True),
    "int4-ct": Recipe(_every(integers.packed()), {}, stacked=False, mtp_stacked=True),
    "int4-ct-asym": Recipe(_every(integers.packed(symmetric=False)), {}, stacked=False, mtp_stacked=True),
    "int8-ct": Recipe(_every(integers.packed(8, 0)), {}, stacked=False, mtp_stacked=True),
    "gptq": Recipe(_every(integers.gptq()), {}, stacked=False, mtp_stacked=True),
    "gptq-int8": Recipe(_every(integers.gptq(8)), {}, stacked=False, mtp_stacked=True),
    "awq": Recipe(_every(integers.awq()), {}, stacked=False, mtp_stacked=True),
    "auto-round": Recipe(_every(integers.gptq(index=False)), {}, stacked=False, mtp_stacked=True),
    "auto-round-awq": Recipe(_every(integers.awq()), {}, stacked=False, mtp_stacked=True),
    "mxfp8": Recipe(_every(schemes.MXFP8), {}, stacked=False, mtp_stacked=True),
    "mxfp4-experts": Recipe({"bank": schemes.MXFP4_BLOCKS}, {}, stacked=True, mtp_stacked=True),
    "fp8-ct": Recipe(_every(schemes.FP8_CHANNEL), _every(schemes.FP8_CHANNEL), stacked=False, mtp_stacked=False),
    "mxfp4": Recipe(
        _every(schemes.MXFP4, "delta_net_gate"), _every(schemes.FP8_CHANNEL_1D), stacked=False, mtp_stacked=False
    ),
}

_HYBRID = ("bf16", "fp8-block", "nvfp4-mixed", "nvfp4-ct", "nvfp4-ct-block", "mxfp4")
PUBLISHED: dict[str, tuple[str, ...]] = {
    "qwen3_5": (*_HYBRID, "gptq"),
    "qwen3_5_moe": (*_HYBRID, "awq", "int4-ct"),
    "dflash": ("bf16", "fp8-block"),
    "llama": ("bf16", "int8", "int4-ct", "int4-ct-asym", "int8-ct"),
    "mistral": ("bf16", "awq"),
    "qwen2": ("bf16", "gptq", "gptq-int8", "awq"),
    "qwen3": ("bf16", "fp8-block", "mxfp8", "auto-round", "auto-round-awq"),
    "qwen3_moe": ("bf16", "fp8-block"),
    "mixtral": ("bf16",),
    "phi3": ("bf16",),
    "seed_oss": ("bf16",),
    "gpt_oss": ("bf16", "mxfp4-experts"),
    "glm4_moe": ("bf16", "fp8-ct"),
    "qwen3_next": ("bf16", "fp8-block"),
    "gemma3": ("bf16",),
    "deepseek_v3": ("bf16", "fp8-block"),
    "minimax_m2": ("bf16", "fp8-block"),
    "gemma4": ("bf16",),
}
"""Family -> the formats it comes in."""


class Stored(msgspec.Struct, frozen=True):
    """A logical tensor in its storage. base: what the parts' suffixes are appended to. scheme: None for a vector."""

    logical: Logical
    base: str
    parts: tuple[Part, ...]
    scheme: Scheme | None

    def names(self) -> tuple[str, ...]:
        return tuple(self.base + part.suffix for part in self.parts)


class Release(msgspec.Struct, frozen=True):
    """One checkpoint to be written.

    family, format, size_name: keys of PUBLISHED, FORMATS, SIZES. size: its numbers, with the layers, experts and
    vocabulary that this checkpoint has. wrapped: a vision-language model's text half and tower.
    """

    family: str
    format: str
    size_name: str
    size: Size
    wrapped: bool
    seed: int

    @property
    def recipe(self) -> Recipe:
        return FORMATS[self.format]

    @property
    def group(self) -> int:
        """Columns of a scale group where the tool leaves them to its user: so many that heads can be parted."""
        return min(integers.GROUP, self.size.head_dim)

    def logical(self) -> Iterator[Logical]:
        """Every logical tensor."""
        size, recipe = self.size, self.recipe
        if isinstance(size, Hybrid):
            return hybrid_table(
                size,
                wrapped=self.wrapped,
                stacked=recipe.stacked,
                mtp_stacked=recipe.mtp_stacked,
                vision=self.wrapped,
                interleaved=self.family == "qwen3_next",
            )
        if isinstance(size, Drafter):
            return drafter_table(size)
        if isinstance(size, Mixture):
            return mixture_table(self.family, size)
        if isinstance(size, Gemma):
            return gemma_table(self.family, size)
        return dense_table(
            size,
            qkv_bias=self.family in ("qwen2", "seed_oss"),
            qk_norm=self.family == "qwen3",
            fused=self.family == "phi3",
        )

    def scheme(self, logical: Logical) -> Scheme | None:
        """How a matrix is stored; None for what is not a matrix and for tensors without a `.weight` to replace."""
        if logical.kind == "bank":
            return self.recipe.body.get("bank")
        if logical.kind not in MATRICES or not logical.name.endswith(".weight"):
            return None
        chosen = (self.recipe.mtp if logical.file == "mtp" else self.recipe.body).get(logical.kind, schemes.DENSE)
        if chosen.regroup is not None:
            chosen = chosen.regroup(self.group)
        n, k = matrix_shape(logical)
        if k % chosen.multiple:
            raise OddrankError(
                f"{logical.name} [{n}, {k}] cannot be stored as {chosen.name}: {k} columns are not a multiple of "
                f"{chosen.multiple}."
            )
        return chosen

    def stored(self) -> Iterator[Stored]:
        """Every logical tensor in its storage, in the order of the tables."""
        for logical in self.logical():
            scheme = self.scheme(logical)
            if scheme is None:
                yield Stored(logical, logical.name, (Part("", "BF16", logical.shape, 0),), None)
            elif scheme is schemes.DENSE:
                yield Stored(logical, logical.name, (Part("", "BF16", logical.shape, 1),), scheme)
            elif logical.kind == "bank":
                experts, k, n = logical.shape  # stored [E, N, K]
                parts = (p._replace(shape=(experts, *p.shape)) for p in scheme.parts(n, k))
                yield Stored(logical, logical.name, tuple(parts), scheme)
            else:
                base = logical.name.removesuffix(".weight")
                yield Stored(logical, base, scheme.parts(*matrix_shape(logical)), scheme)


def describe_release(
    family: str,
    format: str = "bf16",
    *,
    size: str | None = None,
    layers: int | None = 4,
    experts: int | None = 8,
    vocab: int | None = 1024,
    vision: bool = False,
    seed: int = 0,
) -> Release:
    """A release by names. layers, experts, vocab: at most this many of each; None keeps the published number.

    vision: inside a vision-language model (prefix `model.language_model.`), its tower cut to two blocks where
    `layers` cuts the model. Raises OddrankError for a family, format or size that does not exist.
    """
    if family not in SIZES:
        raise OddrankError(f'there is no family "{family}" to synthesize; known are {", ".join(SIZES)}.')
    if format not in PUBLISHED[family]:
        known = ", ".join(PUBLISHED[family])
        raise OddrankError(f"{family} checkpoints do not come in {format}; {family} is known in {known}.")
    size_name = size or next(iter(SIZES[family]))
    if size_name not in SIZES[family]:
        raise OddrankError(f"{family} has no size {size_name}; known are {', '.join(SIZES[family])}.")
    for name, value in (("layers", layers), ("experts", experts), ("vocab", vocab)):
        if value is not None and value < 1:
            raise OddrankError(f"a model cannot have {value} {name}; give at least 1.")
    full = SIZES[family][size_name]
    if vision and not family.startswith("qwen3_5"):
        raise OddrankError(f"{family} has no vision tower; leave out --vision.")
    count = full.layers if layers is None else min(layers, full.layers)
    changes: dict[str, object] = {
        "layers": count,
        "vocab": full.vocab if vocab is None else min(vocab, full.vocab),
    }
    if isinstance(full, (Hybrid, Mixture, Gemma)) and full.experts:
        kept = full.experts if experts is None else min(experts, full.experts)
        # a cut model still leaves experts out, as long as it has two
        chosen = full.chosen if kept == full.experts else max(1, min(full.chosen, kept // 4))
        changes |= {"experts": kept, "chosen": chosen}
        if isinstance(full, Mixture) and kept < full.experts:
            changes["groups"] = (1, 1)
    if isinstance(full, Hybrid) and count < full.layers:
        changes["vision"] = msgspec.structs.replace(full.vision, depth=min(2, full.vision.depth))
    if isinstance(full, Mixture):
        changes["dense"] = min(full.dense, count - 1)  # a cut model still has experts
    if isinstance(full, Gemma):
        changes["borrowing"] = full.borrowing * count // full.layers
    cut = msgspec.structs.replace(full, **changes)
    return Release(family, format, size_name, cut, vision, seed)
