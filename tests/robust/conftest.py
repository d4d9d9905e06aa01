"""The loopback hub, for models that are served from there."""

from hub.conftest import hub

__all__ = ["hub"]
