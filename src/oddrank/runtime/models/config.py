"""What the runtime reads of config.json: everything that no tensor's shape and no plan says."""

from collections.abc import Mapping
from typing import Any, Self

import msgspec

from oddrank.checkpoint.config import ConfigView, Rope
from oddrank.errors import OddrankError

_SCALINGS_WITH_ORIGIN = ("llama3", "yarn")


class Defaults(msgspec.Struct, frozen=True):
    """What a family means by keys that config.json does not have.

    sliding: how a family says that layers see a window: "no" (it has none), "all" (`sliding_window` is every
    layer's), "asked" (with `use_sliding_window` it is), "some" (with `use_sliding_window`: the layers of `layer_types`,
    or those from `max_window_layers` on), "alternate" (the layers of `layer_types`, or every other from the first on).
    partial_rotary: the part of each head that is rotated; None where heads are always rotated whole.
    norm_offset: norms multiply by 1 + weight.
    """

    max_positions: int
    head_dim: int | None = None
    sliding: str = "no"
    window: int | None = 4096
    first_window_layer: int = 28
    theta: float = 10000.0
    eps: float = 1e-6
    partial_rotary: float | None = None
    norm_offset: bool = False


class ModelConfig(msgspec.Struct, frozen=True):
    """Of a decoder. Head, channel and row counts are not here: those are the rank slice's.

    windows: per layer, how many tokens back attention sees (itself included); None for all.
    rope: rope_parameters with rope_type and rope_theta filled in. rotary: channels of a head that are rotated.
    """

    hidden: int
    layers: int
    head_dim: int
    vocab: int
    eps: float
    activation: str
    rope: dict[str, Any]
    rotary: int
    norm_offset: bool
    max_positions: int
    tied: bool
    attention_bias: bool
    mlp_bias: bool
    windows: tuple[int | None, ...]

    @classmethod
    def read(cls, raw: Mapping[str, Any], defaults: Defaults) -> Self:
        """From config.json's content. OddrankError for a key that is needed and absent, or makes no sense."""
        outer = ConfigView(raw)
        return cls(tied=outer.tie_word_embeddings(), **cls.values(outer.text(), defaults))

    @classmethod
    def values(cls, view: ConfigView, defaults: Defaults) -> dict[str, Any]:
        """The fields that the text config says. A family with more adds its own."""
        layers = view.require_int("num_hidden_layers")
        max_positions = view.get_int("max_position_embeddings", defaults.max_positions)
        head_dim, rope = view.head_dim(defaults.head_dim), view.rope(defaults.theta)
        if rope.partial not in (None, 1.0) and defaults.partial_rotary is None:
            raise OddrankError(
                f"config.json rotates {rope.partial} of each head, and this family's model rotates all of it."
            )
        part = (defaults.partial_rotary or 1.0) if rope.partial is None else rope.partial
        rotary = int(head_dim * part)
        if rotary < 2 or rotary % 2:
            raise OddrankError(
                f"config.json rotates {part} of each head's {head_dim} channels, which is {rotary}; channels turn in "
                "pairs, so it must be an even number of at least 2. Check head_dim and partial_rotary_factor."
            )
        return {
            "hidden": view.require_int("hidden_size"),
            "layers": layers,
            "head_dim": head_dim,
            "vocab": view.require_int("vocab_size"),
            "eps": view.get_float("rms_norm_eps", defaults.eps),
            "activation": view.get_str("hidden_act", "silu"),
            "rope": _rope(view, rope, max_positions),
            "rotary": rotary,
            "norm_offset": defaults.norm_offset,
            "max_positions": max_positions,
            "attention_bias": view.get_bool("attention_bias", False),
            "mlp_bias": view.get_bool("mlp_bias", False),
            "windows": _windows(view, defaults, layers),
        }


def _rope(view: ConfigView, rope: Rope, max_positions: int) -> dict[str, Any]:
    values = {"rope_type": rope.kind, "rope_theta": rope.theta, **rope.extra}
    if rope.kind in _SCALINGS_WITH_ORIGIN:
        origin = view.get_int("original_max_position_embeddings", 0, low=0)
        values["original_max_position_embeddings"] = (
            origin or values.get("original_max_position_embeddings") or max_positions
        )
    return values


def _windows(view: ConfigView, defaults: Defaults, layers: int) -> tuple[int | None, ...]:
    if defaults.sliding == "no":
        return (None,) * layers
    # An absent key means the default, null means none.
    absent = "sliding_window" not in view.data
    window = defaults.window if absent else view.get_int("sliding_window", 0) or None
    kinds = [str(kind) for kind in view.get_list("layer_types")]
    if kinds and (len(kinds) != layers or set(kinds) - {"full_attention", "sliding_attention"}):
        raise view.error("layer_types", f"{layers} of full_attention and sliding_attention", kinds)
    if defaults.sliding in ("all", "alternate"):
        every = 2 if defaults.sliding == "alternate" else 1
        kinds = kinds or ["full_attention" if i % every else "sliding_attention" for i in range(layers)]
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    if not view.get_bool("use_sliding_window", False):
        return (None,) * layers
    if defaults.sliding == "asked":
        return (window,) * layers
    if kinds:
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    first = view.get_int("max_window_layers", defaults.first_window_layer, low=0)
    return tuple(window if i >= first else None for i in range(layers))
