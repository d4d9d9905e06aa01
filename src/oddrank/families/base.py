"""What a family file declares, and the registry that finds it.

A family is one file in this folder with a module-level `FAMILY`. It says which `model_type`s it knows and builds
a `Model` from a config; nothing outside the file names the family.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from functools import cache
from typing import Any

import msgspec

from oddrank.checkpoint.config import ConfigView
from oddrank.errors import OddrankError
from oddrank.geometry import Model

Config = dict[str, Any]


def _same(config: Config, reader: str) -> Config:
    return config


class Family(msgspec.Struct, frozen=True):
    """One architecture.

    model_types: values of `model_type` in config.json.
    prefixes: where the decoder may sit in tensor names, most usual first ("model.").
    build: (config view, prefix) -> Model; raises OddrankError for a config that makes no sense.
    marker: a config key that makes a config this family's, whatever its model_type.
    respell: (changed text config, reader) -> the same model in a form that `reader` ("transformers" or "vllm")
        loads and computes correctly, where its own class for this family does not. Raises OddrankError if none.
    """

    name: str
    model_types: tuple[str, ...]
    build: Callable[[ConfigView, str], Model]
    prefixes: tuple[str, ...] = ("model.", "")
    marker: str | None = None
    respell: Callable[[Config, str], Config] = _same


@cache
def families() -> dict[str, Family]:
    """Every family file in this folder, by name."""
    import oddrank.families as package

    found: dict[str, Family] = {}
    for info in pkgutil.iter_modules(package.__path__):
        module = importlib.import_module(f"{package.__name__}.{info.name}")
        family = getattr(module, "FAMILY", None)
        if isinstance(family, Family):
            found[family.name] = family
    return found


def family_of(config: ConfigView) -> Family:
    """The family that knows this config's `model_type`. Raises OddrankError naming the known ones."""
    for family in families().values():
        if family.marker is not None and family.marker in config:
            return family
    model_type = config.get_str("model_type", "")
    for family in families().values():
        if model_type in family.model_types:
            return family
    known = ", ".join(sorted(t for f in families().values() for t in f.model_types))
    what = f'model_type "{model_type}", which oddrank does not know' if model_type else "no model_type"
    raise OddrankError(
        f"{config.file} has {what}. Known: {known}. "
        "A new family is one file in oddrank/families that says what each tensor means (docs/adding-a-family.md)."
    )
