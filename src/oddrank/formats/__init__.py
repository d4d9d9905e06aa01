"""Formats: how a logical matrix is stored. One declarative file a format."""

from oddrank.formats.base import Format, Stored, fill_word, formats

__all__ = ["Format", "Stored", "fill_word", "formats"]
