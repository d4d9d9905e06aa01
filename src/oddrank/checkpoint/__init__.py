"""Checkpoints on disk: headers without weights, mapped views, config dialects, and the atomic writer."""

from oddrank.checkpoint.atomic import AtomicDirectory
from oddrank.checkpoint.checkpoint import Checkpoint
from oddrank.checkpoint.config import ConfigView, Rope
from oddrank.checkpoint.dtypes import BITS, STORAGE
from oddrank.checkpoint.hashedfile import FileRecord
from oddrank.checkpoint.header import TensorInfo
from oddrank.checkpoint.writer import SafetensorsWriter, by_alignment

__all__ = [
    "BITS",
    "STORAGE",
    "AtomicDirectory",
    "Checkpoint",
    "ConfigView",
    "FileRecord",
    "Rope",
    "SafetensorsWriter",
    "TensorInfo",
    "by_alignment",
]
