"""A plan as one self-contained page: who holds what, what it costs, what else was weighed, what was proven."""

from oddrank.picture.page import page

__all__ = ["page"]
