"""Stored matrices decoded by plain torch: one file a kind of numbers, found by the format's name."""

from oddrank.runtime.formats.base import Block, Decoder, decoder, torch_dtype

__all__ = ["Block", "Decoder", "decoder", "torch_dtype"]
