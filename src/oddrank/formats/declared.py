"""What a checkpoint's config says of how each linear layer is stored.

oddrank goes by what the tensors are; this is only held against them, because the lists in configs carry wrapper
prefixes and wildcards and are sometimes wrong, and whoever reads the config (an engine) will do what it says.
Sources: transformers 5.24 (quantizers' matching of `modules_to_not_convert`), compressed-tensors 0.20 (`targets`,
`ignore`), NVIDIA ModelOpt (`quantized_layers`, `exclude_modules`), AMD Quark (`layer_quant_config`, `exclude`),
GPTQModel (`dynamic`), auto-round 0.16 (`extra_config`, `block_name_to_quantize`).
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any

from oddrank.checkpoint.header import show
from oddrank.errors import OddrankError

Declared = Callable[[str], str | None]
"""Module name -> "dense", "fp8", "nvfp4", "mxfp4", "mxfp8", "int4", "int8", or None where the config says nothing of
it."""

PATIENCE = 2.0
"""Seconds that a pattern may take for one name; it takes microseconds."""

WRAPPERS = ("model.language_model.", "language_model.model.", "language_model.", "model.")


def kind_of(format_name: str) -> str:
    """The family of number formats a format belongs to: fp8-block-ct -> fp8."""
    return format_name.partition("-")[0]


def declared(quantization: dict[str, Any] | None, modelopt: dict[str, Any] | None = None) -> Declared:
    """What `quantization_config` (and ModelOpt's `hf_quant_config.json`) says of any module.

    A config of a method it does not know says nothing.
    """
    config = quantization or {}
    if not config and modelopt:
        config = {"quant_method": "modelopt", **_dict(modelopt.get("quantization"))}
    method = str(config.get("quant_method", "")).replace("_", "-")
    if method == "fp8":
        return _rules([], _list(config.get("modules_to_not_convert")), "fp8", loose=True)
    if method == "compressed-tensors":
        return _compressed_tensors(config)
    if method == "modelopt" or method.startswith("modelopt"):
        if modelopt and not config.get("quantized_layers"):
            config = {**_dict(modelopt.get("quantization")), **config}
        return _modelopt(config)
    if method == "quark":
        return _quark(config)
    if method == "mxfp4":
        return _rules([], _list(config.get("modules_to_not_convert")), None, loose=True)
    if method == "gptq":
        return _gptq(config)
    if method == "awq":
        bits = config.get("bits", config.get("w_bit", 4))
        return _rules([], _list(config.get("modules_to_not_convert")), _integer(bits), loose=True)
    if method.endswith("auto-round"):
        return _auto_round(config)
    if not method:
        return _rules([], [], "dense", loose=False)
    return lambda name: None


def _compressed_tensors(config: dict[str, Any]) -> Declared:
    exact: list[tuple[str, str | None]] = []
    everything: str | None = "dense"
    for group in _dict(config.get("config_groups")).values():
        kind = _scheme(_dict(_dict(group).get("weights")))
        for target in _list(_dict(group).get("targets")):
            if target == "Linear":
                everything = kind
            else:
                exact.append((target, kind))
    return _rules(exact, _list(config.get("ignore")), everything, loose=False)


def _scheme(weights: dict[str, Any]) -> str | None:
    bits, float_like, group = weights.get("num_bits"), weights.get("type") == "float", weights.get("group_size")
    if bits == 8:
        return ("mxfp8" if group == 32 else "fp8") if float_like else "int8"
    if bits == 4:
        return ("nvfp4" if group == 16 else "mxfp4") if float_like else "int4"
    return None


def _modelopt(config: dict[str, Any]) -> Declared:
    exclude = _list(config.get("exclude_modules")) + _list(config.get("ignore"))
    names = {"FP8": "fp8", "NVFP4": "nvfp4", "MXFP8": "mxfp8", "FP8_PB_WO": "fp8", "W4A16_NVFP4": "nvfp4"}
    algorithm = str(config.get("quant_algo", ""))
    layers = _dict(config.get("quantized_layers"))
    if layers:
        listed = [(name, names.get(str(_dict(v).get("quant_algo")))) for name, v in layers.items()]
        return _rules(listed, exclude, "dense", loose=False)
    return _rules([], exclude, names.get(algorithm), loose=False)


def _quark(config: dict[str, Any]) -> Declared:
    def kind(part: Any) -> str | None:
        weight = _dict(_dict(part).get("weight"))
        dtype = str(weight.get("dtype", ""))
        if dtype.startswith("fp8"):
            return "fp8"
        return "mxfp4" if dtype == "fp4" and weight.get("group_size") == 32 else None

    listed = [(name, kind(part)) for name, part in _dict(config.get("layer_quant_config")).items()]
    return _rules(listed, _list(config.get("exclude")), kind(config.get("global_quant_config")), loose=False)


def _integer(bits: object) -> str | None:
    """The kind of that many bits; 16 and more are left as they were."""
    if not isinstance(bits, int):
        return None
    return "dense" if bits >= 16 else f"int{bits}" if bits in (4, 8) else None


def _gptq(config: dict[str, Any]) -> Declared:
    """`dynamic` has patterns of module names: "-:" leaves one as it was, "+:" or nothing changes its parameters."""
    said = _integer(config.get("bits"))
    listed: list[tuple[str, str | None]] = []
    for pattern, change in _dict(config.get("dynamic")).items():
        bits = _dict(change).get("bits")
        kind = "dense" if pattern.startswith("-:") else said if bits is None else _integer(bits)
        listed.append(("re:" + pattern.removeprefix("+:").removeprefix("-:"), kind))
    if not config.get("lm_head"):
        listed.append(("lm_head", "dense"))
    inside = config.get("modules_in_block_to_quantize")
    parts = inside if isinstance(inside, list) else []
    names = _list([name for part in parts for name in (part if isinstance(part, list) else [part])])
    if not names:
        return _rules(listed, [], said, loose=False)
    listed += [(f"re:.*{re.escape(name)}$", said) for name in names]
    return _rules(listed, [], "dense", loose=False)


def _auto_round(config: dict[str, Any]) -> Declared:
    """`extra_config` has module names and patterns; outside the blocks that are quantized, all else is as it was."""

    def kind(part: dict[str, Any]) -> str | None:
        data, bits = str(part.get("data_type", "int")), part.get("bits")
        if data == "int" or (isinstance(bits, int) and bits >= 16):
            return _integer(bits)
        return {"mx_fp": f"mxfp{bits}", "nv_fp": "nvfp4", "fp": "fp8"}.get(data)

    said = kind(config)
    listed: list[tuple[str, str | None]] = []
    for name, change in _dict(config.get("extra_config")).items():
        found = kind({**config, **{k: v for k, v in _dict(change).items() if v is not None}})
        listed.append((name if re.fullmatch(r"[\w.]+", name) else f"re:(?:.*?){name}", found))
    blocks = config.get("block_name_to_quantize")
    named = blocks.split(",") if isinstance(blocks, str) else _list(blocks)
    listed += [(rf"re:{re.escape(name.strip())}(?:\.|$)", said) for name in named]
    return _rules(listed, [], "dense" if named else said, loose=False)


def _rules(
    listed: Iterable[tuple[str, str | None]], ignored: list[str], otherwise: str | None, *, loose: bool
) -> Declared:
    """Ignored modules are dense; then what is listed by name or pattern; then everything else.

    loose: a name also stands for modules whose dotted name contains it, as in `modules_to_not_convert`.
    """
    skip = _Matcher([(name, "dense") for name in ignored], loose)
    found = _Matcher(listed, False)

    def say(name: str) -> str | None:
        if skip.match(name) is not None:
            return "dense"
        hit = found.match(name)
        return hit[0] if hit is not None else otherwise

    return say


_Pattern = Callable[[str], bool]


def _compiled(expression: str) -> list[_Pattern]:
    """Whether a name begins with what the expression says; nothing for what is no expression."""
    import regex  # which can stop: some expressions take longer than anybody waits

    try:
        compiled = regex.compile(expression)
    except (regex.error, OverflowError, RecursionError, ValueError):
        return []

    def match(name: str) -> bool:
        try:
            return compiled.match(name, timeout=PATIENCE) is not None
        except TimeoutError:
            raise OddrankError(
                f"quantization_config has the pattern {show(expression)}, and whether it matches {show(name)} is not "
                f"known after {PATIENCE:g} s: its repeats are nested. Simplify it."
            ) from None

    return [match]


class _Matcher:
    """Names, wildcards and `re:` patterns, whichever wrapper prefix either side carries."""

    def __init__(self, entries: Iterable[tuple[str, str | None]], loose: bool) -> None:
        self._names: dict[str, str | None] = {}
        self._patterns: list[tuple[_Pattern, str | None]] = []
        for entry, kind in entries:
            if entry.startswith("re:"):
                self._patterns += [(pattern, kind) for pattern in _compiled(entry[3:])]
            elif any(c in entry for c in "*?["):
                self._patterns += [(pattern, kind) for pattern in _compiled(fnmatch.translate(entry))]
            else:
                for spelling in spellings(entry):
                    self._names.setdefault(spelling, kind)
        self._loose = list(self._names) if loose and len(self._names) < 64 else []

    def match(self, name: str) -> tuple[str | None] | None:
        """(kind,) of the first entry that matches, None if none does."""
        for spelling in spellings(name):
            if spelling in self._names:
                return (self._names[spelling],)
            # a listed block covers what is inside it
            for parent in _parents(spelling):
                if parent in self._names:
                    return (self._names[parent],)
        for pattern, kind in self._patterns:
            if any(pattern(s) for s in spellings(name)):
                return (kind,)
        for part in self._loose:
            if f".{part}." in f".{name}.":
                return (self._names[part],)
        return None


@lru_cache(maxsize=1 << 12)
def spellings(name: str) -> tuple[str, ...]:
    """A module's name with each wrapper prefix exchanged for the others."""
    bare = next((name.removeprefix(w) for w in WRAPPERS if name.startswith(w)), name)
    return tuple(dict.fromkeys([name, bare, *(w + bare for w in WRAPPERS)]))


def _parents(name: str) -> Iterator[str]:
    while "." in name:
        name = name.rpartition(".")[0]
        yield name


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[str]:
    return [v for v in value if isinstance(v, str)] if isinstance(value, list) else []
