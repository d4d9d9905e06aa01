"""Families: what each tensor of an architecture means. One declarative file an architecture."""

from oddrank.families.base import Family, families, family_of

__all__ = ["Family", "families", "family_of"]
