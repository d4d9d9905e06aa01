"""Formats: how a logical matrix is stored. One declarative file a format."""

from oddrank.formats.base import Format, Stored, candidates, fill_word, format_named, formats

__all__ = ["Format", "Stored", "candidates", "fill_word", "format_named", "formats"]
