"""Checkpoints on disk: headers without weights, mapped views, config dialects, and the atomic writer."""

from oddrank.checkpoint.checkpoint import Checkpoint
from oddrank.checkpoint.config import ConfigView, Rope
from oddrank.checkpoint.dtypes import BITS, STORAGE
from oddrank.checkpoint.header import TensorInfo

__all__ = ["BITS", "STORAGE", "Checkpoint", "ConfigView", "Rope", "TensorInfo"]
