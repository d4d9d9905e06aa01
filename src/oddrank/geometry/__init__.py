"""The words in which a model's shape is told: axes, dims, roles. Pure values; knows no file, no format, no plan."""

from oddrank.geometry.axis import Axis, Pair
from oddrank.geometry.dims import Along, Concat, Dim, Groups, Slots, Whole
from oddrank.geometry.model import Crosstalk, KVCache, Model, State
from oddrank.geometry.role import Combine, Role

__all__ = [
    "Along",
    "Axis",
    "Combine",
    "Concat",
    "Crosstalk",
    "Dim",
    "Groups",
    "KVCache",
    "Model",
    "Pair",
    "Role",
    "Slots",
    "State",
    "Whole",
]
