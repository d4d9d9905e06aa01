"""Synthetic checkpoints with the geometry and the tensor names of published ones, and random values."""

from oddrank.synth.release import FORMATS, SIZES, Release, describe_release
from oddrank.synth.write import write_checkpoint, write_headers

__all__ = ["FORMATS", "SIZES", "Release", "describe_release", "write_checkpoint", "write_headers"]
