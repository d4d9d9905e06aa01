"""How much a serving engine takes on at once: values that need no torch."""

from __future__ import annotations

import msgspec

from oddrank.errors import OddrankError


class ServingOptions(msgspec.Struct, frozen=True):
    """running: requests in memory at once at most. length: tokens of a prompt and its answer together; None: what the
    model is meant for. chunk: prompt tokens of a step at most. kv_bytes: of KV cache on each rank; None: what is free.
    page: tokens of a page. reuse: whether known prefixes are used again. snapshots: states of linear attention kept at
    the ends of prefixes; snapshot_every: tokens between those of a long prompt or answer.
    """

    running: int = 32
    length: int | None = None
    chunk: int = 512
    kv_bytes: int | None = None
    page: int = 16
    reuse: bool = True
    snapshots: int = 16
    snapshot_every: int = 512

    def check(self) -> None:
        """OddrankError for values that mean nothing."""
        for name, value, least in (
            ("max-running-requests", self.running, 1),
            ("max-model-len", self.length, 2),
            ("chunk", self.chunk, 1),
            ("kv-memory", self.kv_bytes, 1),
            ("page size", self.page, 1),
            ("snapshots", self.snapshots, 0),
            ("snapshot spacing", self.snapshot_every, 1),
        ):
            if value is not None and value < least:
                raise OddrankError(f"{name} is {value} and must be at least {least}.")
