"""vLLM at any TP size: an out-of-tree plugin that serves the plan's virtual checkpoint, made while vLLM loads it.

vLLM calls `register` in every one of its processes (entry point group `vllm.general_plugins`). With the switch off
it returns before anything of vLLM is imported.
"""

from __future__ import annotations

from oddrank.engines.vllm.settings import Settings


def register() -> None:
    """Install the hooks where ODDRANK=1, else do nothing. Idempotent. Raises OddrankError for a setting that makes no
    sense or a vLLM whose layout it does not know, before anything is installed."""
    settings = Settings.from_environment()
    if settings.on:
        from oddrank.engines.vllm.hooks import install

        install()
