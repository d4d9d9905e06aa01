"""Synthetic checkpoints with the geometry and the tensor names of published ones, and random values."""

from oddrank.synth.release import FORMATS, PUBLISHED, Release, describe_release
from oddrank.synth.sizes import SIZES
from oddrank.synth.write import write_checkpoint, write_headers

__all__ = ["FORMATS", "PUBLISHED", "SIZES", "Release", "describe_release", "write_checkpoint", "write_headers"]
