"""The oracle: transformers on the original checkpoint, TP=1, no oddrank code in its path."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import numpy as np

from oddrank.errors import OddrankError
from oddrank.verify.compare import Logits

DTYPES = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32", "fp64": "float64"}


def transformers_logits(model: str | os.PathLike[str], prompts: Sequence[Sequence[int]], dtype: str) -> list[Logits]:
    """Logits at every position of every prompt (token ids), [tokens, vocab] each, by transformers in `dtype`.

    Raises OddrankError where transformers cannot load the directory.
    """
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            os.fspath(model), dtype=getattr(torch, DTYPES[dtype]), local_files_only=True, attn_implementation="eager"
        )
    except (OSError, ValueError, KeyError, RuntimeError, ImportError) as error:
        first = " ".join(str(error).split())[:400]
        raise OddrankError(f"transformers cannot load {model}, so nothing can be verified: {first}") from error
    loaded.eval()
    found: list[Logits] = []
    with torch.inference_mode():
        for ids in prompts:
            out = loaded(torch.tensor([list(ids)]), use_cache=False)
            found.append(np.asarray(out.logits[0].double().numpy(), dtype=np.float64))
    return found


DEFAULT_TEXTS = (
    "The history of the bicycle begins in the early nineteenth century, when a German inventor",
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "Water boils at a lower temperature on a mountain because",
)


def default_prompts(model: str | os.PathLike[str], vocab: int) -> list[list[int]]:
    """Token ids of a few fixed texts; for a checkpoint without a tokenizer, seeded random ones (a tiny test model)."""
    from pathlib import Path

    from oddrank.runtime.generate import encode, load_tokenizer

    if (Path(model) / "tokenizer.json").exists() or (Path(model) / "tokenizer_config.json").exists():
        tokenizer = load_tokenizer(Path(model))
        return [encode(tokenizer, text) for text in DEFAULT_TEXTS]
    random = np.random.default_rng(0)
    return [random.integers(0, vocab, size=n).tolist() for n in (24, 7)]
