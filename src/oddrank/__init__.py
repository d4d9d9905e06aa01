"""oddrank: run any LLM checkpoint at any tensor-parallel size, and prove that it computes the same thing."""

from oddrank.errors import CheckFailedError, OddrankError

__version__ = "0.1.0"
__all__ = ["CheckFailedError", "OddrankError", "__version__"]
