"""config.json as somebody else wrote it: typed access with clear errors, and the dialects it comes in.

Dialects: a multimodal model wraps its text config; transformers 4 writes `rope_theta`, `rope_scaling` and
`torch_dtype` where transformers 5 writes `rope_parameters` and `dtype`; `head_dim`, `num_key_value_heads` and
`tie_word_embeddings` may be absent and then have implied values.
"""

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from oddrank.checkpoint.header import show
from oddrank.errors import OddrankError

TIED_BY_DEFAULT = frozenset(
    [
        "aya_vision",
        "bloom",
        "cohere",
        "cohere2",
        "cohere2_moe",
        "cohere2_vision",
        "ctrl",
        "ernie4_5",
        "ernie4_5_moe",
        "ernie4_5_vl_moe",
        "ernie4_5_vl_moe_text",
        "falcon",
        "falcon_mamba",
        "gemma",
        "gemma2",
        "gemma3",
        "gemma3_text",
        "gemma3n",
        "gemma3n_text",
        "gemma4",
        "gemma4_text",
        "gpt2",
        "gpt_bigcode",
        "gpt_neo",
        "gpt_neox_japanese",
        "granite_speech",
        "granite_swa",
        "internvl",
        "janus",
        "jetmoe",
        "kimi_k25",
        "lfm2",
        "lfm2_moe",
        "lfm2_vl",
        "mamba",
        "minicpm3",
        "mistral3",
        "modernbert-decoder",
        "mpt",
        "openai-gpt",
        "opt",
        "ovis2",
        "paddleocr_vl",
        "paddleocr_vl_text",
        "paligemma",
        "qwen2_5_omni_text",
        "recurrent_gemma",
        "smollm3",
        "starcoder2",
        "vaultgemma",
        "voxtral_realtime",
        "xglm",
        "youtu",
        "zamba",
        "zamba2",
    ]
)
"""Model types that share the embedding with lm_head where the config does not say (transformers 5.24's
defaults). For every other decoder transformers takes an absent key as false: llama, mistral, qwen2 and qwen3
among them."""

_WRAPPERS = ("text_config", "language_config", "llm_config", "thinker_config")
_MAX_INT = 2**31 - 1

MOST_NAMED = 1 << 14
"""Layers of a model, or experts of a layer: far above any real one, and few enough to name each."""
_MISSING: Any = object()


class Rope(msgspec.Struct, frozen=True):
    """Rotary embedding parameters of one layer type, whichever way the config spells them.

    theta: the base. kind: "default", "linear", "dynamic", "yarn", "llama3", "longrope", ...
    partial: the rotated fraction of head_dim, None where the config does not say. extra: the remaining keys
    as stored.
    """

    theta: float
    kind: str
    partial: float | None
    extra: dict[str, Any]


