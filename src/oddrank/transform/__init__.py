"""Transforms: a plan applied to bytes. Whole on disk (pad), as a stream, or one rank's slice."""
