"""What a user says of where experts live and who computes them. Imports no torch."""

import math
import re

import msgspec

from oddrank.errors import OddrankError
from oddrank.geometry import Model

KINDS = ("resident", "offload", "cpu", "hybrid", "auto")
LOADS = ("serial", "parallel")
_CACHING = ("offload", "hybrid", "auto")


class CacheSize(msgspec.Struct, frozen=True):
    """How many experts of each layer the device keeps: a count, a share of all, or neither: as many as there is room
    for."""

    count: int | None = None
    rate: float | None = None

    @classmethod
    def parse(cls, text: str) -> "CacheSize":
        """ "48" experts a layer; "0.25" or "25%" of them; "auto". OddrankError for anything else."""
        said = text.strip()
        if said == "auto":
            return cls()
        if said.isdecimal():
            if int(said) >= 1:
                return cls(count=int(said))
        elif re.fullmatch(r"\d*\.?\d+%|\d*\.\d*", said) and any(c.isdigit() for c in said):
            rate = float(said[:-1]) / 100 if said.endswith("%") else float(said)
            if 0 < rate <= 1:
                return cls(rate=rate)
        raise OddrankError(
            f'--expert-cache "{text}": give a count of experts a layer (48), a share of them above 0 and at most 1 '
            "(0.25 or 25%), or auto."
        )

    def slots(self, experts: int, room: int) -> int:
        """Of `experts` a layer, how many are kept where there is room for `room`. At least 1."""
        if self.count is not None:
            return min(self.count, experts)
        if self.rate is not None:
            return max(1, math.ceil(self.rate * experts))
        return max(1, min(room, experts))


class ExpertOptions(msgspec.Struct, frozen=True):
    """kind: resident (weights on the device), offload (in host memory, through a cache on the device), cpu (computed by
    CPU threads), hybrid (what is in the cache on the device, the rest on the CPU), auto (measured).
    cache: its size, for offload, hybrid and auto. load: one stored tensor at a time, or a thread each.
    """

    kind: str = "resident"
    cache: CacheSize = CacheSize()
    load: str = "parallel"

    @classmethod
    def parse(cls, kind: str | None, cache: str | None = None, load: str | None = None) -> "ExpertOptions":
        """From what was given, None for what was not. OddrankError for what does not go together."""
        chosen = kind or ("resident" if cache is None else "offload")
        if chosen not in KINDS:
            raise OddrankError(f'--experts "{chosen}" is not one of {", ".join(KINDS)}.')
        if load is not None and load not in LOADS:
            raise OddrankError(f'--expert-load "{load}" is not one of {", ".join(LOADS)}.')
        if cache is not None and chosen not in _CACHING:
            raise OddrankError(
                f"--expert-cache {cache} sizes the cache that experts in host memory are copied through, and "
                f"--experts {chosen} has none. Choose --experts {' or '.join(_CACHING)}, or leave --expert-cache out."
            )
        size = CacheSize() if cache is None else CacheSize.parse(cache)
        return cls(chosen, size, load or "parallel")

    def check(self, model: Model) -> None:
        """OddrankError where `model` has no experts and these options are about some."""
        if self != ExpertOptions() and not any(axis.kind == "experts" for axis in model.axes):
            raise OddrankError(
                f"This model ({model.family}) has no routed experts; leave out --experts, --expert-cache and "
                "--expert-load."
            )