class ConfigView:
    """Typed access to one object of a config. Every accessor raises OddrankError naming the key and what was
    found.

    A key that is present with the value null counts as absent, as transformers takes it.
    """

    def __init__(self, data: Mapping[str, Any], file: str = "config.json", prefix: str = "") -> None:
        self.data = data
        self.file = file
        self.prefix = prefix

    def __contains__(self, key: str) -> bool:
        return self.data.get(key) is not None

    def require_int(self, key: str, low: int = 1, high: int = _MAX_INT) -> int:
        """A whole number in [low, high]."""
        return self._int(key, self.data.get(key, _MISSING), low, high)

    def get_int(self, key: str, default: int, low: int = 1, high: int = _MAX_INT) -> int:
        """As `require_int`, or `default` where the key is absent."""
        return self._int(key, self.data[key], low, high) if key in self else default

    def count(self, key: str, default: int | None = None, low: int = 1) -> int:
        """How many there are of what tensors are named by (layers, experts): in [low, MOST_NAMED]; where the key is
        absent `default`, if there is one."""
        if default is None:
            return self.require_int(key, low, MOST_NAMED)
        return self.get_int(key, default, low, MOST_NAMED)

    def require_float(self, key: str, low: float = 0.0, high: float = math.inf) -> float:
        """A finite number in [low, high]."""
        return self._float(key, self.data.get(key, _MISSING), low, high)

    def get_float(self, key: str, default: float, low: float = 0.0, high: float = math.inf) -> float:
        """As `require_float`, or `default` where the key is absent."""
        return self._float(key, self.data[key], low, high) if key in self else default

    def require_str(self, key: str) -> str:
        """A string."""
        return self._str(key, self.data.get(key, _MISSING))

    def get_str(self, key: str, default: str) -> str:
        """As `require_str`, or `default` where the key is absent."""
        return self._str(key, self.data[key]) if key in self else default

    def get_bool(self, key: str, default: bool) -> bool:
        """true or false, or `default` where the key is absent."""
        if key not in self:
            return default
        value = self.data[key]
        if not isinstance(value, bool):
            raise self.error(key, "true or false", value)
        return value

    def get_list(self, key: str) -> list[Any]:
        """An array, empty where the key is absent."""
        if key not in self:
            return []
        value = self.data[key]
        if not isinstance(value, list):
            raise self.error(key, "an array", value)
        return value

    def child(self, key: str) -> "ConfigView | None":
        """The object under `key`, None where it is absent."""
        if key not in self:
            return None
        value = self.data[key]
        if not isinstance(value, Mapping):
            raise self.error(key, "an object", value)
        return ConfigView(value, self.file, f"{self.prefix}{key}.")

    def error(self, key: str, expected: str, found: Any = _MISSING) -> OddrankError:
        """The error for a key that does not hold what is expected; for families' own checks too."""
        what = "it is missing" if found is _MISSING else f"it is {_describe(found)}"
        return OddrankError(
            f"{self.file}: {self.prefix}{key} should be {expected}, but {what}. Correct it, or download the "
            f"model's config again."
        )

    @property
    def model_type(self) -> str:
        """The model type, which names the family."""
        return self.require_str("model_type")

    def text(self) -> "ConfigView":
        """The config of the language model: the wrapped one of a multimodal model, else this one itself."""
        for key in _WRAPPERS:
            inner = self.child(key)
            if inner is not None:
                return inner.text()
        return self

    def head_dim(self, default: int | None = None) -> int:
        """`head_dim`; where it is absent the model type's `default`, else hidden_size / num_attention_heads.

        In transformers most types imply the quotient where the key is absent or null, but some have a number
        of their own for an absent key (qwen3: 128), and only null gives the quotient.
        """
        if "head_dim" in self:
            return self.require_int("head_dim")
        if default is not None and "head_dim" not in self.data:
            return default
        hidden, heads = self.require_int("hidden_size"), self.require_int("num_attention_heads")
        if hidden % heads:
            raise OddrankError(
                f"{self.file}: {self.prefix}head_dim is missing, and {self.prefix}hidden_size {hidden} is "
                f"not a multiple of "
                f"{self.prefix}num_attention_heads {heads}, so it cannot be implied either. Write head_dim "
                f"into the config."
            )
        return hidden // heads

    def num_key_value_heads(self, default: int | None = None) -> int:
        """`num_key_value_heads`; where it is absent the model type's `default`, else num_attention_heads.

        Some types have a number of their own for an absent key (mistral: 8, qwen2 and qwen3: 32). It must
        divide the query heads.
        """
        heads = self.require_int("num_attention_heads")
        absent = "num_key_value_heads" not in self.data
        kv_heads = self.get_int("num_key_value_heads", default if default is not None and absent else heads)
        if heads % kv_heads:
            raise OddrankError(
                f"{self.file}: {self.prefix}num_key_value_heads {kv_heads} does not divide "
                f"{self.prefix}num_attention_heads {heads}, so which queries share a KV head is undefined. "
                f"Correct the config."
            )
        return kv_heads

    def tie_word_embeddings(self) -> bool:
        """Whether lm_head is the embedding, for a whole config (call it on the outer one).

        What the outer config says holds, then what the text config says, then the model type's default.
        """
        text = self.text()
        for view in (self, text):
            if "tie_word_embeddings" in view:
                return view.get_bool("tie_word_embeddings", False)
        return self.model_type in TIED_BY_DEFAULT

    def dtype(self) -> str | None:
        """The dtype the weights are meant to be used in ("bfloat16", ...); None if the config is silent."""
        for view in (self, self.text()):
            for key in ("dtype", "torch_dtype"):
                if key in view:
                    return view.require_str(key).removeprefix("torch.")
        return None

    def ropes(self, default_theta: float = 10000.0) -> dict[str, Rope]:
        """Rotary parameters by layer type; by "" alone where all layers share them.

        `default_theta` is the family's, for a config that names no theta. As in transformers, `rope_scaling`
        wins over `rope_parameters`, and a theta inside either wins over the one beside it.
        """
        source = "rope_scaling" if self.data.get("rope_scaling") else "rope_parameters"
        view = self.child(source) or ConfigView({}, self.file, f"{self.prefix}{source}.")
        theta = self.get_float("rope_theta", default_theta, low=1.0)
        partial = self.get_float("partial_rotary_factor", 1.0, 0.0, 1.0) if "partial_rotary_factor" in self else None
        layers = {key for key, value in view.data.items() if key.endswith("attention") and isinstance(value, Mapping)}
        if not layers:
            return {"": _rope(view, theta, partial)}
        return {key: _rope(child, theta, partial) for key in view.data if key in layers and (child := view.child(key))}

    def rope(self, default_theta: float = 10000.0) -> Rope:
        """The rotary parameters that all layers share. OddrankError where layer types differ in them."""
        ropes = self.ropes(default_theta)
        first = next(iter(ropes.values()))
        if any(rope != first for rope in ropes.values()):
            raise OddrankError(
                f"{self.file}: {self.prefix}rope_parameters differ between layer types "
                f"({', '.join(map(show, ropes))}), which "
                f"this model type does not support."
            )
        return first

    def _int(self, key: str, value: Any, low: int, high: int) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            most = f" and at most {high}" if isinstance(value, int) and value > high else ""
            within = f"of at least {low}{most}" if high == _MAX_INT else f"from {low} to {high}"
            raise self.error(key, f"a whole number {within}", value)
        return value

    def _float(self, key: str, value: Any, low: float, high: float) -> float:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not low <= value <= high or not abs(value) <= 1.7e308:
            within = f"of at least {low:g}" if high == math.inf else f"from {low:g} to {high:g}"
            raise self.error(key, f"a finite number {within}", value)
        return float(value)

    def _str(self, key: str, value: Any) -> str:
        if not isinstance(value, str):
            raise self.error(key, "a string", value)
        return value


def _rope(view: ConfigView, theta: float, partial: float | None) -> Rope:
    known = {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
    kind = view.get_str("rope_type", view.get_str("type", "default"))
    if "partial_rotary_factor" in view:
        partial = view.require_float("partial_rotary_factor", 0.0, 1.0)
    extra = {key: value for key, value in view.data.items() if key not in known}
    return Rope(view.get_float("rope_theta", theta, low=1.0), kind, partial, extra)


def _describe(value: Any) -> str:
    """A value of a config as an error shows it: its JSON type, and the value if short."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return f"the string {show(value)}"
    if isinstance(value, int):
        return str(value) if abs(value) < 10**40 else "a number of more than 40 digits"
    if isinstance(value, float):
        return repr(value)
    return f"an {'array' if isinstance(value, list) else 'object'} of {len(value)}"
