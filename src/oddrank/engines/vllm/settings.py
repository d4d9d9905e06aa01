"""The plugin's knobs: environment variables, because vLLM's own processes inherit those."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TypeVar

import msgspec

from oddrank.errors import OddrankError

T = TypeVar("T")

PREFIX = "ODDRANK"
VARIABLES = {
    "ODDRANK": "1 switches the plugin on; 0 or unset: off",
    "ODDRANK_LAYOUT": "auto, pad or replicate: how heads are laid out",
    "ODDRANK_CONSTRAINTS": "what the target's plan must meet, e.g. gqa=6,mlp_multiple=64",
    "ODDRANK_DRAFTER": "on or off: also plan a speculative drafter",
    "ODDRANK_PLAN_TP": "plan for this many ranks, whatever vLLM's TP size is",
    "ODDRANK_COVERAGE": "strict or warn: what a tensor without a role, or a missing one, does",
}
OTHERS = ("ODDRANK_LOG", "ODDRANK_KERNELS")
"""Variables of the same name that the plugin has no use for and other parts of oddrank do."""

_SWITCH = {"": False, "0": False, "off": False, "false": False, "no": False,
           "1": True, "on": True, "true": True, "yes": True}  # fmt: skip


class Settings(msgspec.Struct, frozen=True):
    """What the environment asks for. plan_tp None: vLLM's TP size."""

    on: bool = False
    layout: str = "auto"
    constraints: dict[str, int] = msgspec.field(default_factory=dict)
    drafter: bool = True
    plan_tp: int | None = None
    strict: bool = True

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] | None = None) -> Settings:
        """Raises OddrankError for a value, or a variable of this name, that it does not know."""
        given = os.environ if environment is None else environment
        mine = {k: v.strip() for k, v in given.items() if k == PREFIX or k.startswith(PREFIX + "_")}
        on = _one_of("ODDRANK", mine.get("ODDRANK", ""), _SWITCH)
        if not on:
            return cls()
        unknown = sorted(set(mine) - {*VARIABLES, *OTHERS})
        if unknown:
            raise OddrankError(
                f"the environment has {', '.join(unknown)}, which the vLLM plugin does not know. It reads "
                f"{', '.join(VARIABLES)}."
            )
        layouts = {name: name for name in ("auto", "pad", "replicate")}
        return cls(
            on=True,
            layout=_one_of("ODDRANK_LAYOUT", mine.get("ODDRANK_LAYOUT") or "auto", layouts),
            constraints=_pairs(mine.get("ODDRANK_CONSTRAINTS", "")),
            drafter=_one_of("ODDRANK_DRAFTER", mine.get("ODDRANK_DRAFTER") or "on", _SWITCH),
            plan_tp=_size(mine.get("ODDRANK_PLAN_TP", "")),
            strict=_one_of(
                "ODDRANK_COVERAGE", mine.get("ODDRANK_COVERAGE") or "strict", {"strict": True, "warn": False}
            ),
        )

    def environment(self) -> dict[str, str]:
        """The variables that say the same to the processes that vLLM starts."""
        said = {
            "ODDRANK": "1" if self.on else "0",
            "ODDRANK_LAYOUT": self.layout,
            "ODDRANK_CONSTRAINTS": ",".join(f"{k}={v}" for k, v in self.constraints.items()),
            "ODDRANK_DRAFTER": "on" if self.drafter else "off",
            "ODDRANK_PLAN_TP": "" if self.plan_tp is None else str(self.plan_tp),
            "ODDRANK_COVERAGE": "strict" if self.strict else "warn",
        }
        return {k: v for k, v in said.items() if v}


def left_out(environment: Mapping[str, str]) -> str | None:
    """The value of VLLM_PLUGINS, vLLM's own list of plugins to load, where oddrank is not on it; else None."""
    allowed = environment.get("VLLM_PLUGINS")
    return None if allowed is None or "oddrank" in allowed.split(",") else allowed


def _one_of(name: str, value: str, known: Mapping[str, T]) -> T:
    if value.lower() not in known:
        names = ", ".join(k for k in known if k)
        raise OddrankError(f'{name}="{value}" is not a value it has: {names}.')
    return known[value.lower()]


def _size(value: str) -> int | None:
    if not value:
        return None
    if not value.isdecimal() or not 1 <= int(value) <= 1024:
        raise OddrankError(f'ODDRANK_PLAN_TP="{value}": give a number of ranks, 1 to 1024.')
    return int(value)


def _pairs(value: str) -> dict[str, int]:
    pairs: dict[str, int] = {}
    for item in filter(None, (p.strip() for p in value.split(","))):
        key, equals, number = (part.strip() for part in item.partition("="))
        if not key or not equals or not number.isdecimal():
            raise OddrankError(f'ODDRANK_CONSTRAINTS has "{item}": give NAME=NUMBER, e.g. gqa=6,mlp_multiple=64.')
        if key in pairs:
            raise OddrankError(f"ODDRANK_CONSTRAINTS gives {key} twice.")
        pairs[key] = int(number)
    return pairs
