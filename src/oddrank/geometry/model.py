"""A model as its family understands it: axes, pairs, roles, and what else the plan must know."""

from __future__ import annotations

from typing import Literal

import msgspec

from oddrank.geometry.axis import Axis, Pair
from oddrank.geometry.role import Role


class KVCache(msgspec.Struct, frozen=True):
    """A per-token cache: `layers` layers, each `width` elements (keys and values together) per head of `axis`; with
    axis None `width` elements on every rank, which all heads share (MLA's latent). readers: the axis of the query heads
    that attend to it."""

    axis: str | None
    layers: int
    width: int
    readers: str = "q_heads"


class Crosstalk(msgspec.Struct, frozen=True):
    """An operation across the units of an axis, by name. An executor either handles the name or refuses layouts
    that change the axis: e.g. `rms_norm` over all query heads divides by the padded width."""

    axis: str
    operation: Literal["rms_norm", "slopes", "top_k"]
    where: str


class State(msgspec.Struct, frozen=True):
    """A per-request state: `layers` layers, each `nbytes` bytes per element of `axis` (GDN's fp32 matrix of
    key width x value width per value head; its convolution's last inputs)."""

    axis: str
    layers: int
    nbytes: int


class Model(msgspec.Struct, frozen=True):
    """The shape of one checkpoint.

    family: the registry name. architecture: what config.json says, for messages.
    hidden: the residual width, never sharded.
    kv: the caches of its attention layers, one for each geometry of heads; empty where it has none.
    config_axes: config key -> axis, for keys that hold an axis's count; dots lead into objects. An executor that reads
        the config needs as many of two axes that one key counts.
    config_fixed: config keys that must be written out in a changed config, with their values (`head_dim`).
    config_path: keys that lead from the top of config.json to the text config, e.g. ("text_config",).
    ignored: regular expressions of stored tensors that have no role and are passed on as they are: those that carry no
        weights (`rotary_emb.inv_freq`), and towers that every rank has whole.
    """

    family: str
    architecture: str
    hidden: int
    axes: tuple[Axis, ...]
    pairs: tuple[Pair, ...]
    roles: tuple[Role, ...]
    kv: tuple[KVCache, ...]
    config_axes: tuple[tuple[str, str], ...]
    config_fixed: tuple[tuple[str, int], ...] = ()
    config_path: tuple[str, ...] = ()
    ignored: tuple[str, ...] = ()
    states: tuple[State, ...] = ()
    crosstalk: tuple[Crosstalk, ...] = ()

    def axis(self, name: str) -> Axis:
        for axis in self.axes:
            if axis.name == name:
                return axis
        raise KeyError(name)

    def stock(self) -> dict[str, int]:
        """Axis name -> element count of the trained model."""
        return {axis.name: axis.count for axis in self.axes}

    def leader_of(self, follower: str) -> str | None:
        return next((p.leader for p in self.pairs if p.follower == follower), None)

    def counted_together(self) -> list[list[str]]:
        """Axes that one config key counts, of the keys that count several."""
        keys = dict.fromkeys(key for key, _ in self.config_axes)
        found = [[axis for other, axis in self.config_axes if other == key] for key in keys]
        return [axes for axes in found if len(axes) > 1]

    def ratio(self, pair: Pair) -> int:
        stock = self.stock()
        return stock[pair.follower] // stock[pair.leader]
